//! Dead-lettering of deliveries that expire, lose their agent's session or outlive their agent.
//!
//! One statement serves the worker's expiry loop, gateways that meet an expired row during replay, and the deletion of
//! agents. Its callers lock the mailbox's cursor row first, so that an ack and an expiry of one row cannot both win.

use std::time::Duration;

use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, DeliveryId, WorkspaceId, WorkspaceScope,
    events::kind,
    mailboxes::{MessageLocation, dead_letter::DeadLetterReason, stream::Seq},
};
use relay_wire::{events::recorded_data::DeliveryDeadLettered, field::ToValue as _};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    codes::{DEAD_LETTERED, DEFERRED, MESSAGE_SOURCE},
    connections::DatabaseSession,
    decode::decode_rows,
    events::{self, Event, RecordedEvents},
    mailboxes::{
        cursors::split_keys,
        delivery_events::LocatedDelivery,
        settled_floors::{extend_settled_floors, lock_cursors},
    },
    maintenance::loop_state::{LoopState, lock_state, read_state, save_state},
};

/// Longest TTL of a delivery: older partitions hold no row that is still to expire.
const LONGEST_TTL_DAYS: i64 = 6;
/// Days after which delivery partitions are dropped, plus one: lets the planner skip older partitions.
const KEPT_DAYS: i64 = 9;
/// Rows of one mailbox that one call dead-letters at most. Bounds the time for which the cursor row stays locked.
const PER_MAILBOX: i64 = 500;
/// Rows that one transaction dead-letters at most, in all of its mailboxes: after an outage of the workers a thousand
/// mailboxes have as many as they hold, which no transaction would finish in time.
pub const MAX_DEAD_LETTERED: usize = 2000;
/// Dead letters of one transaction and workspace that are recorded as events. Only a backlog has more.
const EVENTS_PER_WORKSPACE: usize = 1000;
/// Rows that one step of the loop reads; more only if that many expire in the same microsecond.
const PER_STEP: i64 = 1000;

/// Newly dead-lettered delivery, with the content of its sender's notice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetteredDelivery {
    pub scope: WorkspaceScope,
    pub delivery_id: DeliveryId,
    /// Position in the mailbox; the node receives a tombstone there.
    pub seq: Seq,
    pub reason: DeadLetterReason,
    /// Error text, if there is one more specific than the reason's default.
    pub error: Option<String>,
    /// Name of the recipient; `None` if the agent was deleted and removed.
    pub agent_name: Option<String>,
    /// Sender of the message; `None` if the source is not a message or retention has dropped it.
    pub sender: Option<AgentId>,
    /// `None` if the delivery has no channel.
    pub place: Option<MessageLocation>,
}

impl DeadLetteredDelivery {
    /// Returns the notice for the sender and observers.
    #[must_use]
    pub fn notice(&self) -> Value {
        let data = DeliveryDeadLettered {
            delivery_id: self.delivery_id,
            message_id: self.delivery_id.source.message_id(),
            target_agent_id: self.delivery_id.agent,
            target_agent_name: self.agent_name.as_deref(),
            seq: self.seq,
            reason: self.reason.as_str(),
            error: self.error.as_deref().unwrap_or(self.reason.default_error()),
            retryable: false,
        };
        data.to_value()
    }

    /// Returns the notice as a `delivery.failed` event.
    #[must_use]
    pub fn event(&self) -> Event {
        let event = Event::new(kind::DELIVERY_FAILED, self.notice()).by_agent(self.delivery_id.agent);
        MessageLocation::attach(self.place.as_ref(), event)
    }
}

/// Result of one step of the expiry loop.
#[derive(Debug, Default)]
pub struct ExpiryStep {
    pub dead_lettered: Vec<DeadLetteredDelivery>,
    pub recorded: Vec<RecordedEvents>,
    /// True if the next step has work right away.
    pub more: bool,
}

/// Pass of the expiry loop.
///
/// Each pass moves a position along `expires_at`, so a row whose transaction commits after the position has passed it
/// is missed. The second pass, ten minutes later, finds it. Two index reads per row cost less than rescanning an
/// overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpiryPass {
    /// Rows that expire now.
    First,
    /// Rows that expired ten minutes ago.
    Second,
}

impl ExpiryPass {
    const fn name(self) -> &'static str {
        match self {
            Self::First => "expiry",
            Self::Second => "expiry_second_pass",
        }
    }

    const fn delay(self) -> Duration {
        match self {
            Self::First => Duration::ZERO,
            Self::Second => Duration::from_secs(600),
        }
    }

    /// Time that a step of the loop covers at least. The second pass rarely finds a row, and is late anyway.
    const fn least_step(self) -> Duration {
        match self {
            Self::First => Duration::ZERO,
            Self::Second => Duration::from_secs(10),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct ScanPosition {
    until: DateTime<Utc>,
}

// A separate statement after the locks: under READ COMMITTED its snapshot then includes every ack that the locks waited
// for. The WHERE of the upsert repeats the expected state (deferred).
const DEAD_LETTER: &str = formatcp!("
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
              -- Rows acked over REST, failed and dead-lettered rows are settled. A deferred row expires like any other.
              AND NOT EXISTS (SELECT FROM delivery_exceptions e
                               WHERE e.workspace_id = d.workspace_id AND e.agent_id = d.agent_id
                                 AND e.seq = d.seq AND e.state <> {DEFERRED})
            ORDER BY d.seq LIMIT $5) AS d
     LIMIT $8
), dead_lettered AS (
    INSERT INTO delivery_exceptions AS e (workspace_id, agent_id, seq, state, error, retryable, reason, at)
    SELECT workspace_id, agent_id, seq, {DEAD_LETTERED}, $6, false, $7, $3 FROM expired
    ON CONFLICT (workspace_id, agent_id, seq)
    DO UPDATE SET state = {DEAD_LETTERED}, error = excluded.error, retryable = false, reason = excluded.reason,
                  available_at = NULL, at = excluded.at
            WHERE e.state = {DEFERRED}
    RETURNING e.workspace_id, e.agent_id, e.seq
)
SELECT x.workspace_id, x.agent_id, x.seq, x.source_id, x.redrive_no, a.name,
       m.agent_id AS sender, c.channel_id, c.name AS channel_name, c.conversation_id
  FROM dead_lettered
  JOIN expired x USING (workspace_id, agent_id, seq)
  LEFT JOIN agents a ON a.workspace_id = x.workspace_id AND a.agent_id = x.agent_id
  LEFT JOIN channels c ON c.workspace_id = x.workspace_id AND c.channel_id = x.channel_id
  -- The day of a message follows from its id (milliseconds since 2025 in the upper bits), so one partition is read.
  LEFT JOIN messages m ON x.source_kind = {MESSAGE_SOURCE} AND m.workspace_id = x.workspace_id AND m.message_id = x.source_id
        AND m.created_on = (to_timestamp(((x.source_id >> 22) + 1735689600000) / 1000.0) AT TIME ZONE 'UTC')::date
 ORDER BY x.workspace_id, x.agent_id, x.seq");

/// End of the next step of a scan: the instant of its row number `$4`, if there are that many up to `$2`.
const STEP_END: &str = "
SELECT expires_at FROM deliveries
 WHERE expires_at > $1 AND expires_at <= $2 AND created_on >= $3
 ORDER BY expires_at OFFSET $4 LIMIT 1";

/// Time after which the position of a pass moves on even if nothing has expired: retention waits for it.
const MAX_UNMOVED: TimeDelta = TimeDelta::minutes(1);

/// Non-empty mailboxes of agents that were deleted within the last hour.
const OF_DELETED_AGENTS: &str = "
  FROM agents a
  JOIN mailbox_heads h USING (workspace_id, agent_id)
  JOIN mailbox_cursors c USING (workspace_id, agent_id)
 WHERE a.deleted_at > relay_now() - interval '1 hour' AND c.settled_floor < h.next_seq - 1";

// A step of a pass has rows up to its end, or an old position. In the order of the index, so that no plan reads whole
// days.
const HAS_EXPIRED: &str = formatcp!(
    "
SELECT count(*) < 2
    OR bool_or(l.scanned < p.until - $6
               OR (SELECT true FROM deliveries
                    WHERE expires_at > l.scanned AND expires_at <= p.until AND created_on >= $5
                    ORDER BY expires_at LIMIT 1) IS NOT NULL)
    OR (SELECT true {OF_DELETED_AGENTS} ORDER BY a.deleted_at LIMIT 1) IS NOT NULL
  FROM (VALUES ($1::text, $2::timestamptz), ($3, $4)) AS p (name, until)
  JOIN (SELECT loop AS name, (value ->> 'until')::timestamptz AS scanned FROM loop_state
         WHERE loop IN ($1, $3)) AS l USING (name)
 WHERE l.scanned IS NOT NULL"
);

const MAILBOXES_IN_STEP: &str = formatcp!(
    "
SELECT DISTINCT d.workspace_id, d.agent_id
  FROM deliveries d
  JOIN mailbox_cursors c USING (workspace_id, agent_id)
 WHERE d.expires_at > $1 AND d.expires_at <= $2 AND d.created_on >= $3
   AND d.seq > c.settled_floor
   AND NOT EXISTS (SELECT FROM delivery_exceptions e
                    WHERE e.workspace_id = d.workspace_id AND e.agent_id = d.agent_id
                      AND e.seq = d.seq AND e.state <> {DEFERRED})"
);

impl Store {
    /// Dead-letters the deliveries of these mailboxes that have expired by `now`, lowest seq first, at most 500 rows a
    /// mailbox and [`MAX_DEAD_LETTERED`] in all; a mailbox that yields 500, and each of a full call, may hold more.
    /// Returns the dead letters of this call only: concurrent callers never return the same row.
    pub async fn dead_letter_expired(
        &self,
        mailboxes: &[(WorkspaceScope, AgentId)],
        now: DateTime<Utc>,
    ) -> StoreResult<(Vec<DeadLetteredDelivery>, Vec<RecordedEvents>)> {
        self.dead_letter_mailboxes(mailboxes, DeadLetterReason::TtlExpired, now).await
    }

    /// Dead-letters the unsettled deliveries of these mailboxes that the reason covers, lowest seq first, at most 500
    /// rows a mailbox and [`MAX_DEAD_LETTERED`] in all. `TtlExpired` covers expired rows, `SessionGone` mailboxes whose
    /// agent's session has ended for good, any other reason all rows.
    pub async fn dead_letter_mailboxes(
        &self,
        mailboxes: &[(WorkspaceScope, AgentId)],
        reason: DeadLetterReason,
        now: DateTime<Utc>,
    ) -> StoreResult<(Vec<DeadLetteredDelivery>, Vec<RecordedEvents>)> {
        if mailboxes.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let (workspaces, agents) = split_keys(mailboxes);
        let doing = "dead-lettering mailboxes";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let dead_lettered = dead_letter(&mut tx, &workspaces, &agents, reason, now).await?;
        let recorded = record_dead_letters(&mut tx, &dead_lettered, now).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok((dead_lettered, recorded))
    }

    /// Returns the lag of the expiry loop.
    pub async fn expiry_lag(&self, now: DateTime<Utc>) -> StoreResult<Duration> {
        let scanned = read_state::<ScanPosition>(&self.pool, ExpiryPass::First.name()).await?;
        // Before the first step there is no lag.
        let until = scanned.map_or(now, |scanned| scanned.until);
        // A pass that ended after `now` was read has no lag.
        Ok((now - until).to_std().unwrap_or_default())
    }

    /// Returns the first day whose deliveries both passes have not finished; `None` before their first step. Retention
    /// must not drop it: its rows have no dead letters, and settled floors could not pass them.
    pub async fn first_unexpired_day(&self) -> StoreResult<Option<NaiveDate>> {
        let mut passed: Option<DateTime<Utc>> = None;
        for pass in [ExpiryPass::First, ExpiryPass::Second] {
            let Some(scanned) = read_state::<ScanPosition>(&self.pool, pass.name()).await? else { return Ok(None) };
            passed = Some(passed.map_or(scanned.until, |until| until.min(scanned.until)));
        }
        Ok(passed.map(oldest_day))
    }

    /// Finds non-empty mailboxes of agents that were deleted within the last hour. The process that deleted the agent
    /// stopped before it had dead-lettered them.
    pub async fn mailboxes_of_deleted_agents(&self, limit: i64) -> StoreResult<Vec<(WorkspaceScope, AgentId)>> {
        sqlx::query_as(formatcp!(
            "SELECT a.workspace_id, a.agent_id {OF_DELETED_AGENTS} ORDER BY a.deleted_at LIMIT $1"
        ))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("finding the mailboxes of deleted agents"))
    }

    /// Returns whether the expiry loop has work: one read in place of the transactions of both passes.
    pub async fn has_expired_deliveries(&self, now: DateTime<Utc>) -> StoreResult<bool> {
        let end = |pass: ExpiryPass| now - pass.delay();
        sqlx::query_scalar(HAS_EXPIRED)
            .bind(ExpiryPass::First.name())
            .bind(end(ExpiryPass::First))
            .bind(ExpiryPass::Second.name())
            .bind(end(ExpiryPass::Second))
            .bind(oldest_day(end(ExpiryPass::Second) - MAX_UNMOVED))
            .bind(MAX_UNMOVED)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("looking for expired deliveries"))
    }

    /// Performs one step of the expiry loop: reads the rows that expired since the last step, up to a bound,
    /// dead-letters the unsettled ones and saves the scan position. Does nothing while another worker holds the
    /// position. After an error the position has not moved.
    pub async fn expire_step(&self, pass: ExpiryPass, now: DateTime<Utc>) -> StoreResult<ExpiryStep> {
        let doing = "finding expired deliveries";
        // Without the lock, because many calls of the second pass end here.
        if !pass.least_step().is_zero() {
            let scanned = read_state::<ScanPosition>(&self.pool, pass.name()).await?;
            if scanned.is_some_and(|scanned| now - pass.delay() < scanned.until + pass.least_step()) {
                return Ok(ExpiryStep::default());
            }
        }
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match lock_state::<ScanPosition>(&mut tx, pass.name()).await? {
            LoopState::Busy => return Ok(ExpiryStep::default()),
            LoopState::Locked(Some(scanned)) => scanned.until,
            LoopState::Locked(None) => now - TimeDelta::days(LONGEST_TTL_DAYS + 1),
        };
        let to = now - pass.delay();
        // A worker whose clock is ahead has moved the position.
        if to <= from {
            return Ok(ExpiryStep::default());
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
        // Fewer rows than a step holds: it reaches the end of the pass.
        let until = full.unwrap_or(to);
        let mailboxes: Vec<(WorkspaceId, AgentId)> = sqlx::query_as(MAILBOXES_IN_STEP)
            .bind(from)
            .bind(until)
            .bind(oldest_day)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let (workspaces, agents): (Vec<_>, Vec<_>) = mailboxes.into_iter().unzip();
        let dead_lettered = dead_letter(&mut tx, &workspaces, &agents, DeadLetterReason::TtlExpired, now).await?;
        // More expired rows may be left: the next step reads the same range again.
        let unfinished = dead_lettered.len() >= MAX_DEAD_LETTERED || has_full_mailbox(&dead_lettered);
        if !unfinished {
            save_state(&mut tx, pass.name(), &ScanPosition { until }).await?;
        }
        let recorded = record_dead_letters(&mut tx, &dead_lettered, now).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(ExpiryStep { dead_lettered, recorded, more: unfinished || full.is_some() })
    }
}

/// Locks the mailboxes, dead-letters the rows that the reason covers and extends the settled floors.
async fn dead_letter(
    tx: &mut DatabaseSession,
    workspaces: &[WorkspaceId],
    agents: &[AgentId],
    reason: DeadLetterReason,
    now: DateTime<Utc>,
) -> StoreResult<Vec<DeadLetteredDelivery>> {
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
        .bind(reason.default_error())
        .bind(reason.as_str())
        .bind(i64::try_from(MAX_DEAD_LETTERED).unwrap_or(i64::MAX))
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let expired: Vec<ExpiredDelivery> = decode_rows("deliveries", &rows)?;
    let dead_lettered: Vec<_> = expired.into_iter().map(|expired| expired.dead_lettered(reason)).collect();
    if !dead_lettered.is_empty() {
        extend_settled_floors(tx, workspaces, agents).await?;
    }
    Ok(dead_lettered)
}

/// Records the events of dead letters, which are sorted by workspace.
pub(crate) async fn record_dead_letters(
    tx: &mut DatabaseSession,
    dead_lettered: &[DeadLetteredDelivery],
    now: DateTime<Utc>,
) -> StoreResult<Vec<RecordedEvents>> {
    let of_workspaces = dead_lettered.chunk_by(|a, b| a.scope == b.scope);
    let some = of_workspaces.flat_map(|letters| letters.iter().take(EVENTS_PER_WORKSPACE));
    events::append_mixed(tx, now, some.map(|letter| (letter.scope, letter.event())).collect()).await
}

/// Returns the day of the oldest partition that can hold a row that expires after `instant`.
fn oldest_day(instant: DateTime<Utc>) -> NaiveDate {
    (instant - TimeDelta::days(LONGEST_TTL_DAYS)).date_naive()
}

fn has_full_mailbox(dead_lettered: &[DeadLetteredDelivery]) -> bool {
    let limit = usize::try_from(PER_MAILBOX).unwrap_or(usize::MAX);
    dead_lettered
        .chunk_by(|a, b| (a.scope, a.delivery_id.agent) == (b.scope, b.delivery_id.agent))
        .any(|mailbox| mailbox.len() >= limit)
}

/// Row of [`DEAD_LETTER`].
struct ExpiredDelivery {
    delivery: LocatedDelivery,
    seq: Seq,
    agent_name: Option<String>,
    sender: Option<AgentId>,
}

impl FromRow<'_, PgRow> for ExpiredDelivery {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            delivery: LocatedDelivery::from_row(row)?,
            seq: row.try_get("seq")?,
            agent_name: row.try_get("name")?,
            sender: row.try_get("sender")?,
        })
    }
}

impl ExpiredDelivery {
    fn dead_lettered(self, reason: DeadLetterReason) -> DeadLetteredDelivery {
        DeadLetteredDelivery {
            scope: self.delivery.scope,
            delivery_id: self.delivery.delivery_id,
            seq: self.seq,
            reason,
            error: None,
            agent_name: self.agent_name,
            sender: self.sender,
            place: self.delivery.place,
        }
    }
}
