//! `dev.json`: how other programs find the engine that `dev` runs.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::cluster::Cluster;

#[derive(Clone)]
pub(super) struct DevFile {
    path: PathBuf,
    /// Watchers of several children write at the same time.
    writing: Arc<Mutex<()>>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Content {
    gateways: Vec<String>,
    /// Kept between runs.
    workspace_key: String,
    database_url: String,
    nats_url: String,
    metrics: Vec<String>,
    pids: BTreeMap<String, u32>,
}

/// Addresses of the engine that `dev` runs at this moment.
pub(crate) struct RunningEngine {
    pub(crate) gateways: Vec<String>,
    pub(crate) workspace_key: String,
}

impl RunningEngine {
    /// Reads them from the state folder of `dev`.
    pub(crate) fn find(state_dir: &Path) -> Result<Self> {
        let file = DevFile::new(state_dir);
        let Content { gateways, workspace_key, .. } = file.read();
        let path = file.path().display();
        ensure!(!gateways.is_empty(), "no engine runs (says {path}): start `cargo xtask dev` in another terminal");
        Ok(Self { gateways, workspace_key })
    }
}

impl DevFile {
    pub(super) fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join("dev.json"), writing: Arc::default() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The key of an earlier run.
    pub(super) fn workspace_key(&self) -> Option<String> {
        Some(self.read().workspace_key).filter(|key| !key.is_empty())
    }

    pub(super) fn write(&self, cluster: &Cluster, workspace_key: &str) -> Result<()> {
        // The pids are read under the lock: an older list must not replace a newer one.
        let _writing = self.lock();
        self.replace(&Content {
            gateways: cluster.gateways().iter().map(|gateway| gateway.url().to_owned()).collect(),
            workspace_key: workspace_key.to_owned(),
            database_url: cluster.backends.database_url.clone(),
            nats_url: cluster.backends.nats_url.clone(),
            metrics: cluster.services().map(|service| service.metrics_url().to_owned()).collect(),
            pids: cluster.pids(),
        })
    }

    /// Says that nothing runs, and keeps the workspace key.
    pub(super) fn write_stopped(&self) -> Result<()> {
        let _writing = self.lock();
        let workspace_key = self.read().workspace_key;
        self.replace(&Content { workspace_key, ..Content::default() })
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> Content {
        // A file that is missing or unreadable says that nothing runs.
        let text = fs::read_to_string(&self.path).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// Readers see the old file or the new one, and other users do not see the key.
    fn replace(&self, content: &Content) -> Result<()> {
        let fresh = self.path.with_extension("json.new");
        // A run that was killed may have left one, at which `create_new` would fail.
        let _ = fs::remove_file(&fresh);
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&fresh)
            .with_context(|| format!("create {}", fresh.display()))?;
        file.write_all(serde_json::to_string_pretty(content)?.as_bytes())?;
        file.write_all(b"\n")?;
        fs::rename(&fresh, &self.path)?;
        Ok(())
    }
}
