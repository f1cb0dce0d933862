//! Reads of an agent's deliveries. The rows are written by the message commit, redrives and recovery.

use const_format::formatcp;
use relay_domain::{
    AgentId, DeliveryId, WorkspaceScope,
    mailboxes::{Delivery, DeliveryMessage, DeliveryNode, SettlementRecord, delivery::DeliveryState, stream::Seq},
    messages::FROM_ADDRESS,
};
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    codes::{ACKED, DEAD_LETTERED, DEFERRED, FAILED, HTTP_PUSH, MESSAGE_SOURCE},
    decode::decode_row,
    messages::{contents::decode_sized, days::LAST_DAY},
};

const TABLE: &str = "deliveries";

pub(crate) struct DeliveryRow(Delivery);

impl FromRow<'_, PgRow> for DeliveryRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let agent = row.try_get("agent_id")?;
        Ok(Self(Delivery {
            id: DeliveryId { source: row.try_get("source_id")?, agent, redrive_no: row.try_get("redrive_no")? },
            seq: row.try_get("seq")?,
            channel_id: row.try_get("channel_id")?,
            conversation_id: row.try_get("conversation_id")?,
            node_id: row.try_get("node_id")?,
            node: node_of(row)?,
            mode: row.try_get("mode")?,
            written_for: row.try_get("reason")?,
            created_at: row.try_get("created_at")?,
            expires_at: row.try_get("expires_at")?,
            sent_seq: row.try_get("sent_seq")?,
            ack_floor: row.try_get("ack_floor")?,
            floor_acked_at: row.try_get("floor_acked_at")?,
            settlement: settlement_of(row)?,
            attempt_count: row.try_get("attempts")?,
            handed_over_at: row.try_get("handed_over_at")?,
            message: message_of(row)?,
        }))
    }
}

/// Every part of a node, a settlement or a message is `NULL` if it does not exist; its first column tells.
fn node_of(row: &PgRow) -> sqlx::Result<Option<DeliveryNode>> {
    let Some(kind) = row.try_get("node_kind")? else { return Ok(None) };
    Ok(Some(DeliveryNode { kind, role: row.try_get("node_role")?, adapter: row.try_get("node_adapter")? }))
}

fn settlement_of(row: &PgRow) -> sqlx::Result<Option<SettlementRecord>> {
    let Some(state) = row.try_get("settlement_state")? else { return Ok(None) };
    Ok(Some(SettlementRecord {
        state,
        at: row.try_get("settlement_at")?,
        error: row.try_get("error")?,
        retryable: row.try_get("retryable")?,
        reason: row.try_get("settlement_reason")?,
        available_at: row.try_get("available_at")?,
        retry_no: row.try_get("retry_no")?,
        redriven_seq: row.try_get("redriven_seq")?,
    }))
}

fn message_of(row: &PgRow) -> sqlx::Result<Option<DeliveryMessage>> {
    let Some(agent_id) = row.try_get("message_agent_id")? else { return Ok(None) };
    Ok(Some(DeliveryMessage {
        agent_id,
        agent_name: row.try_get("message_agent_name")?,
        from_address: row.try_get("message_from_address")?,
        text: row.try_get("message_text")?,
        thread_id: row.try_get("message_thread_id")?,
        created_at: row.try_get("message_created_at")?,
    }))
}

/// SQL that joins a selection of deliveries with everything that a [`Delivery`] holds.
///
/// The day of a message follows from its id, so that one partition is searched: the milliseconds since 2025 are above
/// the 22 lowest bits. The ack log is searched from one second before the delivery, because its times are truncated. A
/// list leaves out the texts.
macro_rules! delivery_rows {
    ($selection:expr, $text:literal) => {
        const_format::concatcp!(
            formatcp!("SELECT d.agent_id, d.seq, d.source_id, d.redrive_no, d.channel_id, d.node_id,
                    d.mode, d.reason, d.created_at, d.expires_at,
                    coalesce(c.sent_seq, 0) AS sent_seq, coalesce(c.ack_floor, 0) AS ack_floor,
                    CASE WHEN d.seq <= c.ack_floor THEN
                        (SELECT l.acked_at FROM ack_log l
                          WHERE l.workspace_id = d.workspace_id AND l.agent_id = d.agent_id
                            AND l.acked_at >= d.created_at - interval '1 second'
                            AND l.created_on BETWEEN d.created_on - 1 AND {LAST_DAY} AND l.ack_floor >= d.seq
                          ORDER BY l.acked_at LIMIT 1)
                    END AS floor_acked_at,
                    x.state AS settlement_state, x.error, x.retryable, x.reason AS settlement_reason,
                    x.available_at, x.at AS settlement_at, x.retry_no, x.redriven_seq,
                    CASE WHEN n.kind = '{HTTP_PUSH}' THEN
                        (SELECT count(*)::int FROM delivery_attempts t
                          WHERE t.workspace_id = d.workspace_id AND t.agent_id = d.agent_id AND t.seq = d.seq
                            AND t.created_on BETWEEN d.created_on AND {LAST_DAY})
                    END AS attempts,
                    CASE WHEN n.kind = '{HTTP_PUSH}' THEN
                        (SELECT min(t.attempted_at) FROM delivery_attempts t
                          WHERE t.workspace_id = d.workspace_id AND t.agent_id = d.agent_id AND t.seq = d.seq
                            AND t.created_on BETWEEN d.created_on AND {LAST_DAY} AND t.error IS NULL)
                    END AS handed_over_at,
                    n.kind AS node_kind, n.role AS node_role, n.delivery_adapter AS node_adapter,
                    m.agent_id AS message_agent_id, m.agent_name AS message_agent_name,
                    CASE WHEN ch.conversation_id IS NOT NULL THEN m.metadata ->> '{FROM_ADDRESS}' END
                        AS message_from_address, "),
            $text,
            formatcp!(" AS message_text, octet_length(m.text)::bigint AS content_bytes,
                    m.thread_id AS message_thread_id, m.created_at AS message_created_at, ch.conversation_id
               FROM ("),
            $selection,
            formatcp!(") d
               LEFT JOIN mailbox_cursors c ON c.workspace_id = d.workspace_id AND c.agent_id = d.agent_id
               LEFT JOIN delivery_exceptions x
                      ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
               LEFT JOIN nodes n ON n.workspace_id = d.workspace_id AND n.node_id = d.node_id
               LEFT JOIN messages m
                      ON m.workspace_id = d.workspace_id AND d.source_kind = {MESSAGE_SOURCE} AND m.message_id = d.source_id
                     AND m.created_on = DATE '2025-01-01' + ((d.source_id >> 22) / 86400000)::integer
                     AND m.created_on <= {LAST_DAY}
               LEFT JOIN channels ch ON ch.workspace_id = d.workspace_id AND ch.channel_id = d.channel_id
              ORDER BY d.seq")
        )
    };
}

fn decode_deliveries(rows: &[PgRow]) -> StoreResult<Vec<(Delivery, usize)>> {
    Ok(decode_sized::<DeliveryRow>(TABLE, rows)?.into_iter().map(|(row, bytes)| (row.0, bytes)).collect())
}

impl Store {
    pub async fn delivery(&self, scope: WorkspaceScope, id: DeliveryId) -> StoreResult<Option<Delivery>> {
        let row = sqlx::query(delivery_rows!(
            "SELECT * FROM deliveries
              WHERE workspace_id = $1 AND source_id = $2 AND agent_id = $3 AND redrive_no = $4
              ORDER BY created_on DESC LIMIT 1",
            "m.text"
        ))
        .bind(scope.workspace_id())
        .bind(id.source)
        .bind(id.agent)
        .bind(id.redrive_no)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a delivery"))?;
        row.map(|row| decode_row::<DeliveryRow>(TABLE, &row).map(|row| row.0)).transpose()
    }

    /// Reads an agent's deliveries with these seqs, in order, without texts, and the bytes of the texts. The longest
    /// TTL bounds the partitions.
    pub async fn deliveries_at(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        seqs: &[Seq],
    ) -> StoreResult<Vec<(Delivery, usize)>> {
        let rows = sqlx::query(delivery_rows!(
            formatcp!(
                "SELECT * FROM deliveries
                  WHERE workspace_id = $1 AND agent_id = $2 AND seq = ANY($3)
                    AND created_on BETWEEN (relay_now() - interval '7 days')::date AND {LAST_DAY}"
            ),
            "''"
        ))
        .bind(scope.workspace_id())
        .bind(agent)
        .bind(seqs)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading deliveries of an agent"))?;
        decode_deliveries(&rows)
    }

    /// Lists an agent's deliveries in `state`, oldest first; without one, those that are queued or delivered. Expired
    /// rows count as neither. The texts of their messages are left out; their bytes are returned.
    pub async fn deliveries(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        state: Option<DeliveryState>,
        limit: i64,
    ) -> StoreResult<Vec<(Delivery, usize)>> {
        // Active rows lie above the settled floor and are younger than the longest TTL: both bound the scan.
        // `$4 IS NOT NULL` only names the parameter: all of these statements are executed with the same ones.
        let sql = match state {
            None | Some(DeliveryState::Queued | DeliveryState::Delivered) => delivery_rows!(
                formatcp!("SELECT d.* FROM deliveries d
                   LEFT JOIN mailbox_cursors c ON c.workspace_id = d.workspace_id AND c.agent_id = d.agent_id
                   LEFT JOIN delivery_exceptions x
                          ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
                  WHERE d.workspace_id = $1 AND d.agent_id = $2
                    AND d.created_on BETWEEN (relay_now() - interval '7 days')::date AND {LAST_DAY}
                    AND d.expires_at > relay_now()
                    AND d.seq > coalesce((SELECT s.settled_floor FROM mailbox_cursors s
                                           WHERE s.workspace_id = $1 AND s.agent_id = $2), 0)
                    AND (x.state IS NULL OR x.state = {DEFERRED})
                    AND CASE $4::text
                            WHEN 'queued' THEN x.state = {DEFERRED} OR d.seq > coalesce(c.sent_seq, 0)
                            WHEN 'delivered' THEN x.state IS NULL AND d.seq <= coalesce(c.sent_seq, 0)
                            ELSE true
                        END
                  ORDER BY d.seq LIMIT $3"),
                "''"
            ),
            Some(DeliveryState::Acked) => delivery_rows!(
                formatcp!("SELECT d.* FROM deliveries d
                   LEFT JOIN mailbox_cursors c ON c.workspace_id = d.workspace_id AND c.agent_id = d.agent_id
                   LEFT JOIN delivery_exceptions x
                          ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
                  WHERE d.workspace_id = $1 AND d.agent_id = $2 AND x.state IS DISTINCT FROM {DEAD_LETTERED}
                    AND (d.seq <= c.ack_floor OR x.state = {ACKED}) AND $4::text IS NOT NULL
                  ORDER BY d.seq LIMIT $3"),
                "''"
            ),
            // Starts from the settlements, of which there are few.
            Some(DeliveryState::Failed) => delivery_rows!(
                formatcp!("SELECT d.* FROM delivery_exceptions x
                   JOIN deliveries d ON d.workspace_id = x.workspace_id AND d.agent_id = x.agent_id AND d.seq = x.seq
                   LEFT JOIN mailbox_cursors c ON c.workspace_id = x.workspace_id AND c.agent_id = x.agent_id
                  WHERE x.workspace_id = $1 AND x.agent_id = $2 AND $4::text IS NOT NULL
                    AND (x.state = {FAILED} AND x.seq > coalesce(c.ack_floor, 0) OR x.state = {DEAD_LETTERED} AND x.reason = 'rejected')
                  ORDER BY x.seq LIMIT $3"),
                "''"
            ),
            Some(DeliveryState::DeadLettered) => delivery_rows!(
                formatcp!("SELECT d.* FROM delivery_exceptions x
                   JOIN deliveries d ON d.workspace_id = x.workspace_id AND d.agent_id = x.agent_id AND d.seq = x.seq
                  WHERE x.workspace_id = $1 AND x.agent_id = $2 AND x.state = {DEAD_LETTERED}
                    AND x.reason IS DISTINCT FROM 'rejected' AND $4::text IS NOT NULL
                  ORDER BY x.seq LIMIT $3"),
                "''"
            ),
        };
        let rows = sqlx::query(sql)
            .bind(scope.workspace_id())
            .bind(agent)
            .bind(limit)
            .bind(state.map(DeliveryState::as_str))
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing the deliveries of an agent"))?;
        decode_deliveries(&rows)
    }
}
