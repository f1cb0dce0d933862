//! What a tenant may know of its own deliveries: numbers of the whole workspace, and the way of one message.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, MessageId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult};

/// Numbers of a workspace. Those of mailboxes are sums over all that there ever were, so that they only rise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub struct WorkspaceNumbers {
    /// Messages that were accepted and indexed, since removed ones included: some hundred milliseconds behind.
    pub accepted: i64,
    /// Deliveries written.
    pub written: i64,
    /// Deliveries that are known to have been written to a socket.
    pub sent: i64,
    /// Deliveries acknowledged over a socket.
    pub acked: i64,
    /// Deliveries settled by any means.
    pub settled: i64,
    /// Dead letters whose rows are kept.
    pub dead_letters: i64,
    /// The most unsettled deliveries that one living agent has.
    pub largest_lag: i64,
    /// Living agents.
    pub agents: i64,
    /// Nodes with a connected process.
    pub nodes_connected: i64,
}

/// One delivery of a message, with what its steps follow from.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct TracedDelivery {
    /// The recipient.
    pub agent_id: i64,
    /// Its name.
    pub agent_name: String,
    /// Its place in the mailbox.
    pub seq: i64,
    /// How often it was redriven.
    pub redrive_no: i16,
    /// Where the recipient was when it was written.
    pub node_id: String,
    /// A code of `Reason`.
    pub reason: i16,
    /// When it was written.
    pub created_at: DateTime<Utc>,
    /// When it becomes a dead letter.
    pub expires_at: DateTime<Utc>,
    /// The mailbox is written up to here.
    pub sent_seq: i64,
    /// The mailbox is acknowledged up to here.
    pub ack_floor: i64,
    /// When the floor passed the row, to the second.
    pub floor_acked_at: Option<DateTime<Utc>>,
    /// A code of `Exception`, if it departs from the floors.
    pub exception_state: Option<i16>,
    /// Why it was dead-lettered or deferred.
    pub exception_reason: Option<String>,
    /// What the recipient said.
    pub error: Option<String>,
    /// Until when it was deferred.
    pub available_at: Option<DateTime<Utc>>,
    /// When that happened.
    pub exception_at: Option<DateTime<Utc>>,
}

impl Store {
    /// Numbers of a workspace; those of mailboxes only of `only`, if it is given.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn workspace_numbers(
        &self,
        scope: WorkspaceScope,
        only: Option<&[AgentId]>,
    ) -> StoreResult<WorkspaceNumbers> {
        let only: Option<Vec<i64>> = only.map(|agents| agents.iter().map(|agent| agent.get()).collect());
        sqlx::query_as(
            // What is counted by day goes with its messages; this total stays.
            "SELECT coalesce((SELECT indexed_count FROM search_progress WHERE workspace_id = $1), 0) AS accepted,
                    boxes.*,
                    (SELECT count(*) FROM delivery_exceptions x
                      WHERE x.workspace_id = $1 AND x.state = 4 AND ($2::bigint[] IS NULL OR x.agent_id = ANY ($2)))
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
               ) boxes",
        )
        .bind(scope.workspace_id().get())
        .bind(only)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("counting for a workspace"))
    }

    /// The deliveries of a message, by recipient; only those of `only`, if it is given.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn deliveries_of_message(
        &self,
        scope: WorkspaceScope,
        message: MessageId,
        only: Option<&[AgentId]>,
        limit: i64,
    ) -> StoreResult<Vec<TracedDelivery>> {
        let only: Option<Vec<i64>> = only.map(|agents| agents.iter().map(|agent| agent.get()).collect());
        sqlx::query_as(
            "SELECT d.agent_id, a.name AS agent_name, d.seq, d.redrive_no, d.node_id, d.reason, d.created_at, d.expires_at,
                    coalesce(c.sent_seq, 0) AS sent_seq, coalesce(c.ack_floor, 0) AS ack_floor,
                    CASE WHEN d.seq <= c.ack_floor THEN
                        (SELECT l.acked_at FROM ack_log l
                          WHERE l.workspace_id = d.workspace_id AND l.agent_id = d.agent_id
                            AND l.acked_at >= d.created_at - interval '1 second'
                            AND l.created_on >= d.created_on - 1 AND l.ack_floor >= d.seq
                          ORDER BY l.acked_at LIMIT 1)
                    END AS floor_acked_at,
                    x.state AS exception_state, x.reason AS exception_reason, x.error, x.available_at,
                    x.at AS exception_at
               FROM deliveries d
               JOIN agents a USING (workspace_id, agent_id)
               LEFT JOIN mailbox_cursors c USING (workspace_id, agent_id)
               LEFT JOIN delivery_exceptions x
                      ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
              WHERE d.workspace_id = $1 AND d.source_id = $2 AND d.source_kind = 0
                AND ($3::bigint[] IS NULL OR d.agent_id = ANY ($3))
              ORDER BY d.agent_id, d.redrive_no LIMIT $4",
        )
        .bind(scope.workspace_id().get())
        .bind(message.get())
        .bind(only)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the deliveries of a message"))
    }
}
