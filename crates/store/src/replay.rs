//! Reading delivery rows back in seq order: replay, gap repair and republishing.

use std::borrow::Cow;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, InvocationId, MessageId, WorkspaceId, WorkspaceScope, delivery::Exception, session::Seq};
use serde_json::Value;
use sqlx::{Row, postgres::PgRow};

use crate::{MessageRow, Store, StoreError, StoreResult, finish::OutcomeFacts, patience::Patient as _};

/// Rows read per mailbox and page.
pub const PAGE: i64 = 50;

/// A delivery row with all that its frame is made of.
#[derive(Debug, Clone)]
pub struct StoredDelivery {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The recipient.
    pub agent_id: AgentId,
    /// The recipient's name.
    pub agent_name: String,
    /// Where the recipient is now: node, and provider if known.
    pub location: (String, Option<String>),
    /// Its place in the mailbox.
    pub seq: Seq,
    /// The source's id.
    pub source_id: i64,
    /// 0 for the original.
    pub redrive_no: i16,
    /// Code of [`relay_domain::delivery::Mode`].
    pub mode: i16,
    /// When it expires.
    pub expires_at: DateTime<Utc>,
    /// How the row departs from its mailbox's floors.
    pub exception: Option<Exception>,
    /// The message; none once retention has dropped it, and none for an outcome.
    pub message: Option<MessageRow>,
    /// What a caller is told of an invocation's outcome: the kind of event, and its data.
    pub outcome: Option<(Cow<'static, str>, Value)>,
}

pub(crate) const COLUMNS: &str = "d.workspace_id, d.agent_id, a.name AS recipient_name, a.node_id, a.provider,
    d.seq, d.source_id, d.redrive_no, d.mode AS delivery_mode, d.expires_at, x.state,
    m.message_id, m.created_at, m.channel_id, ch.name AS channel_name, ch.type AS channel_type,
    ch.conversation_id, m.agent_id AS author_id, m.agent_name AS author_name, m.agent_type, m.thread_id,
    m.text, m.blocks, m.metadata, m.attachments, m.mentions, m.mode, m.content_type,
    i.invocation_id, i.action_name, i.status AS invocation_status, i.output, i.error AS invocation_error";

/// The recipients, for a selection that does not provide them as `a`.
pub(crate) const RECIPIENT_JOIN: &str = "
    JOIN agents a ON a.workspace_id = d.workspace_id AND a.agent_id = d.agent_id";

/// A message's day follows from its snowflake, so that its partition is found without a search: the milliseconds since
/// 2025 are above its 22 lowest bits.
pub(crate) const SOURCE_JOINS: &str = "
    LEFT JOIN delivery_exceptions x
           ON x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id AND x.seq = d.seq
    LEFT JOIN messages m
           ON d.source_kind = 0 AND m.workspace_id = d.workspace_id AND m.message_id = d.source_id
          AND m.created_on = DATE '2025-01-01' + ((d.source_id >> 22) / 86400000)::integer
    LEFT JOIN channels ch ON ch.workspace_id = m.workspace_id AND ch.channel_id = m.channel_id
    LEFT JOIN invocations i
           ON d.source_kind = 1 AND i.workspace_id = d.workspace_id AND i.invocation_id = d.source_id";

impl Store {
    /// For each mailbox the rows from the given seq on, in order, at most [`PAGE`] each, and none
    /// before `since` (older rows have expired: their partitions are not read).
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn deliveries_from(
        &self,
        of: &[(WorkspaceScope, AgentId, Seq)],
        since: DateTime<Utc>,
    ) -> StoreResult<Vec<StoredDelivery>> {
        let workspaces: Vec<i64> = of.iter().map(|(scope, _, _)| scope.workspace_id().get()).collect();
        let agents: Vec<i64> = of.iter().map(|(_, agent, _)| agent.get()).collect();
        let from: Vec<Seq> = of.iter().map(|(_, _, seq)| *seq).collect();
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
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("reading deliveries from a position"))?;
        Ok(rows.iter().map(stored).collect())
    }

    /// All deliveries of these messages, for publishing them again.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn deliveries_of(&self, sources: &[(WorkspaceScope, MessageId)]) -> StoreResult<Vec<StoredDelivery>> {
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
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("reading the deliveries of messages"))?;
        Ok(rows.iter().map(stored).collect())
    }
}

pub(crate) fn stored(row: &PgRow) -> StoredDelivery {
    let message = row.get::<Option<i64>, _>("message_id").map(|message_id| MessageRow {
        message_id,
        channel_id: row.get("channel_id"),
        agent_id: row.get("author_id"),
        agent_name: row.get("author_name"),
        agent_type: row.get("agent_type"),
        thread_id: row.get("thread_id"),
        text: row.get("text"),
        blocks: row.get("blocks"),
        metadata: row.get("metadata"),
        attachments: row.get("attachments"),
        mentions: row.get("mentions"),
        mode: row.get("mode"),
        content_type: row.get("content_type"),
        created_at: row.get("created_at"),
        channel_name: row.get("channel_name"),
        channel_type: row.get("channel_type"),
        conversation_id: row.get("conversation_id"),
    });
    StoredDelivery {
        scope: WorkspaceScope::from_engine_row(WorkspaceId::new(row.get("workspace_id"))),
        agent_id: AgentId::new(row.get("agent_id")),
        agent_name: row.get("recipient_name"),
        location: (row.get("node_id"), row.get("provider")),
        seq: row.get("seq"),
        source_id: row.get("source_id"),
        redrive_no: row.get("redrive_no"),
        mode: row.get("delivery_mode"),
        expires_at: row.get("expires_at"),
        exception: row.get::<Option<i16>, _>("state").and_then(|code| Exception::from_code(code).ok()),
        message,
        outcome: row.get::<Option<i64>, _>("invocation_id").map(|id| {
            let outcome = OutcomeFacts {
                invocation_id: InvocationId::new(id),
                action_name: row.get("action_name"),
                status: row.get("invocation_status"),
                output: row.get("output"),
                error: row.get("invocation_error"),
            };
            (outcome.kind().into(), outcome.data())
        }),
    }
}
