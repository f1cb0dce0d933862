//! Work that the loops of processes find in tables which are empty most of the time. One statement asks for the work of
//! all loops of a process, in place of one for each. Main type: [`WorkKind`]; called by the engine's reader of due
//! work.
//!
//! A condition may hold without work that can be done now: it is leased to another process, for example. It always
//! holds when there is some.

use sqlx::{AssertSqlSafe, Row as _};

use crate::{
    Store, StoreError, StoreResult,
    actions::{dispatches, redispatch, triggers},
    agents::sessions,
    mailboxes::redrives,
    messages::{fanouts, outbox, read_folding},
    processes::expired_gateways,
    push::{mailboxes as push_mailboxes, sweep},
    statement_timeout::StatementTimeout as _,
    subscriptions::dispatch,
    workspaces::suspensions,
};

/// Work of one loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkKind {
    UnpublishedBatches,
    OpenInvocations,
    /// Invocations that no gateway has written to a socket.
    UnsentInvocations,
    /// Providers of gateways whose lease has expired.
    OrphanedProviders,
    OpenSubscriptions,
    DueRedrives,
    /// Mailboxes of http_push that a worker may claim.
    DuePushMailboxes,
    /// Mailboxes of http_push at all, and nodes that may have some.
    SweptPushMailboxes,
    UnscannedTriggers,
    /// Mailboxes of ended sessions, and releases.
    EndedSessions,
    /// Acks that last-read pointers do not include.
    UnfoldedAcks,
    LapsedFanouts,
    /// Suspended workspaces and drained nodes.
    Suspensions,
}

impl WorkKind {
    /// Returns the SQL condition, which takes no parameters: a statement with any is planned again and again.
    const fn condition(self) -> &'static str {
        match self {
            Self::UnpublishedBatches => outbox::HAS_UNPUBLISHED,
            Self::OpenInvocations => redispatch::HAS_OPEN,
            Self::UnsentInvocations => dispatches::HAS_UNSENT,
            Self::OrphanedProviders => expired_gateways::HAS_ORPHANS,
            Self::OpenSubscriptions => dispatch::HAS_OPEN,
            Self::DueRedrives => redrives::IS_DUE,
            Self::DuePushMailboxes => push_mailboxes::IS_ANY_DUE,
            Self::SweptPushMailboxes => sweep::IS_ANY_SWEPT,
            Self::UnscannedTriggers => triggers::HAS_UNSCANNED,
            Self::EndedSessions => sessions::HAS_ENDED,
            Self::UnfoldedAcks => read_folding::HAS_UNFOLDED,
            Self::LapsedFanouts => fanouts::HAS_LAPSED,
            Self::Suspensions => suspensions::HAS_SUSPENDED,
        }
    }
}

impl Store {
    /// Returns those of the kinds of which there may be work.
    pub async fn due_work(&self, kinds: &[WorkKind]) -> StoreResult<Vec<WorkKind>> {
        let doing = "looking for due work";
        // A process waits for the same kinds all the time, so the statement has one text and is prepared once.
        let conditions: Vec<_> = kinds.iter().map(|kind| kind.condition()).collect();
        let row = sqlx::query(AssertSqlSafe(format!("SELECT {}", conditions.join(", "))))
            .fetch_one(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let mut due = Vec::new();
        for (column, kind) in kinds.iter().enumerate() {
            if row.try_get::<bool, _>(column).map_err(StoreError::from_sqlx(doing))? {
                due.push(*kind);
            }
        }
        Ok(due)
    }
}
