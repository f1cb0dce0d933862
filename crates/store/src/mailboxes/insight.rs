//! Delivery insight for tenants: metrics of the workspace, and the trace of one message.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, MessageId, NodeId, WorkspaceScope,
    mailboxes::{
        delivery::{Reason, Settlement},
        stream::Seq,
    },
    workspaces::usage::WorkspaceMetrics,
};

use crate::{
    Store, StoreError, StoreResult,
    codes::{DEAD_LETTERED, MESSAGE_SOURCE},
    decode::decode_rows,
};

/// Delivery of a message, with the columns that determine the steps of its trace.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct TracedDelivery {
    pub agent_id: AgentId,
    pub agent_name: String,
    pub seq: Seq,
    /// 0 for the original.
    pub redrive_no: i16,
    /// Node of the agent when the row was written.
    pub node_id: NodeId,
    pub reason: Reason,
    pub created_at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
    pub sent_seq: Seq,
    pub ack_floor: Seq,
    /// Time when the ack floor passed the row, to the second.
    pub floor_acked_at: Option<DateTime<Utc>>,
    /// The fields below are its details.
    pub settlement: Option<Settlement>,
    pub settlement_reason: Option<String>,
    pub error: Option<String>,
    /// End of the deferral.
    pub available_at: Option<DateTime<Utc>>,
    pub settlement_at: Option<DateTime<Utc>>,
}

impl Store {
    /// Reads the metrics of a workspace. `only` limits the figures of agents and mailboxes to these agents.
    pub async fn workspace_metrics(
        &self,
        scope: WorkspaceScope,
        only: Option<&[AgentId]>,
    ) -> StoreResult<WorkspaceMetrics> {
        sqlx::query_as(
            // The daily counters are dropped with their messages; the total of the search index is kept.
            // DISTINCT: a node counts once, however many of its providers are connected.
            formatcp!("SELECT coalesce((SELECT indexed_count FROM search_progress WHERE workspace_id = $1), 0) AS accepted,
                    boxes.*,
                    (SELECT count(*) FROM delivery_exceptions x
                      WHERE x.workspace_id = $1 AND x.state = {DEAD_LETTERED} AND ($2::bigint[] IS NULL OR x.agent_id = ANY ($2)))
                        AS dead_letters,
                    (SELECT count(*) FROM agents a WHERE a.workspace_id = $1 AND a.deleted_at IS NULL
                        AND ($2::bigint[] IS NULL OR a.agent_id = ANY ($2))) AS agents,
                    (SELECT count(DISTINCT node_id) FROM providers p
                      WHERE p.workspace_id = $1 AND p.gateway_id IS NOT NULL) AS nodes_connected
               FROM (
                    SELECT coalesce(sum(h.next_seq - 1), 0)::bigint AS written,
                           coalesce(sum(c.sent_seq), 0)::bigint AS sent,
                           coalesce(sum(c.ack_floor), 0)::bigint AS acked,
                           coalesce(sum(c.settled_floor), 0)::bigint AS settled,
                           coalesce(max(h.next_seq - 1 - coalesce(c.settled_floor, 0))
                                    FILTER (WHERE a.deleted_at IS NULL), 0)::bigint AS largest_lag
                      FROM mailbox_heads h
                      JOIN agents a USING (workspace_id, agent_id)
                      LEFT JOIN mailbox_cursors c USING (workspace_id, agent_id)
                     WHERE h.workspace_id = $1 AND ($2::bigint[] IS NULL OR h.agent_id = ANY ($2))
               ) boxes"),
        )
        .bind(scope.workspace_id())
        .bind(only)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the metrics of a workspace"))
    }

    /// Lists the deliveries of a message by recipient, limited to the agents of `only` if given.
    pub async fn deliveries_of_message(
        &self,
        scope: WorkspaceScope,
        message: MessageId,
        only: Option<&[AgentId]>,
        limit: i64,
    ) -> StoreResult<Vec<TracedDelivery>> {
        let rows = sqlx::query(
            formatcp!("SELECT d.agent_id, a.name AS agent_name, d.seq, d.redrive_no, d.node_id, d.reason, d.created_at, d.expires_at,
                    coalesce(c.sent_seq, 0) AS sent_seq, coalesce(c.ack_floor, 0) AS ack_floor,
                    CASE WHEN d.seq <= c.ack_floor THEN
                        (SELECT l.acked_at FROM ack_log l
                          WHERE l.workspace_id = d.workspace_id AND l.agent_id = d.agent_id
                            AND l.acked_at >= d.created_at - interval '1 second'
                            AND l.created_on >= d.created_on - 1 AND l.ack_floor >= d.seq
                          ORDER BY l.acked_at LIMIT 1)
                    END AS floor_acked_at,
                    x.state AS settlement, x.reason AS settlement_reason, x.error, x.available_at,
                    x.at AS settlement_at
               FROM deliveries d
               JOIN agents a USING (workspace_id, agent_id)
               LEFT JOIN mailbox_cursors c USING (workspace_id, agent_id)
               LEFT JOIN delivery_exceptions x
                      ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
              WHERE d.workspace_id = $1 AND d.source_id = $2 AND d.source_kind = {MESSAGE_SOURCE}
                AND ($3::bigint[] IS NULL OR d.agent_id = ANY ($3))
              ORDER BY d.agent_id, d.redrive_no LIMIT $4"),
        )
        .bind(scope.workspace_id())
        .bind(message)
        .bind(only)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the deliveries of a message"))?;
        decode_rows("deliveries", &rows)
    }
}
