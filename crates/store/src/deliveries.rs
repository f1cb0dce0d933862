//! Reading an agent's deliveries. Rows are written by the committer only.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, DeliveryId, WorkspaceScope, delivery::DeliveryState};

use crate::{Store, StoreError, StoreResult};

/// A delivery with everything its state and its public form follow from.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct DeliveryRow {
    /// The recipient.
    pub agent_id: i64,
    /// Its position in the recipient's mailbox.
    pub seq: i64,
    /// A code of `SourceKind`.
    pub source_kind: i16,
    /// The message, action result or notice.
    pub source_id: i64,
    /// How often it was redriven.
    pub redrive_no: i16,
    /// The channel of the message.
    pub channel_id: Option<i64>,
    /// Where the agent was when the row was written.
    pub node_id: String,
    /// A code of `Mode`.
    pub mode: i16,
    /// A code of `Reason`.
    pub reason: i16,
    /// When it was accepted.
    pub created_at: DateTime<Utc>,
    /// When it becomes a dead letter.
    pub expires_at: DateTime<Utc>,
    /// The mailbox is written up to here.
    pub sent_seq: i64,
    /// The mailbox is acknowledged up to here.
    pub ack_floor: i64,
    /// When the floor passed the row, to the second.
    pub floor_acked_at: Option<DateTime<Utc>>,
    /// A code of `Exception`, and its details.
    pub exception_state: Option<i16>,
    /// Why it failed.
    pub error: Option<String>,
    /// Whether trying again could help.
    pub retryable: Option<bool>,
    /// Why it was deferred or given up.
    pub deferred_reason: Option<String>,
    /// Until when it was deferred.
    pub available_at: Option<DateTime<Utc>>,
    /// How often it has failed in a row, if it was put off for that.
    pub retry_no: Option<i16>,
    /// How often it was tried, on a node that is called.
    pub attempts: Option<i32>,
    /// When such a node first took it.
    pub handed_over_at: Option<DateTime<Utc>>,
    /// The place of the delivery that has taken its place.
    pub redriven_seq: Option<i64>,
    /// When the exception was made.
    pub exception_at: Option<DateTime<Utc>>,
    /// The node, as it is now; `None` for an implicit direct node that never minted a token.
    pub node_kind: Option<String>,
    /// Its role.
    pub node_role: Option<String>,
    /// Its adapter.
    pub node_adapter: Option<String>,
    /// The message's channel, if the source is a message that still exists; the same for the rest.
    pub message_channel_id: Option<i64>,
    /// Its author.
    pub message_agent_id: Option<i64>,
    /// The author's name.
    pub message_agent_name: Option<String>,
    /// Its text.
    pub message_text: Option<String>,
    /// The root of its thread.
    pub message_thread_id: Option<i64>,
    /// When it was accepted.
    pub message_created_at: Option<DateTime<Utc>>,
    /// What clients call its conversation.
    pub conversation_id: Option<String>,
}

/// Completes a selection that provides `d` (deliveries), `c` (cursor) and `x` (exception) with what
/// the public form needs. The message's day follows from its id: 22 bits below the milliseconds.
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
                    x.state AS exception_state, x.error, x.retryable, x.reason AS deferred_reason,
                    x.available_at, x.at AS exception_at, x.retry_no, x.redriven_seq,
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
    /// One delivery of an agent.
    ///
    /// # Errors
    /// When Postgres does not answer.
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

    /// An agent's deliveries at these places, in order; all younger than the longest TTL.
    ///
    /// # Errors
    /// When Postgres does not answer.
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

    /// An agent's deliveries, oldest first: those in the given state, or without one those that are
    /// queued or delivered. Expired rows count as neither.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn deliveries(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        state: Option<DeliveryState>,
        limit: i64,
    ) -> StoreResult<Vec<DeliveryRow>> {
        // Nothing below the settled floor is active, and nothing active is older than the longest TTL.
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
            // Driven by the exceptions, of which there are few.
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
