//! One member of a Patroni cluster: Patroni and the Postgres that it runs.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{Installation, Replication};
use crate::os;
use crate::ports::Port;
use crate::process::{Process, Spec};
use crate::proxy::TcpProxy;
use crate::servers::postgres_template::SUPERUSER;
use crate::servers::{account, find};

/// Patroni's shortest lease of the leader: after a host has failed, the others wait this long.
const LEADER_TTL_SECONDS: u32 = 20;
/// A standby that lags by more does not become leader. Large, so that a test decides how much is missing.
const MAXIMUM_LAG_BYTES: u32 = 256 * 1024 * 1024;

/// Member, stopped with its Postgres when dropped.
#[derive(Debug)]
pub(super) struct Member {
    patroni: Process,
    data: PathBuf,
    rest: Port,
    postgres: Port,
    /// Address that the other members replicate from.
    replication: TcpProxy,
}

impl Member {
    /// Starts member `number` with its files in a new folder of `dir`, without waiting for it.
    pub(super) fn start(
        dir: &Path,
        number: usize,
        installation: &Installation,
        etcd: &str,
        replication: Replication,
    ) -> Result<Self> {
        let home = dir.join(Self::name(number));
        fs::create_dir(&home)?;
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700))?;
        let (rest, postgres) = (Port::free()?, Port::free()?);
        let proxy = TcpProxy::start(&postgres.address())?;
        let data = home.join("data");
        let settings = json!({
            "scope": "relay",
            "name": Self::name(number),
            "restapi": { "listen": rest.address(), "connect_address": rest.address() },
            "etcd3": { "host": etcd },
            "bootstrap": bootstrap(replication),
            "postgresql": {
                "listen": postgres.address(),
                "connect_address": proxy.address(),
                "data_dir": data,
                "bin_dir": find::postgres_bin_dir()?,
                "pgpass": home.join("pgpass"),
                "authentication": {
                    "superuser": { "username": SUPERUSER, "password": installation.password },
                    "replication": { "username": "replicator", "password": installation.password },
                    "rewind": { "username": "rewinder", "password": installation.password },
                },
                "pg_hba": [
                    "host all all 127.0.0.1/32 scram-sha-256",
                    "host replication all 127.0.0.1/32 scram-sha-256",
                ],
                "parameters": { "unix_socket_directories": "", "password_encryption": "scram-sha-256" },
            },
        });
        // JSON is YAML.
        let file = home.join("patroni.yml");
        fs::write(&file, settings.to_string())?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
        let account = account::postgres_account();
        if let Some((uid, gid)) = account {
            for path in [&home, &file] {
                chown(path, Some(uid), Some(gid))?;
            }
        }
        let mut spec = Spec::new(Self::name(number), &installation.python, dir.join(format!("member-{number}.log")));
        spec.args = vec!["-m".into(), "patroni".into(), file.display().to_string()];
        let packages = installation.packages.display().to_string();
        spec.env = ["DATABASE_URL", "PGPORT", "PGHOST", "PGDATA"].map(|name| (name.into(), None)).into();
        spec.env.push(("PYTHONPATH".into(), Some(packages)));
        spec.cwd = Some(home);
        spec.run_as = account;
        // Patroni stops its Postgres, which would outlive it otherwise.
        spec.last_signal = libc::SIGTERM;
        Ok(Self { patroni: Process::start(spec)?, data, rest, postgres, replication: proxy })
    }

    /// Returns the name of member `number` in the cluster.
    pub(super) fn name(number: usize) -> String {
        format!("member-{number}")
    }

    /// Returns the URL of a path of Patroni's REST API.
    pub(super) fn rest_url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.rest.address())
    }

    /// Returns the address of its Postgres, `host:port`.
    pub(super) fn postgres_address(&self) -> String {
        self.postgres.address()
    }

    /// Returns the proxy that the other members replicate through.
    pub(super) fn replication(&self) -> &TcpProxy {
        &self.replication
    }

    /// Returns the last lines of Patroni's log.
    pub(super) fn log_tail(&self, lines: usize) -> String {
        self.patroni.log_tail(lines)
    }

    /// Kills Postgres.
    ///
    /// The backends end with the postmaster. A backend that waits for a standby would otherwise give up, and its commit
    /// would be visible for a moment although no standby has it.
    pub(super) fn kill9_postgres(&self) -> Result<()> {
        let pid = self.postmaster().context("Postgres does not run")?;
        os::kill9_with_children(pid)?;
        Ok(())
    }

    /// Kills Patroni and Postgres, as the failure of a host does.
    pub(super) fn kill9(&self) {
        self.patroni.kill9();
        if let Some(pid) = self.postmaster() {
            let _ = os::kill9_with_children(pid);
        }
    }

    /// Starts Patroni again if it does not run.
    pub(super) fn start_again(&self) -> Result<()> {
        if self.patroni.is_running() { Ok(()) } else { self.patroni.start_again() }
    }

    /// Returns the pid of the running postmaster: it works in its data folder, another process with this pid does not.
    fn postmaster(&self) -> Option<u32> {
        let pid_file = fs::read_to_string(self.data.join("postmaster.pid")).ok()?;
        let pid = pid_file.lines().next()?.trim().parse().ok()?;
        let works_in = fs::read_link(format!("/proc/{pid}/cwd")).ok()?;
        (works_in == self.data).then_some(pid)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Its files are removed as well.
        self.kill9();
    }
}

/// Settings of the whole cluster.
fn bootstrap(replication: Replication) -> serde_json::Value {
    json!({
        "dcs": {
            "ttl": LEADER_TTL_SECONDS,
            "loop_wait": 1,
            "retry_timeout": 3,
            "maximum_lag_on_failover": MAXIMUM_LAG_BYTES,
            // A Postgres that ended is not started again in place: another member takes over at once.
            "primary_start_timeout": 0,
            "synchronous_mode": replication == Replication::Synchronous,
            "postgresql": {
                "use_pg_rewind": true,
                "parameters": { "wal_log_hints": "on", "max_connections": 200, "fsync": "on" },
            },
        },
        "initdb": [{ "encoding": "UTF8" }, { "locale": "C" }],
    })
}
