//! Change feed: mailboxes that got deliveries, and agents and providers that moved, since a reader's last read.
//!
//! Triggers write the records. [`FeedPosition`] is the snapshot of the last read, so a record whose transaction was
//! open then is read as soon as it commits, however late, and no other record waits for it. Called by gateways for the
//! silence check; [`acked_since`] by the worker, which folds acks into last-read pointers.

use std::{collections::BTreeSet, time::Duration};

use relay_domain::{AgentId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, mailboxes::stream::Seq};
use serde::{Deserialize, Serialize};
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult, connections::DatabaseSession, decode::decode_rows,
    statement_timeout::StatementTimeout as _,
};

/// Records that one read returns. With more, comparing all mailboxes is cheaper.
const MAX_RECORDS: i64 = 10_000;

/// Position of a reader: it has seen what was committed in this snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeedPosition {
    snapshot: String,
    /// Transaction numbers of a recovered database say nothing about those before.
    epoch: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MailboxChange {
    /// Mailboxes with their new heads.
    Written(Vec<(WorkspaceScope, AgentId, Seq)>),
    /// An agent came to a node. `None`: it is unassigned there.
    Moved { scope: WorkspaceScope, agent_id: AgentId, node_id: NodeId, provider: Option<ProviderName> },
    /// A provider of a broker node connected or disconnected: unassigned agents may belong to another one now.
    ProviderChanged { scope: WorkspaceScope, node_id: NodeId, provider: ProviderName },
}

/// Result of reading the change feed.
#[derive(Debug)]
pub enum FeedRead {
    /// All changes between the positions.
    Changes { changes: Vec<MailboxChange>, position: FeedPosition },
    /// More changes than a read returns, or a recovery: everything may have changed.
    Everything { position: FeedPosition },
}

// The snapshot of the statement decides which records it sees and is the next position. In the order of the index, so
// that no plan reads the records before the position.
// Every transaction below xmin had ended at the position: this bound only keeps the scan of the index short.
const READ: &str = "
SELECT now.snapshot, now.epoch, c.workspaces, c.agents, c.next_seqs, c.node_id, c.provider
  FROM (SELECT pg_current_snapshot()::text AS snapshot, epoch FROM recovery_state WHERE only_row) AS now
  LEFT JOIN (SELECT workspaces, agents, next_seqs, node_id, provider FROM mailbox_changes
              WHERE xid >= pg_snapshot_xmin($1::text::pg_snapshot)
                AND NOT pg_visible_in_snapshot(xid, $1::text::pg_snapshot)
              ORDER BY xid LIMIT $2) AS c ON true";

const READ_ACKS: &str = "
SELECT now.snapshot, now.epoch, c.workspaces, c.agents
  FROM (SELECT pg_current_snapshot()::text AS snapshot, epoch FROM recovery_state WHERE only_row) AS now
  LEFT JOIN (SELECT workspaces, agents FROM ack_changes
              WHERE xid >= pg_snapshot_xmin($1::text::pg_snapshot)
                AND NOT pg_visible_in_snapshot(xid, $1::text::pg_snapshot)
              ORDER BY xid LIMIT $2) AS c ON true";

/// Removes the oldest records of a feed. Their places are read first: the index has the order, not the age.
// By ctid, because records have no key. It stays valid, because records are never updated.
macro_rules! prune {
    ($feed:literal) => {
        concat!(
            "DELETE FROM ",
            $feed,
            " WHERE ctid = ANY (ARRAY(
                  SELECT ctid FROM (SELECT ctid, created_at FROM ",
            $feed,
            " ORDER BY xid LIMIT $2) AS oldest
                   WHERE created_at < relay_now() - make_interval(secs => $1)))"
        )
    };
}
const PRUNE_MAILBOX_CHANGES: &str = prune!("mailbox_changes");
const PRUNE_ACK_CHANGES: &str = prune!("ack_changes");

const CURRENT_POSITION: &str = "SELECT pg_current_snapshot()::text, epoch FROM recovery_state WHERE only_row";

/// Mailboxes with acks since a position.
#[derive(Debug)]
pub(crate) struct AckedMailboxes {
    /// In the order of their keys.
    pub(crate) mailboxes: BTreeSet<(WorkspaceId, AgentId)>,
    pub(crate) position: FeedPosition,
    /// False if any mailbox may have been acked: there are more records than a read returns, or a recovery.
    pub(crate) is_complete: bool,
}

struct ChangeRow {
    position: FeedPosition,
    /// `None` in the only row of an empty result.
    change: Option<MailboxChange>,
}

impl FromRow<'_, PgRow> for ChangeRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let position = FeedPosition { snapshot: row.try_get("snapshot")?, epoch: row.try_get("epoch")? };
        let Some(workspaces) = row.try_get::<Option<Vec<WorkspaceId>>, _>("workspaces")? else {
            return Ok(Self { position, change: None });
        };
        let agents: Vec<AgentId> = row.try_get("agents")?;
        let scope = WorkspaceScope::from_engine_row;
        let first = workspaces.first().copied().map(scope);
        let change = match (row.try_get::<Option<NodeId>, _>("node_id")?, first, agents.first().copied()) {
            (None, ..) => {
                let next_seqs: Vec<Seq> = row.try_get("next_seqs")?;
                let keys = workspaces.into_iter().zip(agents).zip(next_seqs);
                let written = keys.map(|((workspace, agent), next)| (scope(workspace), agent, next));
                MailboxChange::Written(written.collect())
            }
            (Some(node_id), Some(scope), Some(agent_id)) => {
                MailboxChange::Moved { scope, agent_id, node_id, provider: row.try_get("provider")? }
            }
            (Some(node_id), Some(scope), None) => {
                MailboxChange::ProviderChanged { scope, node_id, provider: row.try_get("provider")? }
            }
            (Some(_), None, _) => return Err(sqlx::Error::Decode("a record without a workspace".into())),
        };
        Ok(Self { position, change: Some(change) })
    }
}

impl Store {
    /// Returns the current end of the change feed.
    pub async fn feed_position(&self) -> StoreResult<FeedPosition> {
        let (snapshot, epoch) = sqlx::query_as(CURRENT_POSITION)
            .fetch_one(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("reading the position of the change feed"))?;
        Ok(FeedPosition { snapshot, epoch })
    }

    /// Reads the changes that were committed after `position`, in no particular order. A reader whose last read is
    /// older than [`Store::prune_changes`] keeps records must start again with [`Store::feed_position`].
    pub async fn mailbox_changes_since(&self, position: &FeedPosition) -> StoreResult<FeedRead> {
        let doing = "reading the change feed";
        let rows = sqlx::query(READ)
            .bind(&position.snapshot)
            // One more than are returned shows that there are too many.
            .bind(MAX_RECORDS + 1)
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let rows: Vec<ChangeRow> = decode_rows("mailbox_changes", &rows)?;
        // The single row of recovery_state is part of the schema.
        let Some(next) = rows.first().map(|row| row.position.clone()) else {
            return Err(StoreError::unavailable(doing));
        };
        if next.epoch != position.epoch || i64::try_from(rows.len()).is_ok_and(|records| records > MAX_RECORDS) {
            return Ok(FeedRead::Everything { position: next });
        }
        let changes = rows.into_iter().filter_map(|row| row.change).collect();
        Ok(FeedRead::Changes { changes, position: next })
    }

    /// Removes up to `limit` of the oldest records of each feed if they are older than `age`. Returns the greater
    /// number.
    pub async fn prune_changes(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let mailboxes = self.prune_feed(PRUNE_MAILBOX_CHANGES, age, limit).await?;
        let acks = self.prune_feed(PRUNE_ACK_CHANGES, age, limit).await?;
        // A caller goes on while one of the feeds fills its limit, which a sum would not show.
        Ok(mailboxes.max(acks))
    }

    async fn prune_feed(&self, statement: &'static str, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(statement)
            .bind(age.as_secs_f64())
            .bind(limit)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("pruning the change feed"))?;
        Ok(done.rows_affected())
    }
}

/// Returns the end of both feeds as this transaction sees it.
pub(crate) async fn current_position(tx: &mut DatabaseSession) -> StoreResult<FeedPosition> {
    let read = sqlx::query_as(CURRENT_POSITION).fetch_one(tx).await;
    let (snapshot, epoch) = read.map_err(StoreError::from_sqlx("reading the position of the change feed"))?;
    Ok(FeedPosition { snapshot, epoch })
}

/// Reads the mailboxes whose ack floors rose after `position`.
pub(crate) async fn acked_since(tx: &mut DatabaseSession, position: &FeedPosition) -> StoreResult<AckedMailboxes> {
    let rows: Vec<(String, i64, Option<Vec<WorkspaceId>>, Option<Vec<AgentId>>)> = sqlx::query_as(READ_ACKS)
        .bind(&position.snapshot)
        .bind(MAX_RECORDS + 1)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("reading the acks since a position"))?;
    let next = rows.first().map(|(snapshot, epoch, ..)| FeedPosition { snapshot: snapshot.clone(), epoch: *epoch });
    // Never empty: the single row of recovery_state is part of the schema.
    let next = next.unwrap_or_else(|| position.clone());
    let is_complete = next.epoch == position.epoch && i64::try_from(rows.len()).is_ok_and(|read| read <= MAX_RECORDS);
    let keys = rows.into_iter().filter_map(|(.., workspaces, agents)| Some((workspaces?, agents?)));
    let mailboxes = keys.flat_map(|(workspaces, agents)| workspaces.into_iter().zip(agents)).collect();
    Ok(AckedMailboxes { mailboxes, position: next, is_complete })
}
