//! Deliveries of durable outcomes: rows in the callers' mailboxes, written in the transaction that records the outcome.
//! Called by [`super::outcomes`]; [`super::record_outcomes`] writes them in its own statement.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, InvocationId, NodeId, WorkspaceScope,
    actions::Invocation,
    mailboxes::delivery::{Reason, SourceKind},
};

use crate::{StoreError, StoreResult, connections::DatabaseSession, messages::days::day_of};

/// CTEs that write a delivery for each row of `want` (workspace_id, agent_id, source_id, rank), which the caller
/// defines:
/// `rank` counts the rows of one mailbox from 1. `delivered` has the rows that were written.
///
/// A full mailbox gets no row, as with messages; the caller can still read the outcome over REST. Heads are locked in
/// ascending order, as in every writer of mailboxes, so that two transactions cannot deadlock.
// The depth of a mailbox counts the seqs above the settled floor, except settled ones.
macro_rules! delivered_results {
    (day: $day:literal, at: $at:literal, kind: $kind:literal, reason: $reason:literal) => {
        const_format::concatcp!(
            "heads AS MATERIALIZED (
    SELECT h.workspace_id, h.agent_id, h.next_seq
      FROM mailbox_heads h
      JOIN (SELECT DISTINCT workspace_id, agent_id FROM want) AS k USING (workspace_id, agent_id)
     ORDER BY h.workspace_id, h.agent_id
       FOR UPDATE OF h
), fitted AS MATERIALIZED (
    SELECT w.*, l.next_seq, a.node_id, s.delivery_ttl_seconds AS ttl
      FROM want w
      JOIN heads l USING (workspace_id, agent_id)
      JOIN mailbox_cursors c USING (workspace_id, agent_id)
      JOIN agents a USING (workspace_id, agent_id)
      JOIN workspaces s USING (workspace_id)
     WHERE a.deleted_at IS NULL
       AND l.next_seq - 1 - c.settled_floor + w.rank <= s.mailbox_depth
           + ",
            $crate::mailboxes::settled_floors::count_settled_above!("c", "c.settled_floor"),
            "
), bumped AS (
    UPDATE mailbox_heads h
       SET next_seq = b.next_seq
      FROM (SELECT workspace_id, agent_id, max(next_seq + rank) AS next_seq
              FROM fitted GROUP BY workspace_id, agent_id) AS b
     WHERE h.workspace_id = b.workspace_id AND h.agent_id = b.agent_id
), delivered AS (
    INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_kind, source_id, node_id, reason,
                            created_at, expires_at)
    SELECT workspace_id, agent_id, next_seq + rank - 1, ",
            $day,
            ", ",
            $kind,
            ", source_id, node_id, ",
            $reason,
            ", ",
            $at,
            ", ",
            $at,
            "::timestamptz + make_interval(secs => ttl)
      FROM fitted
    RETURNING workspace_id, source_id, node_id
)"
        )
    };
}
pub(crate) use delivered_results;

const WRITE: &str = const_format::concatcp!(
    "
WITH want AS (
    SELECT w.workspace_id, w.agent_id, w.source_id,
           row_number() OVER (PARTITION BY w.workspace_id, w.agent_id ORDER BY w.source_id) AS rank
      FROM relay_require_epoch($8),
           unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS w (workspace_id, agent_id, source_id)
), ",
    delivered_results!(day: "$4", at: "$5", kind: "$6", reason: "$7"),
    " SELECT source_id, node_id FROM delivered"
);

/// Delivery that was written.
pub(crate) struct WrittenResult {
    pub(crate) scope: WorkspaceScope,
    pub(crate) agent_id: AgentId,
    /// Node of the agent.
    pub(crate) node_id: NodeId,
    pub(crate) invocation_id: InvocationId,
}

/// Writes a delivery for each durable outcome. Returns the outcomes that have one; full mailboxes and deleted callers
/// get none.
pub(crate) async fn write_results(
    tx: &mut DatabaseSession,
    done: &[Invocation],
    at: DateTime<Utc>,
    epoch: Option<i64>,
) -> StoreResult<Vec<WrittenResult>> {
    let durable: Vec<(WorkspaceScope, AgentId, InvocationId)> = done
        .iter()
        .filter(|row| row.durable)
        .filter_map(|row| Some((row.scope, row.caller_id?, row.invocation_id)))
        .collect();
    if durable.is_empty() {
        return Ok(Vec::new());
    }
    let mut nodes: HashMap<InvocationId, NodeId> = sqlx::query_as::<_, (InvocationId, NodeId)>(WRITE)
        .bind(durable.iter().map(|(scope, _, _)| scope.workspace_id()).collect::<Vec<_>>())
        .bind(durable.iter().map(|(_, agent, _)| *agent).collect::<Vec<_>>())
        .bind(durable.iter().map(|(_, _, id)| *id).collect::<Vec<_>>())
        .bind(day_of(at))
        .bind(at)
        .bind(SourceKind::ActionResult)
        .bind(Reason::ActionResult)
        .bind(epoch)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("delivering outcomes"))?
        .into_iter()
        .collect();
    let written = |(scope, agent_id, invocation_id): (WorkspaceScope, AgentId, InvocationId)| {
        let node_id = nodes.remove(&invocation_id)?;
        Some(WrittenResult { scope, agent_id, node_id, invocation_id })
    };
    Ok(durable.into_iter().filter_map(written).collect())
}
