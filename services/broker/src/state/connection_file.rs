//! `connection.json`: where clients find the local API and its key.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::{StateDirectory, write_private_file};

const FILE: &str = "connection.json";

/// Content of the file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Connection {
    pub(crate) url: String,
    pub(crate) port: u16,
    pub(crate) api_key: String,
    pub(crate) pid: u32,
}

/// The written file. Dropping it removes it, so that a failed start leaves none behind.
#[derive(Debug)]
pub(crate) struct ConnectionFile {
    path: PathBuf,
}

impl ConnectionFile {
    /// Writes the file into the state directory. Blocks: nothing is served before it is there.
    pub(crate) fn write(directory: &StateDirectory, url: &str, port: u16, api_key: &str) -> Result<Self> {
        let path = directory.path().join(FILE);
        let content = Connection { url: url.to_owned(), port, api_key: api_key.to_owned(), pid: std::process::id() };
        let content = serde_json::to_vec(&content).context("encode the connection file")?;
        write_private_file(&path, &content).with_context(|| format!("write {}", path.display()))?;
        Ok(Self { path })
    }

    /// Reads the file that a running broker has written.
    pub(crate) fn read(directory: &std::path::Path) -> Result<Connection> {
        let path = directory.join(FILE);
        let content = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_slice(&content).with_context(|| format!("read {}", path.display()))
    }
}

impl Drop for ConnectionFile {
    fn drop(&mut self) {
        // Blocks for one call, at the end of the process.
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the connection file could not be removed");
        }
    }
}
