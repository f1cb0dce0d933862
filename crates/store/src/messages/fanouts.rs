//! Fan-outs: messages with many recipients ([`NewSend::is_fanout`]). The transaction that accepts such a message writes
//! a record with its recipients, and their deliveries follow in chunks ([`crate::messages::fanout_chunks`]), which
//! any process may write. The last chunk removes the record ([ADR
//! 0060](../../../../docs/adr/0060-fan-outs-in-chunks.md)).

use std::{collections::HashSet, time::Duration};

use const_format::formatcp;
use relay_domain::{
    AgentId, GatewayId, MessageId, WorkspaceId, WorkspaceScope,
    mailboxes::delivery::{Mode, Reason},
};

use crate::{
    Store, StoreError, StoreResult,
    connections::DatabaseSession,
    mailboxes::settled_floors::count_settled_above,
    messages::{
        batch::{Batch, NewSend},
        commit_facts::BatchFacts,
        days::day_of,
    },
    statement_timeout::StatementTimeout as _,
};

/// Time for which a fan-out is left to the process that wrote its last chunk.
pub(crate) const CLAIM: Duration = Duration::from_secs(5);

// Heads are read without a lock: what a mailbox holds now decides whether it is full, and its chunk writes the delivery
// even if it has become full meanwhile. Sorted by agent, so that a chunk is a range of agents.
const OPEN: &str = const_format::concatcp!(
    "
WITH placed AS MATERIALIZED (
    SELECT k.ord, k.agent_id, k.mode, k.reason,
           CASE WHEN h.next_seq - c.settled_floor <= $6 THEN true
                ELSE h.next_seq - c.settled_floor <= $6 + ",
    count_settled_above!("c", "c.settled_floor"),
    "
           END AS fits
      FROM unnest($3::bigint[], $4::smallint[], $5::smallint[]) WITH ORDINALITY AS k (agent_id, mode, reason, ord)
      JOIN mailbox_heads h ON h.workspace_id = $1 AND h.agent_id = k.agent_id
      JOIN mailbox_cursors c ON c.workspace_id = $1 AND c.agent_id = k.agent_id
), opened AS (
    INSERT INTO fanouts (workspace_id, message_id, agents, modes, reasons, sender_id, channel_id, created_on, created_at,
                         expires_at, traceparent, gateway_id, claimed_until)
    SELECT $1, $2, array_agg(agent_id ORDER BY agent_id), array_agg(mode ORDER BY agent_id),
           array_agg(reason ORDER BY agent_id), $7, $8, $9, $10, $11, $12, $13, relay_now() + make_interval(secs => $14)
      FROM placed WHERE fits HAVING count(*) > 0
)
SELECT ord FROM placed WHERE NOT fits ORDER BY ord"
);

// A claim ends early with the lease of its gateway.
// Gateway 0 stands for a process that is no gateway and has no lease.
const IS_LAPSED: &str = "(claimed_until < relay_now()
            OR gateway_id <> 0 AND NOT EXISTS (SELECT FROM gateways g
                                                WHERE g.gateway_id = o.gateway_id AND g.lease_until > relay_now()))";

/// Condition: a fan-out can be claimed.
pub(crate) const HAS_LAPSED: &str = formatcp!("EXISTS (SELECT FROM fanouts o WHERE {IS_LAPSED})");

// SKIP LOCKED: a locked record is being advanced.
const CLAIM_LAPSED: &str = formatcp!(
    "
UPDATE fanouts f SET gateway_id = $1, claimed_until = relay_now() + make_interval(secs => $2)
  FROM (SELECT workspace_id, message_id FROM fanouts o
         WHERE {IS_LAPSED}
         ORDER BY claimed_until LIMIT 1
           FOR UPDATE SKIP LOCKED) AS due
 WHERE f.workspace_id = due.workspace_id AND f.message_id = due.message_id
RETURNING f.workspace_id, f.message_id, f.written, f.expires_at < relay_now() - interval '1 day'"
);

/// Fan-out that this process may continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimedFanout {
    pub scope: WorkspaceScope,
    pub message_id: MessageId,
    /// Recipients that earlier chunks have dealt with.
    pub written: i32,
    /// Its deliveries expired a day ago or earlier.
    pub is_outdated: bool,
}

/// Writes the record of a fan-out, with the recipients whose mailboxes have room now. Returns the positions of the
/// others. Without any that has room there is no record.
pub(crate) async fn open_fanout(
    tx: &mut DatabaseSession,
    batch: &Batch,
    send: &NewSend,
    facts: &BatchFacts,
) -> StoreResult<Vec<usize>> {
    let agents: Vec<AgentId> = send.recipients.iter().map(|recipient| recipient.agent_id).collect();
    let modes: Vec<Mode> = send.recipients.iter().map(|recipient| recipient.mode).collect();
    let reasons: Vec<Reason> = send.recipients.iter().map(|recipient| recipient.reason).collect();
    // Only current sends are opened, whose workspace was read.
    let Some((ttl_seconds, depth)) = facts.workspace(send.scope) else { return Ok(Vec::new()) };
    let message = &send.message;
    let full: Vec<i64> = sqlx::query_scalar(OPEN)
        .bind(send.scope.workspace_id())
        .bind(message.id)
        .bind(agents)
        .bind(modes)
        .bind(reasons)
        .bind(depth)
        .bind(message.agent_id)
        .bind(message.channel_id)
        .bind(day_of(message.created_at))
        .bind(message.created_at)
        .bind(send.expires_at(ttl_seconds))
        .bind(&send.traceparent)
        .bind(batch.gateway_id)
        .bind(CLAIM.as_secs_f64())
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("opening a fan-out"))?;
    Ok(full.into_iter().filter_map(|ord| usize::try_from(ord - 1).ok()).collect())
}

/// Returns the positions of a fan-out's recipients that got no place in its record, because their mailboxes were full.
pub(crate) async fn read_full(tx: &mut DatabaseSession, send: &NewSend) -> StoreResult<Vec<usize>> {
    // The last chunk removes the record: from then on only the deliveries show the recipients.
    let placed: Vec<AgentId> = sqlx::query_scalar(
        "SELECT unnest(agents) FROM fanouts WHERE workspace_id = $1 AND message_id = $2
          UNION ALL
         SELECT agent_id FROM deliveries WHERE workspace_id = $1 AND source_id = $2 AND created_on = $3",
    )
    .bind(send.scope.workspace_id())
    .bind(send.message.id)
    .bind(day_of(send.message.created_at))
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("reading back a fan-out"))?;
    let placed: HashSet<AgentId> = placed.into_iter().collect();
    let recipients = send.recipients.iter().enumerate();
    Ok(recipients.filter(|(_, one)| !placed.contains(&one.agent_id)).map(|(position, _)| position).collect())
}

impl Store {
    /// Claims a fan-out whose process has not advanced it for some time, or has lost its lease.
    pub async fn claim_lapsed_fanout(&self, gateway: GatewayId) -> StoreResult<Option<ClaimedFanout>> {
        let row: Option<(WorkspaceId, MessageId, i32, bool)> = sqlx::query_as(CLAIM_LAPSED)
            .bind(gateway)
            .bind(CLAIM.as_secs_f64())
            .fetch_optional(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("claiming a fan-out"))?;
        Ok(row.map(|(workspace, message_id, written, is_outdated)| ClaimedFanout {
            scope: WorkspaceScope::from_engine_row(workspace),
            message_id,
            written,
            is_outdated,
        }))
    }

    /// Returns whether an author has an open fan-out with an id below this one.
    pub async fn has_open_fanout(
        &self,
        scope: WorkspaceScope,
        sender: AgentId,
        before: MessageId,
    ) -> StoreResult<bool> {
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM fanouts WHERE workspace_id = $1 AND sender_id = $2 AND message_id < $3)",
        )
        .bind(scope.workspace_id())
        .bind(sender)
        .bind(before)
        .fetch_one(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("looking for open fan-outs"))
    }

    /// Ends a fan-out whose further deliveries have no receiver: they expired long ago, or retention has removed the
    /// message.
    pub async fn abandon_fanout(&self, scope: WorkspaceScope, message: MessageId) -> StoreResult<()> {
        sqlx::query("DELETE FROM fanouts WHERE workspace_id = $1 AND message_id = $2")
            .bind(scope.workspace_id())
            .bind(message)
            .execute(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("ending a fan-out"))?;
        Ok(())
    }
}
