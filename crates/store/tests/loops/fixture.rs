//! A fresh database, and rows in it.

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{AgentId, WorkspaceId, WorkspaceScope, access::token::TokenHash};
use relay_store::{
    Store,
    nodes::hosting::{HostRequest, SessionHandle},
};
use relay_testkit::servers::Postgres;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool};
use tokio::sync::OnceCell;

pub(crate) const WORKSPACE: i64 = 7;
pub(crate) const SENDER: i64 = 99;

/// A migrated database of the test's own.
pub(crate) struct Database {
    pub(crate) store: Store,
    pub(crate) pool: PgPool,
    pub(crate) url: String,
    /// When the test began, as Postgres' columns can hold it.
    pub(crate) now: DateTime<Utc>,
}

/// Tests count in days and read Postgres' clock more than once: none of them begins shortly before a day ends.
#[expect(clippy::disallowed_methods, reason = "tests run on this machine's clock")]
async fn wait_over_midnight() {
    let left = || 86_400 - Utc::now().timestamp().rem_euclid(86_400);
    while left() < 60 {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
}

/// The server: the one that the environment names, else one of our own for all tests of this process.
async fn server_url() -> String {
    static OWN: OnceCell<(Postgres, tempfile::TempDir)> = OnceCell::const_new();
    for name in ["RELAY_TEST_DATABASE_URL", "DATABASE_URL"] {
        if let Ok(url) = std::env::var(name) {
            return url;
        }
    }
    let (server, _) = OWN
        .get_or_init(|| async {
            let dir = tempfile::tempdir().unwrap();
            (Postgres::start(dir.path()).await.unwrap(), dir)
        })
        .await;
    server.url()
}

impl Database {
    pub(crate) async fn fresh() -> Self {
        let server = server_url().await;
        wait_over_midnight().await;
        let name = format!("relay_test_{}", uuid::Uuid::new_v4().simple());
        let mut admin = PgConnection::connect(&server).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut admin).await.unwrap();
        let options: sqlx::postgres::PgConnectOptions = server.parse().unwrap();
        let pool = PgPool::connect_with(options.database(&name)).await.unwrap();
        let url = url_of(&server, &name);
        let store = Store::connect(&url, 4).unwrap();
        store.migrate(std::time::Duration::ZERO).await.unwrap();
        let now = sqlx::query_scalar("SELECT now()").fetch_one(&pool).await.unwrap();
        let database = Self { store, pool, url, now };
        database.agent(SENDER, "sender").await;
        database
    }

    pub(crate) fn mailbox(agent: i64) -> (WorkspaceScope, AgentId) {
        (WorkspaceScope::from_engine_row(WorkspaceId::new(WORKSPACE)), AgentId::new(agent))
    }

    /// An agent on its direct node, with an empty mailbox.
    pub(crate) fn hosting(&self, agent: AgentId, new_token: Option<TokenHash>) -> HostRequest<'static> {
        let session = SessionHandle::default();
        HostRequest { agent, binding_id: "anb_1", session, new_token, at: self.now }
    }

    pub(crate) async fn agent(&self, agent: i64, name: &str) {
        self.run(&format!(
            "INSERT INTO agents (workspace_id, agent_id, name, node_id, created_at, last_seen_at)
             VALUES ({WORKSPACE}, {agent}, '{name}', 'node_direct_{agent}', now(), now());
             INSERT INTO mailbox_heads VALUES ({WORKSPACE}, {agent}, 1);
             INSERT INTO mailbox_cursors VALUES ({WORKSPACE}, {agent}, 0, 0, 0)"
        ))
        .await;
    }

    /// Messages from the sender, one per life time in seconds from now: delivered to `agent` as seq 1, 2, ….
    pub(crate) async fn deliveries(&self, agent: i64, lives: &[i64]) {
        for (&life, seq) in lives.iter().zip(1..) {
            let made_ms = self.now.timestamp_millis() - relay_domain::snowflake::EPOCH_MS;
            let message = (made_ms << 22) + seq;
            sqlx::query(
                "WITH m AS (INSERT INTO messages (workspace_id, message_id, created_on, channel_id, agent_id,
                                                  agent_name, text, created_at)
                            VALUES ($1, $2, ($4::timestamptz AT TIME ZONE 'UTC')::date, 1, $6, 'sender', 'hi', $4)
                            ON CONFLICT DO NOTHING)
                 INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, node_id,
                                         created_at, expires_at)
                 VALUES ($1, $3, $7, ($4 AT TIME ZONE 'UTC')::date, $2, 'n', $4, $5)",
            )
            .bind(WORKSPACE)
            .bind(message)
            .bind(agent)
            .bind(self.now)
            .bind(self.now + TimeDelta::seconds(life))
            .bind(SENDER)
            .bind(seq)
            .execute(&self.pool)
            .await
            .unwrap();
        }
        self.run(&format!("UPDATE mailbox_heads SET next_seq = {} WHERE agent_id = {agent}", lives.len() + 1)).await;
    }

    /// A row settled or parked by itself: 1 acked by REST, 2 failed, 3 deferred, 4 dead-lettered.
    pub(crate) async fn settlement(&self, agent: i64, seq: i64, state: i16) {
        let available_at = if state == 3 { "now()" } else { "NULL" };
        self.run(&format!(
            "INSERT INTO delivery_exceptions (workspace_id, agent_id, seq, state, available_at, at)
             VALUES ({WORKSPACE}, {agent}, {seq}, {state}, {available_at}, now())"
        ))
        .await;
    }

    pub(crate) async fn ack_floor(&self, agent: i64, floor: i64) {
        self.run(&format!(
            "UPDATE mailbox_cursors SET sent_seq = {floor}, ack_floor = {floor}, settled_floor = {floor}
              WHERE agent_id = {agent}"
        ))
        .await;
    }

    pub(crate) async fn settled_floor(&self, agent: i64) -> i64 {
        self.number(&format!("SELECT settled_floor FROM mailbox_cursors WHERE agent_id = {agent}")).await
    }

    /// Settlements of an agent as (seq, state).
    pub(crate) async fn settlements(&self, agent: i64) -> Vec<(i64, i16)> {
        sqlx::query_as("SELECT seq, state FROM delivery_exceptions WHERE agent_id = $1 ORDER BY seq")
            .bind(agent)
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    /// Moves the clock of this database so many seconds ahead of the server's.
    pub(crate) async fn advance(&self, seconds: i64) {
        self.run(&format!(
            "CREATE OR REPLACE FUNCTION relay_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
                AS 'SELECT now() + make_interval(secs => {seconds})'"
        ))
        .await;
    }

    /// Waits until a statement waits for a lock.
    pub(crate) async fn lock_is_awaited(&self) {
        relay_testkit::wait::until("a statement to wait for a lock", std::time::Duration::from_secs(30), async || {
            self.number(
                "SELECT count(*) FROM pg_stat_activity
                  WHERE datname = current_database() AND wait_event_type = 'Lock'",
            )
            .await
                > 0
        })
        .await;
    }

    pub(crate) async fn run(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await.unwrap();
    }

    pub(crate) async fn number(&self, sql: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&self.pool).await.unwrap()
    }
}

/// The URL of another database on the same server.
fn url_of(server: &str, database: &str) -> String {
    let (address, options) = server.split_once('?').map_or((server, String::new()), |(a, o)| (a, format!("?{o}")));
    let (scheme, rest) = address.split_once("://").unwrap();
    let host = rest.split('/').next().unwrap();
    format!("{scheme}://{host}/{database}{options}")
}
