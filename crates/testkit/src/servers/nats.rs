//! A private nats-server with JetStream in a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use super::find;
use crate::ports::Port;
use crate::process::{Process, Spec};
use crate::wait;

const READY_WITHIN: Duration = Duration::from_secs(30);
const STOP_WITHIN: Duration = Duration::from_secs(15);

/// A nats-server of our own, on a loopback port that stays the same over restarts.
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
        let dir = dir.canonicalize()?;
        let port = Port::free()?;
        let config = dir.join("nats.conf");
        let store = dir.join("jetstream");
        fs::write(&config, configuration(port.number(), &store))?;
        let mut spec = Spec::new("nats", find::nats_server()?, dir.join("nats.log"));
        spec.args = vec!["-c".into(), config.display().to_string()];
        spec.cwd = Some(dir);
        let server = Self { process: Process::start(spec)?, port, store };
        server.wait_until_ready().await?;
        Ok(server)
    }

    /// `nats://host:port`.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address())
    }

    /// `host:port`.
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// Where JetStream keeps its files.
    pub fn store_dir(&self) -> &Path {
        &self.store
    }

    /// The server's pid.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Whether the server process runs.
    pub fn is_running(&self) -> bool {
        self.process.is_running()
    }

    /// Graceful stop.
    pub async fn stop(&self) -> Result<()> {
        self.process.stop_with(libc::SIGTERM, STOP_WITHIN).await?;
        Ok(())
    }

    /// `kill -9`.
    pub fn kill9(&self) {
        self.process.kill9();
    }

    /// Stops the server if it runs and starts it again on the same port and data.
    pub async fn restart(&self) -> Result<()> {
        if self.process.is_running() {
            self.stop().await?;
        }
        self.process.start_again()?;
        self.wait_until_ready().await
    }

    /// Freezes the server: connections stay, nothing moves.
    pub fn sigstop(&self) {
        self.process.sigstop();
    }

    /// Wakes it.
    pub fn sigcont(&self) {
        self.process.sigcont();
    }

    async fn wait_until_ready(&self) -> Result<()> {
        wait::until_ok("nats-server to greet with JetStream", READY_WITHIN, || async {
            if !self.process.is_running() {
                return Ok(Err(anyhow::anyhow!("nats-server ended:\n{}", self.process.log_tail(15))));
            }
            greets_with_jetstream(&self.address()).await.map(Ok)
        })
        .await?
    }
}

/// The first line a nats-server sends names its features.
async fn greets_with_jetstream(address: &str) -> Result<()> {
    let mut socket = TcpStream::connect(address).await?;
    let mut greeting = vec![0; 4096];
    let length =
        tokio::time::timeout(Duration::from_secs(1), socket.read(&mut greeting)).await.context("no greeting")??;
    let greeting = String::from_utf8_lossy(&greeting[..length]);
    anyhow::ensure!(greeting.contains(r#""jetstream":true"#), "no JetStream yet: {greeting}");
    Ok(())
}

fn configuration(port: u16, store: &Path) -> String {
    // sync_interval: what a power cut may lose of the log; Postgres repairs it (docs: "What each store is for").
    // max_payload: a 900 KiB deliver frame with its headers must fit.
    format!(
        r#"server_name: "relay-local"
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stream_keeps_its_messages_over_a_stop_and_a_kill() {
        let dir = tempfile::tempdir().unwrap();
        let nats = Nats::start(dir.path()).await.unwrap();
        let jetstream = async_nats::jetstream::new(async_nats::connect(nats.url()).await.unwrap());
        let config = async_nats::jetstream::stream::Config {
            name: "T".into(),
            subjects: vec!["t.>".into()],
            ..Default::default()
        };
        jetstream.create_stream(config).await.unwrap();
        jetstream.publish("t.1", "one".into()).await.unwrap().await.unwrap();
        nats.restart().await.unwrap();
        nats.kill9();
        nats.restart().await.unwrap();
        let jetstream = async_nats::jetstream::new(async_nats::connect(nats.url()).await.unwrap());
        let mut stream = jetstream.get_stream("T").await.unwrap();
        assert_eq!(stream.info().await.unwrap().state.messages, 1);
        nats.stop().await.unwrap();
        assert!(!nats.is_running());
    }
}
