//! Explicit reads: receipts and the last-read pointers of members, written when an agent marks a message as
//! read. Reads implied by acks are derived from the ack floor instead and folded later.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, DeliveryId, MessageId, WorkspaceScope, mailboxes::DeliveryReport, messages::ReadLocation};

use crate::{
    Store, StoreError, StoreResult,
    events::{self, Event, RecordedEvents},
    mailboxes::settlements,
    messages::{days::day_of_id, reads::record_read},
};

/// Outcome of marking a message as read.
#[derive(Debug)]
pub struct ReadReceipt {
    /// The first time the agent read the message.
    pub read_at: DateTime<Utc>,
    /// True if this call was the first read.
    pub first: bool,
    /// True if this call settled a delivery.
    pub settled: bool,
    /// Empty unless this call was the first read.
    pub recorded: RecordedEvents,
}

impl Store {
    /// Records that the agent read the message, and acks the agent's delivery of it, if any. `event` makes the
    /// event of a first read from the location and the time of the read.
    /// `None` without such a message, or when the agent is not a member of its channel.
    pub async fn mark_read(
        &self,
        scope: WorkspaceScope,
        message: MessageId,
        agent: AgentId,
        at: DateTime<Utc>,
        event: impl FnOnce(ReadLocation, DateTime<Utc>) -> Event + Send,
    ) -> StoreResult<Option<ReadReceipt>> {
        let doing = "marking a message as read";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let place: Option<ReadLocation> = sqlx::query_as(
            "SELECT c.channel_id, c.name AS channel_name, c.conversation_id
               FROM messages m
               JOIN channel_members cm ON cm.workspace_id = m.workspace_id AND cm.channel_id = m.channel_id
               JOIN channels c ON c.workspace_id = m.workspace_id AND c.channel_id = m.channel_id
              WHERE m.workspace_id = $1 AND m.message_id = $2 AND m.created_on = $3 AND cm.agent_id = $4",
        )
        .bind(scope.workspace_id())
        .bind(message)
        .bind(day_of_id(message.get()))
        .bind(agent)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(place) = place else { return Ok(None) };
        // A redrive made another delivery of the same message: the last one counts.
        let redrive_no: Option<i16> = sqlx::query_scalar(
            "SELECT redrive_no FROM deliveries WHERE workspace_id = $1 AND source_id = $2 AND agent_id = $3
              ORDER BY redrive_no DESC LIMIT 1",
        )
        .bind(scope.workspace_id())
        .bind(message)
        .bind(agent)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // Without a delivery, the id of the original one finds nothing to ack.
        let redrive_no = redrive_no.unwrap_or(0);
        let delivery = DeliveryId { source: message.into(), agent, redrive_no };
        // Cursor first, then the read: every transaction that locks both uses this order.
        let settled = settlements::report_within(&mut tx, scope, delivery, &DeliveryReport::Ack, at).await?;
        let (read_at, first) = record_read(&mut tx, scope, message, agent).await?;
        let settled = settled == Some(true);
        // A settlement has recorded the read already, so that `record_read` finds it.
        let first = first || settled;
        let events = if first { vec![event(place, read_at)] } else { Vec::new() };
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(ReadReceipt { read_at, first, settled, recorded }))
    }
}
