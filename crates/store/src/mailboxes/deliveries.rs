//! Reads of an agent's deliveries. The rows are written by the message commit, redrives and recovery.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, DeliveryId, WorkspaceScope, mailboxes::delivery::DeliveryState};

use crate::{Store, StoreError, StoreResult};

/// Delivery with the columns that determine its state and its REST representation.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct DeliveryRow {
    pub agent_id: i64,
    /// Position in the recipient's mailbox.
    pub seq: i64,
    /// A code of `SourceKind`.
    pub source_kind: i16,
    /// Id of the message, invocation or notice.
    pub source_id: i64,
    /// 0 for the original.
    pub redrive_no: i16,
    pub channel_id: Option<i64>,
    /// Node of the agent when the row was written.
    pub node_id: String,
    /// A code of `Mode`.
    pub mode: i16,
    /// A code of `Reason`.
    pub reason: i16,
    pub created_at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
    /// Highest seq of the mailbox recorded as written to a socket.
    pub sent_seq: i64,
    pub ack_floor: i64,
    /// Time when the ack floor passed the row, to the second.
    pub floor_acked_at: Option<DateTime<Utc>>,
    /// A code of `Settlement`; the fields below are its details.
    pub settlement_state: Option<i16>,
    pub error: Option<String>,
    /// True if the recipient considers another attempt useful.
    pub retryable: Option<bool>,
    /// Reason of a deferral or dead letter.
    pub deferred_reason: Option<String>,
    /// End of the deferral.
    pub available_at: Option<DateTime<Utc>>,
    /// Failures so far, if it is deferred because of them.
    pub retry_no: Option<i16>,
    /// Attempts so far; http_push nodes only.
    pub attempts: Option<i32>,
    /// Time of the first successful attempt; http_push nodes only.
    pub handed_over_at: Option<DateTime<Utc>>,
    /// Seq of the delivery that replaced it.
    pub redriven_seq: Option<i64>,
    pub settlement_at: Option<DateTime<Utc>>,
    /// Current kind of the node; `None` for an implicit direct node without a token.
    pub node_kind: Option<String>,
    pub node_role: Option<String>,
    pub node_adapter: Option<String>,
    /// `None`, as the fields below, if the source is not a message or retention has dropped it.
    pub message_channel_id: Option<i64>,
    pub message_agent_id: Option<i64>,
    pub message_agent_name: Option<String>,
    pub message_text: Option<String>,
    pub message_thread_id: Option<i64>,
    pub message_created_at: Option<DateTime<Utc>>,
    pub conversation_id: Option<String>,
}

/// SQL that joins a selection of deliveries with everything that [`DeliveryRow`] holds.
///
/// The day of a message follows from its id, so that one partition is searched: the milliseconds since 2025 are above
/// the 22 lowest bits. The ack log is searched from one second before the delivery, because its times are truncated.
macro_rules! delivery_rows {
    ($selection:literal) => {
        concat!(
            "SELECT d.agent_id, d.seq, d.source_kind, d.source_id, d.redrive_no, d.channel_id, d.node_id,
                    d.mode, d.reason, d.created_at, d.expires_at,
                    coalesce(c.sent_seq, 0) AS sent_seq, coalesce(c.ack_floor, 0) AS ack_floor,
                    CASE WHEN d.seq <= c.ack_floor THEN
                        (SELECT l.acked_at FROM ack_log l
                          WHERE l.workspace_id = d.workspace_id AND l.agent_id = d.agent_id
                            AND l.acked_at >= d.created_at - interval '1 second'
                            AND l.created_on >= d.created_on - 1 AND l.ack_floor >= d.seq
                          ORDER BY l.acked_at LIMIT 1)
                    END AS floor_acked_at,
                    x.state AS settlement_state, x.error, x.retryable, x.reason AS deferred_reason,
                    x.available_at, x.at AS settlement_at, x.retry_no, x.redriven_seq,
                    CASE WHEN n.kind = 'http_push' THEN
                        (SELECT count(*)::int FROM delivery_attempts t
                          WHERE t.workspace_id = d.workspace_id AND t.agent_id = d.agent_id AND t.seq = d.seq
                            AND t.created_on >= d.created_on)
                    END AS attempts,
                    CASE WHEN n.kind = 'http_push' THEN
                        (SELECT min(t.attempted_at) FROM delivery_attempts t
                          WHERE t.workspace_id = d.workspace_id AND t.agent_id = d.agent_id AND t.seq = d.seq
                            AND t.created_on >= d.created_on AND t.error IS NULL)
                    END AS handed_over_at,
                    n.kind AS node_kind, n.role AS node_role, n.delivery_adapter AS node_adapter,
                    m.channel_id AS message_channel_id, m.agent_id AS message_agent_id,
                    m.agent_name AS message_agent_name, m.text AS message_text,
                    m.thread_id AS message_thread_id, m.created_at AS message_created_at, ch.conversation_id
               FROM (",
            $selection,
            ") d
               LEFT JOIN mailbox_cursors c ON c.workspace_id = d.workspace_id AND c.agent_id = d.agent_id
               LEFT JOIN delivery_exceptions x
                      ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
               LEFT JOIN nodes n ON n.workspace_id = d.workspace_id AND n.node_id = d.node_id
               LEFT JOIN messages m
                      ON m.workspace_id = d.workspace_id AND d.source_kind = 0 AND m.message_id = d.source_id
                     AND m.created_on = DATE '2025-01-01' + ((d.source_id >> 22) / 86400000)::integer
               LEFT JOIN channels ch ON ch.workspace_id = d.workspace_id AND ch.channel_id = d.channel_id
              ORDER BY d.seq"
        )
    };
}

impl Store {
    pub async fn delivery(&self, scope: WorkspaceScope, id: DeliveryId) -> StoreResult<Option<DeliveryRow>> {
        sqlx::query_as(delivery_rows!(
            "SELECT * FROM deliveries
              WHERE workspace_id = $1 AND source_id = $2 AND agent_id = $3 AND redrive_no = $4
              ORDER BY created_on DESC LIMIT 1"
        ))
        .bind(scope.workspace_id().get())
        .bind(id.source)
        .bind(id.agent.get())
        .bind(id.redrive_no)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a delivery"))
    }

    /// Reads an agent's deliveries with these seqs, in order. The longest TTL bounds the partitions.
    pub async fn deliveries_at(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        seqs: &[i64],
    ) -> StoreResult<Vec<DeliveryRow>> {
        sqlx::query_as(delivery_rows!(
            "SELECT * FROM deliveries
              WHERE workspace_id = $1 AND agent_id = $2 AND seq = ANY($3)
                AND created_on >= (now() - interval '7 days')::date"
        ))
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .bind(seqs)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading deliveries of an agent"))
    }

    /// Lists an agent's deliveries in `state`, oldest first; without one, those that are queued or delivered. Expired
    /// rows count as neither.
    pub async fn deliveries(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        state: Option<DeliveryState>,
        limit: i64,
    ) -> StoreResult<Vec<DeliveryRow>> {
        // Active rows lie above the settled floor and are younger than the longest TTL: both bound the scan.
        let sql = match state {
            None | Some(DeliveryState::Queued | DeliveryState::Delivered) => delivery_rows!(
                "SELECT d.* FROM deliveries d
                   LEFT JOIN mailbox_cursors c ON c.workspace_id = d.workspace_id AND c.agent_id = d.agent_id
                   LEFT JOIN delivery_exceptions x
                          ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
                  WHERE d.workspace_id = $1 AND d.agent_id = $2
                    AND d.created_on >= (now() - interval '7 days')::date AND d.expires_at > now()
                    AND d.seq > coalesce((SELECT s.settled_floor FROM mailbox_cursors s
                                           WHERE s.workspace_id = $1 AND s.agent_id = $2), 0)
                    AND (x.state IS NULL OR x.state = 3)
                    AND CASE $4::text
                            WHEN 'queued' THEN x.state = 3 OR d.seq > coalesce(c.sent_seq, 0)
                            WHEN 'delivered' THEN x.state IS NULL AND d.seq <= coalesce(c.sent_seq, 0)
                            ELSE true
                        END
                  ORDER BY d.seq LIMIT $3"
            ),
            Some(DeliveryState::Acked) => delivery_rows!(
                "SELECT d.* FROM deliveries d
                   LEFT JOIN mailbox_cursors c ON c.workspace_id = d.workspace_id AND c.agent_id = d.agent_id
                   LEFT JOIN delivery_exceptions x
                          ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
                  WHERE d.workspace_id = $1 AND d.agent_id = $2 AND x.state IS DISTINCT FROM 4
                    AND (d.seq <= c.ack_floor OR x.state = 1) AND $4::text IS NOT NULL
                  ORDER BY d.seq LIMIT $3"
            ),
            // Starts from the settlements, of which there are few.
            Some(DeliveryState::Failed) => delivery_rows!(
                "SELECT d.* FROM delivery_exceptions x
                   JOIN deliveries d ON d.workspace_id = x.workspace_id AND d.agent_id = x.agent_id AND d.seq = x.seq
                   LEFT JOIN mailbox_cursors c ON c.workspace_id = x.workspace_id AND c.agent_id = x.agent_id
                  WHERE x.workspace_id = $1 AND x.agent_id = $2 AND $4::text IS NOT NULL
                    AND (x.state = 2 AND x.seq > coalesce(c.ack_floor, 0) OR x.state = 4 AND x.reason = 'rejected')
                  ORDER BY x.seq LIMIT $3"
            ),
            Some(DeliveryState::DeadLettered) => delivery_rows!(
                "SELECT d.* FROM delivery_exceptions x
                   JOIN deliveries d ON d.workspace_id = x.workspace_id AND d.agent_id = x.agent_id AND d.seq = x.seq
                  WHERE x.workspace_id = $1 AND x.agent_id = $2 AND x.state = 4
                    AND x.reason IS DISTINCT FROM 'rejected' AND $4::text IS NOT NULL
                  ORDER BY x.seq LIMIT $3"
            ),
        };
        sqlx::query_as(sql)
            .bind(scope.workspace_id().get())
            .bind(agent.get())
            .bind(limit)
            .bind(state.map(DeliveryState::as_str))
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing the deliveries of an agent"))
    }
}
