//! Edits of a message by its author, which also update the search index.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, JsonText, MessageId, WorkspaceScope};

use crate::{
    Store, StoreError, StoreResult,
    events::{self, Event, RecordedEvents},
    messages::{days::day_of_id, edits},
    search::index,
};

/// Changes to a message. `None` leaves a field as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct MessageChange<'a> {
    /// The text, and the names mentioned in it.
    pub text: Option<(&'a str, &'a [String])>,
    /// Rich blocks; `Some(None)` removes them.
    pub blocks: Option<Option<&'a JsonText>>,
    pub metadata: Option<&'a JsonText>,
}

impl Store {
    /// Changes a message of `author` and records `event`. The replaced content is kept for earlier events.
    /// `None` without such a message.
    pub async fn update_message(
        &self,
        scope: WorkspaceScope,
        (message, author): (MessageId, AgentId),
        change: MessageChange<'_>,
        at: DateTime<Utc>,
        event: Event,
    ) -> StoreResult<Option<RecordedEvents>> {
        let doing = "changing a message";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let Some(replaced) = edits::lock_message(&mut tx, scope, (message, author)).await? else {
            return Ok(None);
        };
        // Text and metadata cannot be removed, so null leaves them as they are. Blocks can: a flag tells whether they
        // change.
        sqlx::query(
            "UPDATE messages
                SET text = coalesce($5, text), mentions = coalesce($6, mentions),
                    blocks = CASE WHEN $7 THEN $8::text::json ELSE blocks END,
                    metadata = coalesce($9::text::json, metadata)
              WHERE workspace_id = $1 AND message_id = $2 AND created_on = $3 AND agent_id = $4",
        )
        .bind(scope.workspace_id())
        .bind(message)
        .bind(day_of_id(message.get()))
        .bind(author)
        .bind(change.text.map(|(text, _)| text))
        .bind(change.text.map(|(_, mentions)| mentions))
        .bind(change.blocks.is_some())
        .bind(change.blocks.flatten().map(JsonText::get))
        .bind(change.metadata.map(JsonText::get))
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // Before the event, whose counter all writers of the workspace share.
        if change.text.is_some() {
            index::reindex_message(&mut tx, scope.workspace_id(), message).await?;
        }
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        // The event counter should be locked last, but its seq is needed here; edits are rare.
        edits::record_replaced(&mut tx, scope, message, recorded.first_seq, &replaced, at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }
}
