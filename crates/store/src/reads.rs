//! Explicit reads: receipts and the last-read pointers of members.
//!
//! What an agent read by acknowledging over its socket is derived from the ack floor, not stored here.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, DeliveryId, MessageId, WorkspaceScope};
use sqlx::{PgTransaction, Row as _};

use crate::{
    DeliveryReport, Store, StoreError, StoreResult,
    events::{self, NewEvent, Recorded},
    exceptions,
    messages_read::day_of,
};

/// An agent's read of a message.
#[derive(Debug)]
pub struct ReadReceipt {
    /// When it was first read.
    pub read_at: DateTime<Utc>,
    /// Whether this call was the first.
    pub first: bool,
    /// Whether a delivery was settled by it.
    pub settled: bool,
    /// What was recorded; nothing unless this call was the first.
    pub recorded: Recorded,
}

/// Where a message that was read is.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ReadPlace {
    /// Its channel.
    pub channel_id: i64,
    /// The channel's name.
    pub channel_name: String,
    /// What clients call the conversation; `None` for a channel.
    pub conversation_id: Option<String>,
}

impl Store {
    /// Records that the agent read the message, and acknowledges its delivery of it, if any.
    /// The event, made from the place and the time, is recorded the first time.
    /// `None` when there is no such message or the agent is not a member of its channel.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn mark_read(
        &self,
        scope: WorkspaceScope,
        message: MessageId,
        agent: AgentId,
        at: DateTime<Utc>,
        event: impl FnOnce(ReadPlace, DateTime<Utc>) -> NewEvent + Send,
    ) -> StoreResult<Option<ReadReceipt>> {
        let doing = "marking a message as read";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let place: Option<ReadPlace> = sqlx::query_as(
            "SELECT c.channel_id, c.name AS channel_name, c.conversation_id
               FROM messages m
               JOIN channel_members cm ON cm.workspace_id = m.workspace_id AND cm.channel_id = m.channel_id
               JOIN channels c ON c.workspace_id = m.workspace_id AND c.channel_id = m.channel_id
              WHERE m.workspace_id = $1 AND m.message_id = $2 AND m.created_on = $3 AND cm.agent_id = $4",
        )
        .bind(scope.workspace_id().get())
        .bind(message.get())
        .bind(day_of(message.get()))
        .bind(agent.get())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(place) = place else { return Ok(None) };
        // What was sent again is a delivery of its own: the last one counts.
        let redrive_no: Option<_> = sqlx::query_scalar(
            "SELECT redrive_no FROM deliveries WHERE workspace_id = $1 AND source_id = $2 AND agent_id = $3
              ORDER BY redrive_no DESC LIMIT 1",
        )
        .bind(scope.workspace_id().get())
        .bind(message.get())
        .bind(agent.get())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let delivery = DeliveryId { source: message.get(), agent, redrive_no: redrive_no.unwrap_or_default() };
        // Cursor first, then the read: the order of every transaction that touches both.
        let settled = exceptions::report_in(&mut tx, scope, delivery, &DeliveryReport::Ack).await?;
        let (read_at, first) = record(&mut tx, scope, message, agent).await?;
        let settled = settled == Some(true);
        let first = first || settled;
        let events = if first { vec![event(place, read_at)] } else { Vec::new() };
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(ReadReceipt { read_at, first, settled, recorded }))
    }
}

/// Writes the receipt once and moves the member's last-read pointer forward. Returns when the message
/// was first read, and whether that is now.
pub(crate) async fn record(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    message: MessageId,
    agent: AgentId,
) -> StoreResult<(DateTime<Utc>, bool)> {
    let doing = "recording a read";
    let workspace = scope.workspace_id().get();
    let first: Option<DateTime<Utc>> = sqlx::query_scalar(
        "INSERT INTO message_reads (workspace_id, message_id, agent_id, read_at) VALUES ($1, $2, $3, now())
         ON CONFLICT DO NOTHING RETURNING read_at",
    )
    .bind(workspace)
    .bind(message.get())
    .bind(agent.get())
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    if let Some(read_at) = first {
        sqlx::query(
            "UPDATE channel_members cm SET last_read_id = $2, last_read_at = now()
               FROM messages m
              WHERE m.workspace_id = $1 AND m.message_id = $2 AND m.created_on = $3
                AND cm.workspace_id = $1 AND cm.channel_id = m.channel_id AND cm.agent_id = $4
                AND coalesce(cm.last_read_id, -1) < $2",
        )
        .bind(workspace)
        .bind(message.get())
        .bind(day_of(message.get()))
        .bind(agent.get())
        .execute(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        return Ok((read_at, true));
    }
    let row =
        sqlx::query("SELECT read_at FROM message_reads WHERE workspace_id = $1 AND message_id = $2 AND agent_id = $3")
            .bind(workspace)
            .bind(message.get())
            .bind(agent.get())
            .fetch_one(&mut **tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
    Ok((row.get(0), false))
}
