//! Private Postgres cluster in a folder.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::postgres_template::{SUPERUSER, create_cluster};
use super::{account, find, psql};
use crate::ports::Port;
use crate::process::{Process, Spec, impl_process_controls};

const READY_WITHIN: Duration = Duration::from_secs(60);
const STOP_WITHIN: Duration = Duration::from_secs(30);

/// Private Postgres server on a loopback port that stays the same over restarts.
#[derive(Debug)]
pub struct Postgres {
    process: Process,
    port: Port,
    password: String,
    data: PathBuf,
}

impl Postgres {
    /// Starts a server on the cluster in `dir`, which is created if missing.
    pub async fn start(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let dir = dir.canonicalize()?;
        let bin_dir = find::postgres_bin_dir()?;
        let account = account::postgres_account();
        let home = cluster_home(&dir, account)?;
        let (data, password_file) = (home.join("data"), home.join("password"));
        if !password_file.is_file() {
            // The password is written last: a cluster without one is an incomplete copy.
            if data.exists() {
                fs::remove_dir_all(&data)?;
            }
            create_cluster(&bin_dir, account, &data, &password_file)?;
        }
        let password = fs::read_to_string(&password_file)?;
        Self::start_on(data, password, &dir).await
    }

    /// Starts a hot standby in `dir`, which must not exist. It follows this server through `address` (`host:port`, of a
    /// proxy for example), and commits here do not wait for it unless [`Postgres::require_standby`] is called.
    pub async fn start_standby(&self, dir: &Path, address: &str) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let dir = dir.canonicalize()?;
        let home = cluster_home(&dir, account::postgres_account())?;
        let data = home.join("data");
        let primary = format!("host=127.0.0.1 port={} user={SUPERUSER}", address.rsplit(':').next().unwrap_or(address));
        base_backup(&primary, &self.password, &data).await?;
        Self::start_on(data, self.password.clone(), &dir).await
    }

    async fn start_on(data: PathBuf, password: String, dir: &Path) -> Result<Self> {
        let port = Port::free()?;
        let mut spec = Spec::new("postgres", find::postgres_bin_dir()?.join("postgres"), dir.join("postgres.log"));
        spec.args = arguments(&data, port.number());
        spec.cwd = Some(data.clone());
        spec.run_as = account::postgres_account();
        // Variables that the caller has set for another server must not change this one.
        spec.env = ["DATABASE_URL", "PGPORT", "PGHOST", "PGDATA"].map(|name| (name.into(), None)).into();
        // Fast shutdown, so that no backend outlives this process and the next start needs no recovery.
        spec.last_signal = libc::SIGINT;
        let server = Self { process: Process::start(spec)?, port, password, data };
        server.wait_until_ready().await?;
        Ok(server)
    }

    /// Lets commits wait until a standby has them.
    pub async fn require_standby(&self) -> Result<()> {
        psql::query(&self.url(), "alter system set synchronous_standby_names = '*'").await?;
        psql::query(&self.url(), "select pg_reload_conf()").await?;
        Ok(())
    }

    /// Promotes this standby, and returns when it takes writes.
    pub async fn promote(&self) -> Result<()> {
        psql::query(&self.url(), "select pg_promote(true, 60)").await?;
        Ok(())
    }

    /// Returns the URL of database `name` on this server.
    pub fn url_of(&self, name: &str) -> String {
        format!("postgres://{SUPERUSER}:{}@{}/{name}", self.password, self.address())
    }

    /// Returns the URL of the maintenance database.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// Returns the address, `host:port`.
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// Returns the folder of the cluster's files.
    pub fn data_dir(&self) -> &Path {
        &self.data
    }

    /// Creates database `name` unless it exists, and returns its URL.
    pub async fn create_database(&self, name: &str) -> Result<String> {
        ensure!(
            name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'),
            "{name} is not a plain database name"
        );
        let known = psql::query(&self.url(), &format!("select 1 from pg_database where datname = '{name}'")).await?;
        if known.is_empty() {
            psql::query(&self.url(), &format!("create database {name}")).await?;
        }
        Ok(self.url_of(name))
    }

    /// Stops the server by a fast shutdown: clients are disconnected, data is flushed.
    pub async fn stop(&self) -> Result<()> {
        self.process.stop_with(libc::SIGINT, STOP_WITHIN).await?;
        Ok(())
    }

    /// Restarts the server on the same port and data.
    pub async fn restart(&self) -> Result<()> {
        if self.process.is_running() {
            self.stop().await?;
        }
        self.process.start_again()?;
        self.wait_until_started().await
    }

    /// Waits until the server is ready. Retries a start that was refused because backends of the killed server still
    /// hold the data.
    async fn wait_until_started(&self) -> Result<()> {
        for _ in 0..40 {
            let outcome = self.wait_until_ready().await;
            if outcome.is_ok() || self.process.is_running() || !self.data_was_locked() {
                return outcome;
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
            self.process.start_again()?;
        }
        self.wait_until_ready().await
    }

    fn data_was_locked(&self) -> bool {
        // Backends of the killed server write dozens of lines to the same log.
        let log = self.process.log_tail(300);
        log.contains("postmaster.pid") || log.contains("shared memory block")
    }

    async fn wait_until_ready(&self) -> Result<()> {
        let probe = || async {
            let pid_file = fs::read_to_string(self.data.join("postmaster.pid")).unwrap_or_default();
            ensure!(reports_ready(&pid_file, self.process.pid()), "not ready yet");
            Ok(())
        };
        self.process.wait_until_ready(READY_WITHIN, probe).await
    }
}

// Signals reach the postmaster only: after SIGKILL its backends exit by themselves, after SIGSTOP they continue and
// only new connections hang.
impl_process_controls!(Postgres);

/// Returns whether this `postmaster.pid` reports that the postmaster accepts connections, as `pg_ctl` reads it: the pid
/// is in the first line, the state in the eighth.
fn reports_ready(pid_file: &str, pid: u32) -> bool {
    let mut lines = pid_file.lines().map(str::trim);
    lines.next() == Some(pid.to_string().as_str()) && lines.nth(6) == Some("ready")
}

fn arguments(data: &Path, port: u16) -> Vec<String> {
    let mut arguments = vec!["-D".into(), data.display().to_string(), "-p".into(), port.to_string()];
    for setting in [
        "listen_addresses=127.0.0.1",
        // Loopback TCP only; socket paths end at 107 bytes, which a deep state folder exceeds.
        "unix_socket_directories=",
        "shared_buffers=256MB",
        "max_connections=200",
        "fsync=on",
        "max_wal_size=2GB",
    ] {
        arguments.extend(["-c".to_owned(), setting.to_owned()]);
    }
    arguments
}

/// Copies a running cluster, as a standby of it.
async fn base_backup(primary: &str, password: &str, data: &Path) -> Result<()> {
    let mut command = tokio::process::Command::new(find::postgres_bin_dir()?.join("pg_basebackup"));
    command
        .args(["--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--dbname", primary, "--pgdata"])
        .arg(data);
    if let Some((uid, gid)) = account::postgres_account() {
        // The folder belongs to this process; the program creates the cluster in it.
        let parent = data.parent().unwrap_or(data);
        std::os::unix::fs::chown(parent, Some(uid), Some(gid))?;
        command.uid(uid).gid(gid);
    }
    // The standby connects again with the same password, which the recovery settings take from here.
    let done = command.env("PGPASSWORD", password).stdin(Stdio::null()).kill_on_drop(true).output().await;
    let done = done.context("run pg_basebackup, which Debian's package postgresql has")?;
    ensure!(done.status.success(), "pg_basebackup failed: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(())
}

/// Returns the folder of the cluster: in `dir`, or, when Postgres' user cannot reach that (a checkout below root's
/// home), in a folder under /var/tmp whose path is stored in `dir`.
fn cluster_home(dir: &Path, account: Option<(u32, u32)>) -> Result<PathBuf> {
    if account::can_traverse(account, dir) {
        return Ok(dir.to_owned());
    }
    let pointer = dir.join("postgres-data-is-in");
    let known = fs::read_to_string(&pointer).unwrap_or_default();
    if Path::new(&known).join("password").is_file() {
        return Ok(known.into());
    }
    let home = tempfile::Builder::new().prefix("relay-postgres-").tempdir_in("/var/tmp")?.keep();
    // Postgres' user has to traverse it; only its owner lists it.
    fs::set_permissions(&home, fs::Permissions::from_mode(0o711))?;
    fs::write(pointer, home.display().to_string())?;
    Ok(home)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_postmaster_that_accepts_connections_is_ready() {
        let file = |state: &str| format!("41\n/data\n1700000000\n10001\n\n127.0.0.1\n  4 5\n{state}\n");
        assert!(reports_ready(&file("ready   "), 41));
        assert!(!reports_ready(&file("starting"), 41));
        assert!(!reports_ready(&file("ready   "), 4));
        assert!(!reports_ready("41\n/data\n", 41));
        assert!(!reports_ready("", 41));
    }
}
