//! Dead letters as operators see them: list, count and purge.
//!
//! A dead letter is a settlement row in the state dead-lettered together with its delivery. It is kept as long as that
//! delivery; purging only hides it.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, DeliveryId, WorkspaceScope,
    mailboxes::{
        dead_letter::{DeadLetter, DeadLetterReason},
        stream::Seq,
    },
};

use crate::{
    Store, StoreError, StoreResult,
    codes::{DEAD_LETTERED, MESSAGE_SOURCE},
};

/// Filter of dead letters; an unset field matches all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeadLetterFilter {
    pub agent: Option<AgentId>,
    /// Node of the agent when the delivery was created.
    pub node: Option<String>,
    pub reason: Option<String>,
    /// Dead-lettered at this instant or later.
    pub from: Option<DateTime<Utc>>,
    /// Dead-lettered before this instant.
    pub until: Option<DateTime<Utc>>,
}

/// SQL that selects dead letters. The day of a message follows from its id, so that only one partition of messages is
/// searched for the sender.
macro_rules! letters {
    ($rest:expr) => {
        const_format::concatcp!(
            formatcp!("SELECT e.agent_id, a.name AS agent_name, e.seq, d.source_id, d.redrive_no, d.channel_id, d.node_id,
        coalesce(e.reason, 'ttl_expired') AS reason, e.error, e.at, d.created_at, d.expires_at,
        m.agent_name AS sender_name, e.redriven_seq, e.redriven_at
   FROM delivery_exceptions e
   JOIN deliveries d ON d.workspace_id = e.workspace_id AND d.agent_id = e.agent_id AND d.seq = e.seq
   LEFT JOIN agents a ON a.workspace_id = e.workspace_id AND a.agent_id = e.agent_id
   LEFT JOIN messages m ON d.source_kind = {MESSAGE_SOURCE} AND m.workspace_id = e.workspace_id AND m.message_id = d.source_id
        AND m.created_on = (to_timestamp(((d.source_id >> 22) + 1735689600000) / 1000.0) AT TIME ZONE 'UTC')::date
  WHERE e.workspace_id = $1 AND e.state = {DEAD_LETTERED} AND e.purged_at IS NULL "),
            $rest
        )
    };
}

// A missing bound of the time is infinite, so that the index by time serves every filter.
const LIST: &str = letters!(
    "AND ($2::bigint IS NULL OR e.agent_id = $2) AND ($3::text IS NULL OR d.node_id = $3)
     AND ($4::text IS NULL OR coalesce(e.reason, 'ttl_expired') = $4)
     AND e.at >= coalesce($5::timestamptz, '-infinity') AND e.at < coalesce($6::timestamptz, 'infinity')
     AND ($7::timestamptz IS NULL OR (e.at, e.agent_id, e.seq) < ($7, $8, $9))
   ORDER BY e.at DESC, e.agent_id DESC, e.seq DESC LIMIT $10"
);

const GET: &str = letters!("AND d.source_id = $2 AND e.agent_id = $3 AND d.redrive_no = $4");

/// Counts by reason without the joins that only a list needs.
const COUNT: &str = formatcp!(
    "
SELECT coalesce(e.reason, 'ttl_expired') AS reason, count(*)
  FROM delivery_exceptions e
 WHERE e.workspace_id = $1 AND e.state = {DEAD_LETTERED} AND e.purged_at IS NULL
   AND ($2::bigint IS NULL OR e.agent_id = $2)
   AND ($4::text IS NULL OR coalesce(e.reason, 'ttl_expired') = $4)
   AND e.at >= coalesce($5::timestamptz, '-infinity') AND e.at < coalesce($6::timestamptz, 'infinity')
   AND (NOT $7 OR e.redriven_seq IS NULL)
   AND EXISTS (SELECT FROM deliveries d
                WHERE d.workspace_id = e.workspace_id AND d.agent_id = e.agent_id AND d.seq = e.seq
                  AND ($3::text IS NULL OR d.node_id = $3))
 GROUP BY 1 ORDER BY 1"
);

// SKIP LOCKED: a purge never waits for a redrive of the same dead letter; the next page meets it again.
const PURGE: &str = formatcp!(
    "
WITH letters AS (
    SELECT e.workspace_id, e.agent_id, e.seq
      FROM delivery_exceptions e
     WHERE e.workspace_id = $1 AND e.state = {DEAD_LETTERED} AND e.purged_at IS NULL
       AND ($2::bigint IS NULL OR e.agent_id = $2)
       AND ($4::text IS NULL OR coalesce(e.reason, 'ttl_expired') = $4)
       AND e.at >= coalesce($5::timestamptz, '-infinity') AND e.at < coalesce($6::timestamptz, 'infinity')
       AND ($3::text IS NULL OR EXISTS (
            SELECT FROM deliveries d
             WHERE d.workspace_id = e.workspace_id AND d.agent_id = e.agent_id AND d.seq = e.seq
               AND d.node_id = $3))
     ORDER BY e.at, e.agent_id, e.seq LIMIT $8
       FOR UPDATE OF e SKIP LOCKED
)
UPDATE delivery_exceptions e SET purged_at = $7
  FROM letters l
 WHERE e.workspace_id = l.workspace_id AND e.agent_id = l.agent_id AND e.seq = l.seq AND e.purged_at IS NULL"
);

impl Store {
    /// Lists dead letters, newest first, starting behind `after`.
    pub async fn dead_letters(
        &self,
        scope: WorkspaceScope,
        filter: &DeadLetterFilter,
        after: Option<&DeadLetter>,
        limit: i64,
    ) -> StoreResult<Vec<DeadLetter>> {
        sqlx::query_as(LIST)
            .bind(scope.workspace_id())
            .bind(filter.agent)
            .bind(&filter.node)
            .bind(&filter.reason)
            .bind(filter.from)
            .bind(filter.until)
            .bind(after.map(|letter| letter.at))
            .bind(after.map(|letter| letter.agent_id))
            .bind(after.map(|letter| letter.seq))
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing dead letters"))
    }

    pub async fn dead_letter(&self, scope: WorkspaceScope, id: DeliveryId) -> StoreResult<Option<DeadLetter>> {
        sqlx::query_as(GET)
            .bind(scope.workspace_id())
            .bind(id.source)
            .bind(id.agent)
            .bind(id.redrive_no)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a dead letter"))
    }

    /// Counts dead letters by reason; with `redrivable` only those without a redrive.
    pub async fn count_dead_letters(
        &self,
        scope: WorkspaceScope,
        filter: &DeadLetterFilter,
        redrivable: bool,
    ) -> StoreResult<Vec<(DeadLetterReason, i64)>> {
        sqlx::query_as(COUNT)
            .bind(scope.workspace_id())
            .bind(filter.agent)
            .bind(&filter.node)
            .bind(&filter.reason)
            .bind(filter.from)
            .bind(filter.until)
            .bind(redrivable)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("counting dead letters"))
    }

    /// Hides up to `limit` dead letters and returns their count.
    pub async fn purge_dead_letters(
        &self,
        scope: WorkspaceScope,
        filter: &DeadLetterFilter,
        at: DateTime<Utc>,
        limit: i64,
    ) -> StoreResult<u64> {
        let done = sqlx::query(PURGE)
            .bind(scope.workspace_id())
            .bind(filter.agent)
            .bind(&filter.node)
            .bind(&filter.reason)
            .bind(filter.from)
            .bind(filter.until)
            .bind(at)
            .bind(limit)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("purging dead letters"))?;
        Ok(done.rows_affected())
    }

    /// Hides one dead letter. Returns false if there is none.
    pub async fn purge_dead_letter(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        seq: Seq,
        at: DateTime<Utc>,
    ) -> StoreResult<bool> {
        let doing = "purging a dead letter";
        // After a recovery the seq may be that of another delivery.
        let epoch = self.epoch(doing)?;
        let done = sqlx::query(formatcp!(
            "UPDATE delivery_exceptions SET purged_at = $4
              WHERE workspace_id = $1 AND agent_id = $2 AND seq = $3 AND state = {DEAD_LETTERED} AND purged_at IS NULL
                AND relay_require_epoch($5)"
        ))
        .bind(scope.workspace_id())
        .bind(agent)
        .bind(seq)
        .bind(at)
        .bind(epoch)
        .execute(&self.pool)
        .await;
        let done = self.note_epoch(epoch, done.map_err(StoreError::from_sqlx(doing)))?;
        Ok(done.rows_affected() > 0)
    }
}
