//! A private Postgres cluster in a folder.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use sqlx::{Connection, PgConnection};

use super::postgres_template::{SUPERUSER, create_cluster};
use super::{account, find};
use crate::ports::Port;
use crate::process::{Process, Spec};
use crate::wait;

const READY_WITHIN: Duration = Duration::from_secs(60);
const STOP_WITHIN: Duration = Duration::from_secs(30);

/// A Postgres server of our own, on a loopback port that stays the same over restarts.
#[derive(Debug)]
pub struct Postgres {
    process: Process,
    port: Port,
    password: String,
}

impl Postgres {
    /// Starts a server on the cluster in `dir`, making the cluster if there is none.
    pub async fn start(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let dir = dir.canonicalize()?;
        let bin_dir = find::postgres_bin_dir()?;
        let account = account::for_postgres();
        let home = home_of(&dir, account)?;
        let (data, password_file) = (home.join("data"), home.join("password"));
        if !password_file.is_file() {
            // The password is written last: a cluster without one is half a copy.
            if data.exists() {
                fs::remove_dir_all(&data)?;
            }
            create_cluster(&bin_dir, account, &data, &password_file)?;
        }
        let password = fs::read_to_string(&password_file)?;
        let port = Port::free()?;
        let mut spec = Spec::new("postgres", bin_dir.join("postgres"), dir.join("postgres.log"));
        spec.args = arguments(&data, port.number());
        spec.cwd = Some(data);
        spec.run_as = account;
        spec.env = ["DATABASE_URL", "PGPORT", "PGHOST", "PGDATA"].map(|name| (name.into(), None)).into();
        // Fast shutdown, so that no backend outlives us and the next start needs no recovery.
        spec.last_signal = libc::SIGINT;
        let server = Self { process: Process::start(spec)?, port, password };
        server.wait_until_ready().await?;
        Ok(server)
    }

    /// The URL of database `name` on this server.
    pub fn url_of(&self, name: &str) -> String {
        format!("postgres://{SUPERUSER}:{}@{}/{name}", self.password, self.address())
    }

    /// The URL of the maintenance database.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// `host:port`.
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// Creates database `name` unless it is there, and returns its URL.
    pub async fn create_database(&self, name: &str) -> Result<String> {
        anyhow::ensure!(
            name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'),
            "{name} is not a plain database name"
        );
        let mut connection = PgConnection::connect(&self.url()).await?;
        let known: bool = sqlx::query_scalar("select exists (select from pg_database where datname = $1)")
            .bind(name)
            .fetch_one(&mut connection)
            .await?;
        if !known {
            let statement = sqlx::AssertSqlSafe(format!("create database {name}"));
            sqlx::raw_sql(statement).execute(&mut connection).await?;
        }
        connection.close().await?;
        Ok(self.url_of(name))
    }

    /// The postmaster's pid.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Whether the server process runs.
    pub fn is_running(&self) -> bool {
        self.process.is_running()
    }

    /// Fast shutdown: clients are cut, data is flushed.
    pub async fn stop(&self) -> Result<()> {
        self.process.stop_with(libc::SIGINT, STOP_WITHIN).await?;
        Ok(())
    }

    /// `kill -9` of the postmaster; its backends notice and end at once.
    pub fn kill9(&self) {
        self.process.kill9();
    }

    /// Stops the server if it runs and starts it again on the same port and data.
    pub async fn restart(&self) -> Result<()> {
        if self.process.is_running() {
            self.stop().await?;
        }
        self.process.start_again()?;
        self.wait_until_started().await
    }

    /// Freezes the postmaster (running backends go on, new connections hang).
    pub fn sigstop(&self) {
        self.process.sigstop();
    }

    /// Wakes it.
    pub fn sigcont(&self) {
        self.process.sigcont();
    }

    /// Waits until it is ready. Backends of a killed server hold the data for a moment and the start is refused;
    /// then it is tried again.
    async fn wait_until_started(&self) -> Result<()> {
        for _ in 0..40 {
            let outcome = self.wait_until_ready().await;
            if outcome.is_ok() || self.process.is_running() || !self.data_was_held() {
                return outcome;
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
            self.process.start_again()?;
        }
        self.wait_until_ready().await
    }

    fn data_was_held(&self) -> bool {
        // The killed server's backends write their own last words into the same log, dozens of them.
        let last_words = self.process.log_tail(300);
        last_words.contains("postmaster.pid") || last_words.contains("shared memory block")
    }

    async fn wait_until_ready(&self) -> Result<()> {
        wait::until_ok("Postgres to accept connections", READY_WITHIN, || async {
            if !self.process.is_running() {
                return Ok(Err(anyhow::anyhow!("Postgres ended:\n{}", self.process.log_tail(15))));
            }
            let mut connection = PgConnection::connect(&self.url()).await?;
            connection.ping().await?;
            Ok::<_, sqlx::Error>(Ok(()))
        })
        .await?
    }
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

/// Where the cluster lives: in `dir`, or, when Postgres' user cannot reach that (a checkout below root's home), in
/// a folder of ours under /var/tmp whose path is kept in `dir`.
fn home_of(dir: &Path, account: Option<(u32, u32)>) -> Result<PathBuf> {
    if account::can_traverse(account, dir) {
        return Ok(dir.to_owned());
    }
    let pointer = dir.join("postgres-data-is-in");
    let known = fs::read_to_string(&pointer).unwrap_or_default();
    if Path::new(&known).join("password").is_file() {
        return Ok(known.into());
    }
    let home = tempfile::Builder::new().prefix("relay-postgres-").tempdir_in("/var/tmp")?.keep();
    fs::set_permissions(&home, fs::Permissions::from_mode(0o711))?;
    fs::write(pointer, home.display().to_string())?;
    Ok(home)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_cluster_keeps_its_port_and_data_over_a_stop_and_a_kill() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let postgres = Postgres::start(dir.path()).await.unwrap();
        let url = postgres.create_database("relay").await.unwrap();
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let encoding: String = sqlx::query_scalar("show server_encoding").fetch_one(&mut connection).await.unwrap();
        assert_eq!(encoding, "UTF8");
        sqlx::query("create table t (x text)").execute(&mut connection).await.unwrap();

        postgres.restart().await.unwrap();
        let mut connection = PgConnection::connect(&url).await.unwrap();
        sqlx::query("insert into t values ('kept')").execute(&mut connection).await.unwrap();

        postgres.kill9();
        postgres.restart().await.unwrap();
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let kept: String = sqlx::query_scalar("select x from t").fetch_one(&mut connection).await.unwrap();
        assert_eq!(kept, "kept");
        assert_eq!(postgres.create_database("relay").await.unwrap(), url);
        postgres.stop().await.unwrap();
    }
}
