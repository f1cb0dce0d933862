//! Postgres servers under Patroni and etcd, behind a proxy that follows Patroni's leader, as operators run them.

mod etcd;
mod member;
mod route;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::postgres_template::SUPERUSER;
use super::{find, psql, wheel};
use crate::{http, wait};
use etcd::Etcd;
use member::Member;
use route::Route;

/// Creating a cluster takes about 15 s, a return by `pg_rewind` about 10 s.
const HEALTHY_WITHIN: Duration = Duration::from_secs(120);
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Point at which a commit is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replication {
    /// Once the leader has it.
    Asynchronous,
    /// Once one standby has it as well, which alone can become leader then (`synchronous_mode`).
    Synchronous,
}

/// Programs and password that all members share.
#[derive(Debug)]
struct Installation {
    python: PathBuf,
    packages: PathBuf,
    password: String,
}

/// Members of one cluster.
#[derive(Debug)]
pub struct PatroniCluster {
    // Clients are cut off before their servers end; the folder is removed last.
    route: Route,
    members: Vec<Member>,
    _etcd: Etcd,
    password: String,
    replication: Replication,
    client: reqwest::Client,
    _dir: TempDir,
}

impl PatroniCluster {
    /// Starts `count` members, and returns when all standbys follow the leader.
    pub async fn start(count: usize, replication: Replication) -> Result<Self> {
        // Not in a folder of the caller, which Postgres' user may be unable to reach.
        let dir = tempfile::Builder::new().prefix("relay-patroni-").tempdir_in("/var/tmp")?;
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711))?;
        let python = find::reachable_program("python3")?;
        let packages = wheel::python_packages("patroni", &python, include_str!("requirements.txt"))?;
        let installation = Installation { python, packages, password: uuid::Uuid::new_v4().simple().to_string() };
        let etcd = Etcd::start(dir.path()).await?;
        let members = (0..count)
            .map(|number| Member::start(dir.path(), number, &installation, &etcd.address(), replication))
            .collect::<Result<Vec<_>>>()?;
        let route = Route::start(&members)?;
        let client = http::client().timeout(ANSWER_WITHIN).build()?;
        let password = installation.password;
        let cluster = Self { route, members, _etcd: etcd, password, replication, client, _dir: dir };
        cluster.wait_healthy().await?;
        Ok(cluster)
    }

    /// Returns the URL of database `name` at the address that follows the leader.
    pub fn url_of(&self, name: &str) -> String {
        self.url_at(&self.route.address(), name)
    }

    /// Returns the URL of database `name` at one member.
    pub fn url_of_member(&self, member: usize, name: &str) -> String {
        self.url_at(&self.members[member].postgres_address(), name)
    }

    fn url_at(&self, address: &str, name: &str) -> String {
        format!("postgres://{SUPERUSER}:{}@{address}/{name}", self.password)
    }

    /// Creates database `name`, and returns its URL at the address that follows the leader.
    pub async fn create_database(&self, name: &str) -> Result<String> {
        let maintenance = self.url_of("postgres");
        let statement = format!("create database {name}");
        let create = || psql::query(&maintenance, &statement);
        wait::until_ok("the address of the leader", ANSWER_WITHIN, create).await?;
        Ok(self.url_of(name))
    }

    /// Returns the leader.
    pub async fn leader(&self) -> Result<usize> {
        for (number, member) in self.members.iter().enumerate() {
            let answer = self.client.get(member.rest_url("primary")).send().await;
            if answer.is_ok_and(|answer| answer.status() == 200) {
                return Ok(number);
            }
        }
        bail!("no member is the leader")
    }

    /// Hands the leadership over to a standby, as for maintenance. Returns the new leader.
    pub async fn switch_over(&self) -> Result<usize> {
        let leader = self.leader().await?;
        let body = json!({ "leader": Member::name(leader) }).to_string();
        let answer = self.client.post(self.members[leader].rest_url("switchover")).body(body).send().await?;
        let (status, text) = (answer.status(), answer.text().await?);
        ensure!(status == 200, "the switchover was answered with {status}: {text}");
        self.wait_other_leader(leader).await
    }

    /// Kills the leader's Postgres. Patroni notices at once. Returns the member, which becomes a standby by itself.
    pub async fn kill9_leading_postgres(&self) -> Result<usize> {
        let leader = self.leader().await?;
        self.members[leader].kill9_postgres()?;
        Ok(leader)
    }

    /// Kills the leader's Patroni and Postgres, as the failure of its host does: the others notice when the leader's
    /// lease has ended. Returns the member, which returns with [`PatroniCluster::start_again`].
    pub async fn kill9_leading_host(&self) -> Result<usize> {
        let leader = self.leader().await?;
        self.members[leader].kill9();
        Ok(leader)
    }

    /// Starts a killed member again.
    pub fn start_again(&self, member: usize) -> Result<()> {
        self.members[member].start_again()
    }

    /// Waits until a member other than this one leads, and returns it.
    pub async fn wait_other_leader(&self, former: usize) -> Result<usize> {
        let changed = wait::until_ok("another leader", HEALTHY_WITHIN, || async {
            let leader = self.leader().await?;
            ensure!(leader != former, "{} leads still", Member::name(former));
            anyhow::Ok(leader)
        });
        changed.await.with_context(|| self.logs(15))
    }

    /// Stops the replication from a member to the others, whose connections stay open and silent.
    pub fn stall_replication(&self, from: usize) {
        self.members[from].replication().blackhole();
    }

    /// Continues the replication from a member.
    pub fn restore_replication(&self, from: usize) {
        self.members[from].replication().restore();
    }

    /// Waits until there is a leader that all other members follow, one of them synchronously if that is required.
    pub async fn wait_healthy(&self) -> Result<()> {
        let healthy = wait::until_ok("a healthy cluster", HEALTHY_WITHIN, || async {
            let leader = self.leader().await?;
            let cluster: Value = serde_json::from_str(
                &self.client.get(self.members[leader].rest_url("cluster")).send().await?.text().await?,
            )?;
            let members = cluster["members"].as_array().map_or(&[][..], Vec::as_slice);
            let count = |key: &str, value: &str| members.iter().filter(|member| member[key] == value).count();
            let followers = count("state", "streaming");
            let has_guarantee = match self.replication {
                Replication::Asynchronous => true,
                Replication::Synchronous => count("role", "sync_standby") > 0,
            };
            ensure!(followers + 1 == self.members.len() && has_guarantee, "{cluster}");
            anyhow::Ok(())
        });
        healthy.await.with_context(|| self.logs(15))
    }

    /// Returns the last lines of every member's log, for error messages.
    pub fn logs(&self, lines: usize) -> String {
        let members = self.members.iter().enumerate();
        members
            .map(|(number, member)| format!("== {} ==\n{}\n", Member::name(number), member.log_tail(lines)))
            .collect()
    }
}
