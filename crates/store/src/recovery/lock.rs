//! Lock of recovery: an advisory lock of a database session of its own, which ends soon after its process freezes or is
//! cut off.

use std::time::Duration;

use sqlx::{Connection as _, PgConnection, postgres::PgConnectOptions};
use tokio::{task::JoinSet, time::timeout};

use crate::statement_timeout::StatementTimeout as _;

/// Interval of signs of life on the connection.
const PING_EVERY: Duration = Duration::from_secs(2);
/// Silence of Postgres after which its connection counts as dead. A repair loads Postgres itself, and must not end
/// because an answer is late. The lock may end before: Postgres ends the session by its own limits.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Limits after which Postgres ends a session without signs of life: a process that is stopped, and a host that is
/// lost.
const LIMITS: [(&str, &str); 4] = [
    ("idle_session_timeout", "10s"),
    ("tcp_keepalives_idle", "3"),
    ("tcp_keepalives_interval", "2"),
    ("tcp_keepalives_count", "3"),
];

/// Lock of recovery, held until it is dropped or released.
#[derive(Debug)]
pub struct RecoveryLock {
    /// Owns the connection, so the session and its lock end with it.
    keeper: JoinSet<()>,
}

impl RecoveryLock {
    /// Keeps the lock that this connection holds.
    pub(super) fn keep(connection: PgConnection) -> Self {
        let mut keeper = JoinSet::new();
        keeper.spawn(keep_alive(connection));
        Self { keeper }
    }

    /// Waits until the session of the lock has ended, or is silent for half a minute: others may hold the lock.
    pub async fn ended(&mut self) {
        // The only task of the set.
        let _ = self.keeper.join_next().await;
    }

    /// Releases the lock.
    pub async fn release(mut self) {
        self.keeper.shutdown().await;
    }
}

/// Connects for the lock. It is no connection of the pool, to which the lock must not return.
pub(super) async fn connect(options: &PgConnectOptions) -> sqlx::Result<PgConnection> {
    PgConnection::connect_with(&options.clone().options(LIMITS)).with_timeout().await
}

/// Sends signs of life until one fails or is not answered. The process then gives up its recovery. One that was frozen
/// may go on for a moment: once another process begins the recovery again, its transactions fail.
async fn keep_alive(mut connection: PgConnection) {
    loop {
        tokio::time::sleep(PING_EVERY).await;
        if !matches!(timeout(ANSWER_TIMEOUT, connection.ping()).await, Ok(Ok(()))) {
            return;
        }
    }
}
