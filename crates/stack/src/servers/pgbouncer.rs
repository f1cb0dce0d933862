//! Private PgBouncer in front of a Postgres server.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use reqwest::Url;
use tempfile::NamedTempFile;

use super::{account, psql};
use crate::ports::Port;
use crate::process::{Process, Spec, impl_process_controls};

const READY_WITHIN: Duration = Duration::from_secs(30);

/// Private PgBouncer in transaction mode on a loopback port.
#[derive(Debug)]
pub struct PgBouncer {
    process: Process,
    port: Port,
    /// URL of a database through the pooler, by which its readiness is judged.
    probe_url: String,
    /// Removed with this.
    _configuration: NamedTempFile,
}

impl PgBouncer {
    /// Starts a pooler for all databases of the server at `url`, with at most `servers` connections to each. Its log is
    /// in `dir`.
    pub async fn start(dir: &Path, url: &str, servers: u32) -> Result<Self> {
        let port = Port::free()?;
        let configuration = write_configuration(&configuration(url, port.number(), servers)?)?;
        let mut spec = Spec::new("pgbouncer", find_program()?, dir.join("pgbouncer.log"));
        spec.args = vec![configuration.path().display().to_string()];
        // It refuses to run as root.
        spec.run_as = account::postgres_account();
        let probe_url = port.replace_address(url)?;
        let pooler = Self { process: Process::start(spec)?, port, probe_url, _configuration: configuration };
        pooler.wait_until_ready().await?;
        Ok(pooler)
    }

    /// Returns the URL of a database of the server, through the pooler.
    pub fn through(&self, url: &str) -> Result<String> {
        self.port.replace_address(url)
    }

    /// Starts the pooler again on the same port, after it was killed.
    pub async fn restart(&self) -> Result<()> {
        self.process.kill9();
        self.process.start_again()?;
        self.wait_until_ready().await
    }

    async fn wait_until_ready(&self) -> Result<()> {
        let probe = || async { psql::query(&self.probe_url, "select 1").await.map(|_| ()) };
        self.process.wait_until_ready(READY_WITHIN, probe).await
    }
}

impl_process_controls!(PgBouncer);

/// Returns the program, which Debian installs outside of the PATH of users.
fn find_program() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    let found = dirs.map(|dir| dir.join("pgbouncer")).find(|program| program.is_file());
    found.context("install PgBouncer 1.18 or newer (Debian: `apt-get install pgbouncer`)")
}

/// Builds the configuration. Everything that is not set has its default, so that the engine needs nothing special.
fn configuration(url: &str, port: u16, servers: u32) -> Result<String> {
    let url = Url::parse(url).context("parse the URL of the server")?;
    let host = url.host_str().context("a URL with a host")?;
    let (server_port, user) = (url.port().unwrap_or(5432), url.username());
    let password = url.password().unwrap_or_default();
    Ok(format!(
        "[databases]
* = host={host} port={server_port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
; Clients of this machine; the server asks for the password above.
auth_type = any
pool_mode = transaction
max_client_conn = 1000
default_pool_size = {servers}
server_login_retry = 1
query_wait_timeout = 5
"
    ))
}

/// Writes a file that the pooler's user can read, wherever the folders of this user are.
fn write_configuration(text: &str) -> Result<NamedTempFile> {
    let mut file = tempfile::Builder::new().prefix("relay-pgbouncer-").suffix(".ini").tempfile_in("/var/tmp")?;
    file.write_all(text.as_bytes())?;
    fs::set_permissions(file.path(), fs::Permissions::from_mode(0o644))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pooler_connects_as_the_user_of_the_url() {
        let text = configuration("postgres://u:secret@127.0.0.1:5433/relay", 6432, 3).unwrap();
        assert!(text.contains("* = host=127.0.0.1 port=5433 user=u password=secret\n"), "{text}");
        assert!(text.contains("listen_port = 6432\n") && text.contains("default_pool_size = 3\n"), "{text}");
    }
}
