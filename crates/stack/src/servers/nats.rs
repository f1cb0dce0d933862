//! Private nats-server with JetStream in a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::net::TcpStream;

use super::find;
use crate::ports::Port;
use crate::process::{Process, Spec, impl_process_controls};

const READY_WITHIN: Duration = Duration::from_secs(30);
const STOP_WITHIN: Duration = Duration::from_secs(15);
/// A greeting names every server of a cluster.
const GREETING_BYTES: u64 = 64 * 1024;
const GREETING_WITHIN: Duration = Duration::from_secs(1);

/// Private nats-server on a loopback port that stays the same over restarts.
#[derive(Debug)]
pub struct Nats {
    process: Process,
    port: Port,
    store: PathBuf,
}

impl Nats {
    /// Starts a server whose JetStream files are in `dir`.
    pub async fn start(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir)?;
        // The server runs in this folder, from which a relative path would lead elsewhere.
        let dir = dir.canonicalize()?;
        let port = Port::free()?;
        let store = dir.join("jetstream");
        let text = configuration("relay-local", port.number(), &store);
        let server = Self::start_on(&dir, port, &text)?;
        server.wait_until_ready().await?;
        Ok(server)
    }

    /// Starts a server with this configuration, without waiting for it. Its JetStream files are in `jetstream`.
    pub(super) fn start_on(dir: &Path, port: Port, configuration: &str) -> Result<Self> {
        let (config, store) = (dir.join("nats.conf"), dir.join("jetstream"));
        fs::write(&config, configuration)?;
        let mut spec = Spec::new("nats", find::nats_server()?, dir.join("nats.log"));
        spec.args = vec!["-c".into(), config.display().to_string()];
        spec.cwd = Some(dir.to_owned());
        Ok(Self { process: Process::start(spec)?, port, store })
    }

    /// Starts a server with a given configuration file, without port, address and store, and its variables. `flags`
    /// take precedence over the file.
    pub async fn start_configured(
        dir: &Path,
        config: &Path,
        flags: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let dir = dir.canonicalize()?;
        let port = Port::free()?;
        let store = dir.join("jetstream");
        let mut spec = Spec::new("nats", find::nats_server()?, dir.join("nats.log"));
        let (config, port_number) = (config.display().to_string(), port.number().to_string());
        let store_dir = store.display().to_string();
        let own = ["-c", &config, "--addr", "127.0.0.1", "--port", &port_number, "--store_dir", &store_dir];
        spec.args = own.iter().chain(flags).map(|argument| (*argument).to_owned()).collect();
        spec.env = variables.iter().map(|(name, value)| ((*name).to_owned(), Some((*value).to_owned()))).collect();
        spec.cwd = Some(dir);
        let server = Self { process: Process::start(spec)?, port, store };
        server.wait_until_ready().await?;
        Ok(server)
    }

    /// Returns the URL, `nats://host:port`.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address())
    }

    /// Returns the address, `host:port`.
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// Returns the folder of JetStream's files.
    pub fn store_dir(&self) -> &Path {
        &self.store
    }

    /// Stops the server gracefully.
    pub async fn stop(&self) -> Result<()> {
        self.process.stop_with(libc::SIGTERM, STOP_WITHIN).await?;
        Ok(())
    }

    /// Restarts the server on the same port and data.
    pub async fn restart(&self) -> Result<()> {
        if self.process.is_running() {
            self.stop().await?;
        }
        self.process.start_again()?;
        self.wait_until_ready().await
    }

    pub(super) async fn wait_until_ready(&self) -> Result<()> {
        let probe = || async {
            let greeting = read_greeting(&self.address()).await?;
            ensure!(greeting["jetstream"] == true, "no JetStream yet: {greeting}");
            Ok(())
        };
        self.process.wait_until_ready(READY_WITHIN, probe).await
    }
}

impl_process_controls!(Nats);

/// Returns the first line of a nats-server: `INFO` with its version and features.
pub(super) async fn read_greeting(address: &str) -> Result<Value> {
    let read = async {
        let mut line = String::new();
        BufReader::new(TcpStream::connect(address).await?).take(GREETING_BYTES).read_line(&mut line).await?;
        anyhow::Ok(line)
    };
    let line = tokio::time::timeout(GREETING_WITHIN, read).await.context("no greeting")??;
    let info = line
        .strip_prefix("INFO ")
        .with_context(|| format!("{address} is not a nats-server: its first line is {line:?}"))?;
    serde_json::from_str(info).with_context(|| format!("read the greeting {info:?}"))
}

pub(super) fn configuration(name: &str, port: u16, store: &Path) -> String {
    // sync_interval: the part of the log that a power failure may lose; it is repaired from Postgres (docs: "What each
    // store is for").
    // max_payload: a 900 KiB deliver frame with its headers must fit.
    format!(
        r#"server_name: "{name}"
listen: "127.0.0.1:{port}"
max_payload: 2MB
max_pending: 256MB
jetstream {{
  store_dir: "{}"
  max_memory_store: 256MB
  max_file_store: 16GB
  sync_interval: "1s"
}}
"#,
        store.display()
    )
}
