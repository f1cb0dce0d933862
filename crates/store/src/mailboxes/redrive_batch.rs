//! One batch of redriven dead letters, within a transaction of the caller ([`super::redrives`]).

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, ChannelId, DeliveryId, SourceId, WorkspaceScope,
    events::kind,
    mailboxes::{MessageLocation, dead_letter::MAX_REDRIVES, stream::Seq},
};
use relay_wire::{events::recorded_data::RedriveAccepted, field::ToValue as _};
use sqlx::FromRow;

use crate::{
    StoreError, StoreResult,
    codes::{DEAD_LETTERED, MESSAGE_SOURCE},
    connections::DatabaseSession,
    events::{self, Event, RecordedEvents},
    mailboxes::settled_floors::count_settled_above,
    messages::days::day_of,
};

/// Outcome of redriving one dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedriveOutcome {
    /// A new delivery exists.
    Redriven {
        seq: Seq,
        /// Redrives of the message to this agent, including this one.
        redrive_no: i16,
        /// False if an earlier call created it.
        now: bool,
    },
    /// The message was redriven to this agent [`MAX_REDRIVES`] times already.
    Exhausted,
    MailboxFull,
    AgentDeleted,
    /// Retention has dropped the message.
    MessageDropped,
    NotFound,
}

/// Row of [`REDRIVE`].
#[derive(FromRow)]
struct RedrivenRow {
    /// Position in the request, from 1.
    ord: i64,
    agent_id: AgentId,
    source_id: SourceId,
    /// Of the dead letter.
    redrive_no: i16,
    channel_id: Option<ChannelId>,
    bar: RedriveBar,
    new_seq: Option<Seq>,
    channel_name: Option<String>,
    conversation_id: Option<String>,
}

/// Reason not to redrive a dead letter, as [`REDRIVE`] finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::Type)]
#[repr(i32)]
enum RedriveBar {
    Unbarred = 0,
    AlreadyRedriven = 1,
    Exhausted = 2,
    AgentDeleted = 3,
    MessageDropped = 4,
}

const UNBARRED: i32 = RedriveBar::Unbarred as i32;
const ALREADY_REDRIVEN: i32 = RedriveBar::AlreadyRedriven as i32;
const EXHAUSTED: i32 = RedriveBar::Exhausted as i32;
const AGENT_DELETED: i32 = RedriveBar::AgentDeleted as i32;
const MESSAGE_DROPPED: i32 = RedriveBar::MessageDropped as i32;

impl RedrivenRow {
    fn place(&self) -> Option<MessageLocation> {
        let (channel_id, channel_name) = (self.channel_id?, self.channel_name.clone()?);
        Some(MessageLocation { channel_id, channel_name, conversation_id: self.conversation_id.clone() })
    }
}

// A statement of its own: the snapshot of the next one then has all changes for which these locks waited.
const LOCK_HEADS: &str = "
SELECT h.agent_id
  FROM mailbox_heads h
  JOIN (SELECT DISTINCT unnest($2::bigint[]) AS agent_id) AS k USING (agent_id)
 CROSS JOIN relay_require_epoch($3)
 WHERE h.workspace_id = $1
 ORDER BY h.agent_id
   FOR UPDATE OF h";

// Only redrivable dead letters are ranked, so that the others leave no gap in the seqs. The heads are locked; the depth
// of the mailbox is checked against the rank, so that a batch cannot exceed it.
// A new delivery lives from now for as long as the first one did (`life`).
const REDRIVE: &str = const_format::concatcp!(
    formatcp!(
        "
WITH letters AS MATERIALIZED (
    SELECT k.ord, e.agent_id, e.seq, e.redriven_seq, d.source_kind, d.source_id, d.redrive_no, d.channel_id, d.mode,
           d.reason, d.expires_at - d.created_at AS life, a.node_id,
           CASE WHEN e.redriven_seq IS NOT NULL THEN {ALREADY_REDRIVEN}
                WHEN d.redrive_no >= $5::smallint THEN {EXHAUSTED}
                WHEN a.agent_id IS NULL THEN {AGENT_DELETED}
                WHEN m.message_id IS NULL THEN {MESSAGE_DROPPED}
                ELSE {UNBARRED} END AS bar
      FROM unnest($2::bigint[], $3::bigint[]) WITH ORDINALITY AS k (agent_id, seq, ord)
      JOIN delivery_exceptions e ON e.workspace_id = $1 AND e.agent_id = k.agent_id AND e.seq = k.seq
           AND e.state = {DEAD_LETTERED} AND e.purged_at IS NULL
      JOIN deliveries d ON d.workspace_id = $1 AND d.agent_id = e.agent_id AND d.seq = e.seq
      LEFT JOIN agents a ON a.workspace_id = $1 AND a.agent_id = e.agent_id AND a.deleted_at IS NULL
      LEFT JOIN messages m ON m.workspace_id = $1 AND d.source_kind = {MESSAGE_SOURCE} AND m.message_id = d.source_id
           AND m.created_on = (to_timestamp(((d.source_id >> 22) + 1735689600000) / 1000.0) AT TIME ZONE 'UTC')::date
), ranked AS (
    SELECT l.*, h.next_seq, row_number() OVER (PARTITION BY l.agent_id ORDER BY l.ord) AS rank,
           w.mailbox_depth - (h.next_seq - 1 - c.settled_floor - "
    ),
    count_settled_above!("c", "c.settled_floor"),
    formatcp!(
        ") AS room
      FROM letters l
      JOIN mailbox_heads h ON h.workspace_id = $1 AND h.agent_id = l.agent_id
      JOIN mailbox_cursors c ON c.workspace_id = $1 AND c.agent_id = l.agent_id
      JOIN workspaces w ON w.workspace_id = $1
     WHERE l.bar = {UNBARRED}
), fitted AS MATERIALIZED (
    SELECT * FROM ranked WHERE rank <= room
), bumped AS (
    UPDATE mailbox_heads h SET next_seq = b.next_seq
      FROM (SELECT agent_id, max(next_seq + rank) AS next_seq FROM fitted GROUP BY agent_id) AS b
     WHERE h.workspace_id = $1 AND h.agent_id = b.agent_id
), delivered AS (
    INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_kind, source_id, redrive_no, channel_id,
                            node_id, mode, reason, created_at, expires_at)
    SELECT $1::bigint, agent_id, next_seq + rank - 1, $6::date, source_kind, source_id, redrive_no + 1, channel_id,
           node_id, mode, reason, $4::timestamptz, $4::timestamptz + life
      FROM fitted
), linked AS (
    UPDATE delivery_exceptions e SET redriven_seq = f.next_seq + f.rank - 1, redriven_at = $4::timestamptz
      FROM fitted f
     WHERE e.workspace_id = $1 AND e.agent_id = f.agent_id AND e.seq = f.seq
)
SELECT l.ord, l.agent_id, l.source_id, l.redrive_no, l.channel_id, l.bar,
       coalesce(f.next_seq + f.rank - 1, l.redriven_seq) AS new_seq, c.name AS channel_name, c.conversation_id
  FROM letters l
  LEFT JOIN fitted f USING (ord)
  LEFT JOIN channels c ON c.workspace_id = $1 AND c.channel_id = l.channel_id"
    ),
);

/// Redrives these dead letters. Returns one outcome each, and the events of the new deliveries in an observed
/// workspace.
pub(super) async fn redrive(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    agents: &[AgentId],
    seqs: &[Seq],
    (at, epoch): (DateTime<Utc>, Option<i64>),
) -> StoreResult<(Vec<RedriveOutcome>, Option<RecordedEvents>)> {
    let doing = "redriving dead letters";
    if agents.is_empty() {
        return Ok((Vec::new(), None));
    }
    let workspace = scope.workspace_id();
    sqlx::query(LOCK_HEADS)
        .bind(workspace)
        .bind(agents)
        .bind(epoch)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let rows: Vec<RedrivenRow> = sqlx::query_as(REDRIVE)
        .bind(workspace)
        .bind(agents)
        .bind(seqs)
        .bind(at)
        .bind(MAX_REDRIVES)
        .bind(day_of(at))
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let mut outcomes = vec![RedriveOutcome::NotFound; agents.len()];
    let mut made: HashMap<usize, Event> = HashMap::new();
    for row in &rows {
        let nth = usize::try_from(row.ord - 1).unwrap_or(usize::MAX);
        let Some(outcome) = outcomes.get_mut(nth) else { continue };
        let redrive_no = row.redrive_no + 1;
        let redriven = |now| {
            let redriven = |seq| RedriveOutcome::Redriven { seq, redrive_no, now };
            row.new_seq.map_or(RedriveOutcome::MailboxFull, redriven)
        };
        *outcome = match row.bar {
            RedriveBar::Unbarred => redriven(true),
            RedriveBar::AlreadyRedriven => redriven(false),
            RedriveBar::Exhausted => RedriveOutcome::Exhausted,
            RedriveBar::AgentDeleted => RedriveOutcome::AgentDeleted,
            RedriveBar::MessageDropped => RedriveOutcome::MessageDropped,
        };
        if let RedriveOutcome::Redriven { seq, now: true, .. } = *outcome {
            let agent = row.agent_id;
            let id = DeliveryId { source: row.source_id, agent, redrive_no };
            let old = DeliveryId { redrive_no: row.redrive_no, ..id };
            let data = RedriveAccepted::new(id, old, row.channel_id, seq);
            let event = Event::new(kind::DELIVERY_ACCEPTED, data.to_value()).by_agent(agent);
            made.insert(nth, MessageLocation::attach(row.place().as_ref(), event));
        }
    }
    let is_watched: bool = sqlx::query_scalar(
        "SELECT coalesce((SELECT watched_until > relay_now() FROM event_heads WHERE workspace_id = $1), false)",
    )
    .bind(workspace)
    .fetch_one(&mut *tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    if !is_watched || made.is_empty() {
        return Ok((outcomes, None));
    }
    // In the order of the request, which is that of the seqs of each mailbox. A map has none.
    let mut made: Vec<_> = made.into_iter().collect();
    made.sort_unstable_by_key(|(nth, _)| *nth);
    let recorded = events::append(tx, scope, at, made.into_iter().map(|(_, event)| event).collect()).await?;
    Ok((outcomes, Some(recorded)))
}
