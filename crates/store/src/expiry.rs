//! Deliveries whose time is up become dead letters.
//!
//! The one statement that does it is used by the worker's expiry loop and by gateways that meet an
//! expired row while they replay. It locks the mailbox's cursor row first, so that an ack and an expiry
//! cannot both win.

use std::time::Duration;

use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use relay_domain::{AgentId, DeliveryId, WorkspaceId, WorkspaceScope, dead_letter::DeadReason, event};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::{PgConnection, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    delivered::Place,
    events::{self, NewEvent, Recorded},
    loop_state::{Remembered, recall, remember},
    skipped::settled_above,
};

/// The longest life of a delivery: older partitions hold nothing that is still to expire.
const LONGEST_TTL_DAYS: i64 = 6;
/// Delivery partitions older than this have been dropped: a bound for the planner, generous by a day.
const KEPT_DAYS: i64 = 9;
/// Rows of one mailbox that one call dead-letters.
const PER_MAILBOX: i64 = 500;
/// Dead letters of one transaction and workspace that are recorded as events. More only come of a backlog.
const EVENTS_PER_WORKSPACE: usize = 1000;
/// Rows that one step of the loop looks at; more only when that many expire at the same microsecond.
const PER_STEP: i64 = 1000;

/// A delivery that has just been dead-lettered, with what its sender is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLettered {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// Which delivery.
    pub delivery_id: DeliveryId,
    /// Its place in the mailbox: a tombstone takes it.
    pub seq: i64,
    /// Why.
    pub reason: DeadReason,
    /// What went wrong, where there is something more exact than the reason.
    pub error: Option<String>,
    /// The recipient's name; none when the agent is gone.
    pub agent_name: Option<String>,
    /// Who sent the message; none when the source is no message or has been dropped.
    pub sender: Option<AgentId>,
    /// The channel of the message, or the one behind its conversation.
    pub place: Option<Place>,
}

impl DeadLettered {
    /// What its sender and observers are told.
    #[must_use]
    pub fn notice(&self) -> Value {
        json!({
            "delivery_id": self.delivery_id.to_string(),
            "message_id": self.delivery_id.source.to_string(),
            "target_agent_id": self.delivery_id.agent,
            "target_agent_name": self.agent_name,
            "seq": self.seq,
            "reason": self.reason.as_str(),
            "error": self.error.as_deref().unwrap_or(self.reason.error()),
            "retryable": false,
        })
    }

    /// The same as an event.
    #[must_use]
    pub fn event(&self) -> NewEvent {
        let event = NewEvent::new(event::DELIVERY_FAILED, self.notice()).by(self.delivery_id.agent);
        Place::of(self.place.as_ref(), event)
    }
}

/// What one step of the expiry loop did.
#[derive(Debug, Default)]
pub struct Expired {
    /// The new dead letters.
    pub dead: Vec<DeadLettered>,
    /// The events of them.
    pub recorded: Vec<Recorded>,
    /// Whether there is more to look at right away.
    pub more: bool,
}

/// Which of the two passes of the expiry loop.
///
/// Every row is looked at twice: when it expires, and once more ten minutes later, for rows that became
/// visible late. That costs two index reads a row and no repeated scan of the overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpiryPass {
    /// Rows whose time is up now.
    First,
    /// Rows whose time was up ten minutes ago.
    Second,
}

impl ExpiryPass {
    const fn name(self) -> &'static str {
        match self {
            Self::First => "expiry",
            Self::Second => "expiry_second_pass",
        }
    }

    const fn behind(self) -> Duration {
        match self {
            Self::First => Duration::ZERO,
            Self::Second => Duration::from_secs(600),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Scanned {
    until: DateTime<Utc>,
}

const LOCK_CURSORS: &str = "
SELECT c.agent_id
  FROM (SELECT DISTINCT * FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)) AS k
  JOIN mailbox_cursors c USING (workspace_id, agent_id)
 ORDER BY c.workspace_id, c.agent_id
   FOR UPDATE OF c";

// A statement of its own, after the locks: its snapshot holds every ack that we waited for.
const DEAD_LETTER: &str = "
WITH expired AS MATERIALIZED (
    SELECT d.workspace_id, d.agent_id, d.seq, d.source_kind, d.source_id, d.redrive_no, d.channel_id
      FROM (SELECT DISTINCT * FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)) AS k
      JOIN mailbox_cursors c USING (workspace_id, agent_id)
     CROSS JOIN LATERAL (
           SELECT * FROM deliveries d
            WHERE d.workspace_id = c.workspace_id AND d.agent_id = c.agent_id
              AND d.seq > c.settled_floor AND d.created_on >= $4
              AND CASE $7::text
                  WHEN 'ttl_expired' THEN d.expires_at <= $3
                  WHEN 'session_gone' THEN EXISTS (SELECT FROM agents o WHERE o.workspace_id = d.workspace_id
                                                      AND o.agent_id = d.agent_id AND o.mailbox_orphaned)
                  ELSE true END
              -- REST-acked, failed and dead-lettered rows are settled; a deferred one expires like any other.
              AND NOT EXISTS (SELECT FROM delivery_exceptions e
                               WHERE e.workspace_id = d.workspace_id AND e.agent_id = d.agent_id
                                 AND e.seq = d.seq AND e.state <> 3)
            ORDER BY d.seq LIMIT $5) AS d
), dead AS (
    INSERT INTO delivery_exceptions AS e (workspace_id, agent_id, seq, state, error, retryable, reason, at)
    SELECT workspace_id, agent_id, seq, 4, $6, false, $7, $3 FROM expired
    ON CONFLICT (workspace_id, agent_id, seq)
    DO UPDATE SET state = 4, error = excluded.error, retryable = false, reason = excluded.reason,
                  available_at = NULL, at = excluded.at
            WHERE e.state = 3
    RETURNING e.workspace_id, e.agent_id, e.seq
)
SELECT x.workspace_id, x.agent_id, x.seq, x.source_id, x.redrive_no, a.name,
       m.agent_id AS sender, c.channel_id, c.name AS channel_name, c.conversation_id
  FROM dead
  JOIN expired x USING (workspace_id, agent_id, seq)
  LEFT JOIN agents a ON a.workspace_id = x.workspace_id AND a.agent_id = x.agent_id
  LEFT JOIN channels c ON c.workspace_id = x.workspace_id AND c.channel_id = x.channel_id
  -- A message's day follows from its id: milliseconds since 2025 in the upper bits.
  LEFT JOIN messages m ON x.source_kind = 0 AND m.workspace_id = x.workspace_id AND m.message_id = x.source_id
        AND m.created_on = (to_timestamp(((x.source_id >> 22) + 1735689600000) / 1000.0) AT TIME ZONE 'UTC')::date
 ORDER BY x.workspace_id, x.agent_id, x.seq";

/// Lets the settled floor of locked mailboxes run on over what is settled apart.
const EXTEND_SETTLED_FLOORS: &str = concat!(
    "
UPDATE mailbox_cursors c
   SET settled_floor = run.floor
  FROM (SELECT x.workspace_id, x.agent_id, max(x.last_seq) AS floor
          FROM (SELECT b.workspace_id, b.agent_id, b.settled_floor, apart.last_seq,
                       sum(apart.width) OVER (PARTITION BY b.workspace_id, b.agent_id ORDER BY apart.last_seq) AS reach
                  FROM (SELECT DISTINCT * FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)) AS k
                  JOIN mailbox_cursors b ON b.workspace_id = k.workspace_id AND b.agent_id = k.agent_id
                 CROSS JOIN LATERAL (",
    settled_above!("b", "b.settled_floor"),
    ") AS apart) AS x
         WHERE x.last_seq = x.settled_floor + x.reach
         GROUP BY x.workspace_id, x.agent_id) AS run
 WHERE c.workspace_id = run.workspace_id AND c.agent_id = run.agent_id AND c.settled_floor < run.floor"
);

/// Where the next step of a scan ends: after at most `$4` rows, or at `$2`.
const STEP_END: &str = "
SELECT expires_at FROM deliveries
 WHERE expires_at > $1 AND expires_at <= $2 AND created_on >= $3
 ORDER BY expires_at OFFSET $4 LIMIT 1";

const MAILBOXES_IN_STEP: &str = "
SELECT DISTINCT d.workspace_id, d.agent_id
  FROM deliveries d
  JOIN mailbox_cursors c USING (workspace_id, agent_id)
 WHERE d.expires_at > $1 AND d.expires_at <= $2 AND d.created_on >= $3
   AND d.seq > c.settled_floor
   AND NOT EXISTS (SELECT FROM delivery_exceptions e
                    WHERE e.workspace_id = d.workspace_id AND e.agent_id = d.agent_id
                      AND e.seq = d.seq AND e.state <> 3)";

impl Store {
    /// Dead-letters what has expired by `now` in these mailboxes, lowest seq first, at most 500 rows a
    /// mailbox; a mailbox that yields 500 may hold more. Returns the rows that this call dead-lettered, and
    /// their events: two callers at once never return the same row.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; nothing has changed then.
    pub async fn dead_letter_expired(
        &self,
        mailboxes: &[(WorkspaceScope, AgentId)],
        now: DateTime<Utc>,
    ) -> StoreResult<(Vec<DeadLettered>, Vec<Recorded>)> {
        self.dead_letter_mailboxes(mailboxes, DeadReason::TtlExpired, now).await
    }

    /// Dead-letters what the reason covers in these mailboxes, lowest seq first, at most 500 rows a mailbox: what has
    /// expired, what is unsettled where the agent's session is gone for good, or else all that is unsettled.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; nothing has changed then.
    pub async fn dead_letter_mailboxes(
        &self,
        mailboxes: &[(WorkspaceScope, AgentId)],
        reason: DeadReason,
        now: DateTime<Utc>,
    ) -> StoreResult<(Vec<DeadLettered>, Vec<Recorded>)> {
        if mailboxes.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let (workspaces, agents): (Vec<i64>, Vec<i64>) =
            mailboxes.iter().map(|(scope, agent)| (scope.workspace_id().get(), agent.get())).unzip();
        let doing = "dead-lettering mailboxes";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let dead = dead_letter(&mut tx, &workspaces, &agents, reason, now).await?;
        let recorded = record(&mut tx, &dead, now).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok((dead, recorded))
    }

    /// How far the expiry loop is behind.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn expiry_lag(&self, now: DateTime<Utc>) -> StoreResult<Duration> {
        let until: Option<String> = sqlx::query_scalar("SELECT value ->> 'until' FROM loop_state WHERE loop = $1")
            .bind(ExpiryPass::First.name())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("measuring the expiry loop's lag"))?
            .flatten();
        let until = until.and_then(|text| text.parse::<DateTime<Utc>>().ok()).unwrap_or(now);
        Ok((now - until).to_std().unwrap_or_default())
    }

    /// Mailboxes of agents that were deleted within the last hour and that still hold something: whoever deleted
    /// the agent did not get to it.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn mailboxes_of_deleted(&self, limit: i64) -> StoreResult<Vec<(WorkspaceScope, AgentId)>> {
        let rows: Vec<(i64, i64)> = sqlx::query_as(
            "SELECT a.workspace_id, a.agent_id
               FROM agents a
               JOIN mailbox_heads h USING (workspace_id, agent_id)
               JOIN mailbox_cursors c USING (workspace_id, agent_id)
              WHERE a.deleted_at > now() - interval '1 hour' AND c.settled_floor < h.next_seq - 1
              ORDER BY a.deleted_at LIMIT $1",
        )
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("finding the mailboxes of deleted agents"))?;
        let scoped =
            |(workspace, agent)| (WorkspaceScope::from_engine_row(WorkspaceId::new(workspace)), AgentId::new(agent));
        Ok(rows.into_iter().map(scoped).collect())
    }

    /// One step of the expiry loop: looks at the rows that expired since the last step, up to a bound,
    /// dead-letters those that nobody has settled, and remembers how far it came. While another worker
    /// is at it, does nothing.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; the position has not moved then.
    pub async fn expire_step(&self, pass: ExpiryPass, now: DateTime<Utc>) -> StoreResult<Expired> {
        let doing = "looking for expired deliveries";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match recall::<Scanned>(&mut tx, pass.name()).await? {
            Remembered::Busy => return Ok(Expired::default()),
            Remembered::Ours(Some(scanned)) => scanned.until,
            Remembered::Ours(None) => now - TimeDelta::days(LONGEST_TTL_DAYS + 1),
        };
        let to = now - pass.behind();
        if to <= from {
            return Ok(Expired::default());
        }
        let oldest_day = oldest_day(from);
        let full: Option<DateTime<Utc>> = sqlx::query_scalar(STEP_END)
            .bind(from)
            .bind(to)
            .bind(oldest_day)
            .bind(PER_STEP - 1)
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let until = full.unwrap_or(to);
        let mailboxes: Vec<(i64, i64)> = sqlx::query_as(MAILBOXES_IN_STEP)
            .bind(from)
            .bind(until)
            .bind(oldest_day)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let (workspaces, agents): (Vec<i64>, Vec<i64>) = mailboxes.into_iter().unzip();
        let dead = dead_letter(&mut tx, &workspaces, &agents, DeadReason::TtlExpired, now).await?;
        // A mailbox with more than one call may dead-letter is looked at again before we go on.
        let unfinished = has_full_mailbox(&dead);
        if !unfinished {
            remember(&mut tx, pass.name(), &Scanned { until }).await?;
        }
        let recorded = record(&mut tx, &dead, now).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Expired { dead, recorded, more: unfinished || full.is_some() })
    }
}

/// Locks the mailboxes, dead-letters what has expired in them, or all of it for another reason, and lets their
/// settled floors run on.
async fn dead_letter(
    tx: &mut PgConnection,
    workspaces: &[i64],
    agents: &[i64],
    reason: DeadReason,
    now: DateTime<Utc>,
) -> StoreResult<Vec<DeadLettered>> {
    if agents.is_empty() {
        return Ok(Vec::new());
    }
    let doing = "dead-lettering expired deliveries";
    lock_cursors(tx, workspaces, agents).await?;
    let rows = sqlx::query(DEAD_LETTER)
        .bind(workspaces)
        .bind(agents)
        .bind(now)
        .bind((now - TimeDelta::days(KEPT_DAYS)).date_naive())
        .bind(PER_MAILBOX)
        .bind(reason.error())
        .bind(reason.as_str())
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let dead: Vec<_> = rows.iter().map(|row| dead_lettered(row, reason)).collect();
    if !dead.is_empty() {
        extend_settled_floors(tx, workspaces, agents).await?;
    }
    Ok(dead)
}

/// Records dead letters, in the order of their mailboxes.
pub(crate) async fn record(
    tx: &mut PgConnection,
    dead: &[DeadLettered],
    now: DateTime<Utc>,
) -> StoreResult<Vec<Recorded>> {
    let of_workspaces = dead.chunk_by(|a, b| a.scope == b.scope);
    let some = of_workspaces.flat_map(|letters| letters.iter().take(EVENTS_PER_WORKSPACE));
    events::append_mixed(tx, now, some.map(|letter| (letter.scope, letter.event())).collect()).await
}

/// Lets the settled floors of these mailboxes run on; the caller holds the locks on their cursor rows.
pub(crate) async fn extend_settled_floors(
    tx: &mut PgConnection,
    workspaces: &[i64],
    agents: &[i64],
) -> StoreResult<u64> {
    let done = sqlx::query(EXTEND_SETTLED_FLOORS)
        .bind(workspaces)
        .bind(agents)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("extending settled floors"))?;
    Ok(done.rows_affected())
}

/// Locks the cursor rows of these mailboxes in order, for the rest of the transaction.
pub(crate) async fn lock_cursors(tx: &mut PgConnection, workspaces: &[i64], agents: &[i64]) -> StoreResult<()> {
    sqlx::query(LOCK_CURSORS)
        .bind(workspaces)
        .bind(agents)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("locking mailbox cursors"))?;
    Ok(())
}

/// The oldest partition that can hold a row that expires after `instant`.
fn oldest_day(instant: DateTime<Utc>) -> NaiveDate {
    (instant - TimeDelta::days(LONGEST_TTL_DAYS)).date_naive()
}

fn has_full_mailbox(dead: &[DeadLettered]) -> bool {
    let limit = usize::try_from(PER_MAILBOX).unwrap_or(usize::MAX);
    dead.chunk_by(|a, b| (a.scope, a.delivery_id.agent) == (b.scope, b.delivery_id.agent))
        .any(|mailbox| mailbox.len() >= limit)
}

fn dead_lettered(row: &PgRow, reason: DeadReason) -> DeadLettered {
    DeadLettered {
        scope: WorkspaceScope::from_engine_row(WorkspaceId::new(row.get("workspace_id"))),
        delivery_id: DeliveryId {
            source: row.get("source_id"),
            agent: AgentId::new(row.get("agent_id")),
            redrive_no: row.get("redrive_no"),
        },
        seq: row.get("seq"),
        reason,
        error: None,
        agent_name: row.get("name"),
        sender: row.get::<Option<i64>, _>("sender").map(AgentId::new),
        place: Place::from_row(row),
    }
}
