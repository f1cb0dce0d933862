//! Reads of delivery rows in seq order for replay, gap repair and republishing.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, InvocationId, MessageId, WorkspaceScope,
    mailboxes::{StoredDelivery, stream::Seq},
};
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    actions::outcomes::OutcomeFacts,
    codes::{ACTION_RESULT_SOURCE, MESSAGE_SOURCE},
    decode::decode_rows,
    messages::row::MessageRow,
    statement_timeout::StatementTimeout as _,
};

/// Rows per mailbox and page.
pub const PAGE: i64 = 50;

/// Row with [`COLUMNS`].
pub(crate) struct StoredDeliveryRow(pub(crate) StoredDelivery);

pub(crate) const COLUMNS: &str = "d.workspace_id, d.agent_id, a.name AS recipient_name, a.node_id, a.provider,
    d.seq, d.source_id, d.redrive_no, d.mode AS delivery_mode, d.expires_at, x.state,
    m.message_id, m.created_at, m.channel_id, ch.name AS channel_name, ch.type AS channel_type,
    ch.conversation_id, m.agent_id AS author_id, m.agent_name AS author_name, m.agent_type, m.thread_id,
    m.text, m.blocks, m.metadata, m.attachments, m.mentions, m.mode, m.content_type,
    i.invocation_id, i.action_name, i.status AS invocation_status, i.output, i.error AS invocation_error";

/// Joins the recipients as `a`.
pub(crate) const RECIPIENT_JOIN: &str = "
    JOIN agents a ON a.workspace_id = d.workspace_id AND a.agent_id = d.agent_id";

/// Joins settlements and sources. The day of a message follows from its id, so that one partition is searched: the
/// milliseconds since 2025 are above the 22 lowest bits.
pub(crate) const SOURCE_JOINS: &str = formatcp!("
    LEFT JOIN delivery_exceptions x
           ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
    LEFT JOIN messages m
           ON d.source_kind = {MESSAGE_SOURCE} AND m.workspace_id = d.workspace_id AND m.message_id = d.source_id
          AND m.created_on = DATE '2025-01-01' + ((d.source_id >> 22) / 86400000)::integer
    LEFT JOIN channels ch ON ch.workspace_id = m.workspace_id AND ch.channel_id = m.channel_id
    LEFT JOIN invocations i
           ON d.source_kind = {ACTION_RESULT_SOURCE} AND i.workspace_id = d.workspace_id AND i.invocation_id = d.source_id");

impl Store {
    /// Reads the rows of each mailbox from the given seq on, in order, at most [`PAGE`] each. Rows from before `since`
    /// have expired; their partitions are not read.
    pub async fn deliveries_from(
        &self,
        positions: &[(WorkspaceScope, AgentId, Seq)],
        since: DateTime<Utc>,
    ) -> StoreResult<Vec<StoredDelivery>> {
        let workspaces: Vec<i64> = positions.iter().map(|(scope, _, _)| scope.workspace_id().get()).collect();
        let agents: Vec<i64> = positions.iter().map(|(_, agent, _)| agent.get()).collect();
        let from: Vec<Seq> = positions.iter().map(|(_, _, seq)| *seq).collect();
        let query = format!(
            "SELECT {COLUMNS}
               FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id, from_seq)
              CROSS JOIN LATERAL (
                    SELECT * FROM deliveries
                     WHERE workspace_id = k.workspace_id AND agent_id = k.agent_id
                       AND seq >= k.from_seq AND created_on >= $4
                     ORDER BY seq LIMIT $5) AS d
               {RECIPIENT_JOIN} {SOURCE_JOINS}
              ORDER BY d.workspace_id, d.agent_id, d.seq"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(workspaces)
            .bind(agents)
            .bind(from)
            .bind(since.date_naive())
            .bind(PAGE)
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("reading deliveries from a position"))?;
        let rows: Vec<StoredDeliveryRow> = decode_rows("deliveries", &rows)?;
        Ok(rows.into_iter().map(|row| row.0).collect())
    }

    /// Reads all deliveries of these messages for republishing.
    pub async fn deliveries_of_sources(
        &self,
        sources: &[(WorkspaceScope, MessageId)],
    ) -> StoreResult<Vec<StoredDelivery>> {
        let workspaces: Vec<i64> = sources.iter().map(|(scope, _)| scope.workspace_id().get()).collect();
        let ids: Vec<i64> = sources.iter().map(|(_, id)| id.get()).collect();
        let query = format!(
            "SELECT {COLUMNS}
               FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, source_id)
               JOIN deliveries d ON d.workspace_id = k.workspace_id AND d.source_id = k.source_id
               {RECIPIENT_JOIN} {SOURCE_JOINS}
              ORDER BY d.workspace_id, d.agent_id, d.seq"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(workspaces)
            .bind(ids)
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("reading the deliveries of messages"))?;
        let rows: Vec<StoredDeliveryRow> = decode_rows("deliveries", &rows)?;
        Ok(rows.into_iter().map(|row| row.0).collect())
    }
}

impl FromRow<'_, PgRow> for StoredDeliveryRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let has_message = row.try_get::<Option<MessageId>, _>("message_id")?.is_some();
        let invocation: Option<InvocationId> = row.try_get("invocation_id")?;
        let outcome = invocation.map(|invocation_id| -> sqlx::Result<_> {
            Ok(OutcomeFacts {
                invocation_id,
                action_name: row.try_get("action_name")?,
                status: row.try_get("invocation_status")?,
                output: row.try_get("output")?,
                error: row.try_get("invocation_error")?,
            })
        });
        Ok(Self(StoredDelivery {
            scope: WorkspaceScope::from_engine_row(row.try_get("workspace_id")?),
            agent_id: row.try_get("agent_id")?,
            agent_name: row.try_get("recipient_name")?,
            location: (row.try_get("node_id")?, row.try_get("provider")?),
            seq: row.try_get("seq")?,
            source_id: row.try_get("source_id")?,
            redrive_no: row.try_get("redrive_no")?,
            mode: row.try_get("delivery_mode")?,
            expires_at: row.try_get("expires_at")?,
            settlement: row.try_get("state")?,
            message: has_message.then(|| MessageRow::from_row(row)).transpose()?.map(|row| row.0),
            outcome: outcome.transpose()?.map(|outcome| (outcome.kind().into(), outcome.data())),
        }))
    }
}
