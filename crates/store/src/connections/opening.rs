//! Beginning of transactions: the settings and checks that are sent with BEGIN.

use std::{sync::Arc, time::Duration};

use sqlx::{AssertSqlSafe, Executor as _, error::DatabaseError, postgres::PgRow};

use super::database_session::{DatabaseSession, Statements};
use crate::recovery::epoch::{EpochFence, KnownDatabase, OTHER_EPOCH};

/// Settings of each connection, or behind a pooler of each transaction.
pub(crate) const SETTINGS: [(&str, &str); 6] = [
    // Upper bound of a commit's wait for a mailbox head.
    ("lock_timeout", "2s"),
    // No transaction pauses by design. One that does belongs to a frozen or disconnected process and holds mailbox
    // heads that the commits of all gateways wait for.
    ("idle_in_transaction_session_timeout", "3s"),
    // Every statement has its index. The planner takes tables that have grown since the last ANALYZE for small, and may
    // keep a sequential scan for a minute.
    ("enable_seqscan", "off"),
    // A plan that needs a scan despite the setting above is priced so high that Postgres would compile it at every
    // execution, about 100 ms. No statement runs long enough to repay that.
    ("jit", "off"),
    // Starting parallel workers takes longer than any statement should run.
    ("max_parallel_workers_per_gather", "0"),
    // Statements are few and prepared; planning each execution over the daily partitions would cost more than running
    // it. Partitions are pruned at execution.
    ("plan_cache_mode", "force_generic_plan"),
];

/// Way in which the connections of a pool begin transactions.
#[derive(Debug, Clone)]
pub(crate) struct Opening {
    /// Database and epoch that transactions have to meet.
    fence: Arc<EpochFence>,
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    /// Connections are sessions of one server, which were compared when they were opened. Transactions compare the
    /// epoch.
    Direct,
    /// Connections lead to a pooler, which assigns a server to each transaction. Transactions bring their settings, and
    /// compare the database too.
    Pooled { settings: String },
}

impl Opening {
    pub(crate) fn direct(fence: Arc<EpochFence>) -> Self {
        Self { fence, kind: Kind::Direct }
    }

    /// `statement_limit`: time after which Postgres ends a statement.
    pub(crate) fn pooled(fence: Arc<EpochFence>, statement_limit: Duration) -> Self {
        let limit = ("statement_timeout", statement_limit.as_millis().to_string());
        let settings = SETTINGS.iter().map(|(name, value)| (*name, (*value).to_owned())).chain([limit]);
        let settings = settings.map(|(name, value)| format!("; SET LOCAL {name} = '{value}'")).collect();
        Self { fence, kind: Kind::Pooled { settings } }
    }

    /// Returns what transactions have to meet.
    pub(crate) fn fence(&self) -> &EpochFence {
        &self.fence
    }

    pub(crate) fn is_pooled(&self) -> bool {
        matches!(self.kind, Kind::Pooled { .. })
    }

    pub(super) fn statements(&self) -> Statements {
        if self.is_pooled() { Statements::Unnamed } else { Statements::Named }
    }

    /// Returns the beginning of a transaction under the database that the process knows now.
    pub(super) fn begin(&self) -> Begin<'_> {
        let known = self.fence.served_database();
        let sql = match &self.kind {
            Kind::Direct => known.as_ref().map_or_else(
                // Tools know no database, and a recovery is not fenced by the one that it replaces.
                || "BEGIN".to_owned(),
                |known| format!("BEGIN; SELECT relay_require_epoch({})", known.epoch),
            ),
            Kind::Pooled { settings } => {
                let check = known.as_ref().map(|known| require_database(known, self.fence.confirmations()));
                // Without a known database there is no check, for the reason given above.
                format!("BEGIN{settings}{}", check.unwrap_or_default())
            }
        };
        Begin { fence: &self.fence, known, sql }
    }
}

fn require_database(known: &KnownDatabase, confirmations: i64) -> String {
    // Quoted by hand, because a message of several statements takes no parameters.
    let identity = known.identity.replace('\'', "''");
    format!("; SELECT relay_require_database('{identity}', {}, {confirmations})", known.epoch)
}

/// Beginning of one transaction, to be made before the wait for a connection: one that was prepared before a recovery
/// must not begin after it.
pub(super) struct Begin<'a> {
    fence: &'a EpochFence,
    known: Option<KnownDatabase>,
    sql: String,
}

impl Begin<'_> {
    /// Returns the recovery epoch that it requires.
    pub(super) fn epoch(&self) -> Option<i64> {
        self.known.as_ref().map(|known| known.epoch)
    }

    /// Adds a query to the message.
    pub(super) fn with(mut self, query: &str) -> Self {
        self.sql.push_str("; ");
        self.sql.push_str(query);
        self
    }

    /// Sends it, in one message, and returns the rows of its queries. A refusal closes the fence.
    pub(super) async fn send(&self, session: &mut DatabaseSession) -> sqlx::Result<Vec<PgRow>> {
        let sent = session.fetch_all(AssertSqlSafe(self.sql.as_str())).await;
        if sent.as_ref().is_err_and(is_other_epoch) {
            // Only if the process still knows the database that this was prepared for: it may have recovered since.
            self.fence.close_if(|known| known == self.known.as_ref());
        }
        sent
    }
}

/// Returns whether Postgres found another database or epoch than the expected one.
pub(super) fn is_other_epoch(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(DatabaseError::code).as_deref() == Some(OTHER_EPOCH)
}
