//! Changing a message: by its author, and with it what is searched.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, MessageId, WorkspaceScope};
use serde_json::Value;

use crate::{
    Store, StoreError, StoreResult,
    events::{self, NewEvent, Recorded},
    message_edits,
    messages_read::day_of,
    search_index,
};

/// What to change of a message. `None` leaves a field as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct MessageChange<'a> {
    /// The text, and whom it mentions.
    pub text: Option<(&'a str, &'a [String])>,
    /// Rich blocks; `Some(None)` removes them.
    pub blocks: Option<Option<&'a Value>>,
    /// What the author keeps there.
    pub metadata: Option<&'a Value>,
}

impl Store {
    /// Changes a message of `author` and records `event`. What it said before is kept for the events that told it.
    /// `None` when there is none.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn update_message(
        &self,
        scope: WorkspaceScope,
        (message, author): (MessageId, AgentId),
        change: MessageChange<'_>,
        at: DateTime<Utc>,
        event: NewEvent,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "changing a message";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let Some(replaced) = message_edits::lock(&mut tx, scope, (message, author.get())).await? else {
            return Ok(None);
        };
        sqlx::query(
            "UPDATE messages
                SET text = coalesce($5, text), mentions = coalesce($6, mentions),
                    blocks = CASE WHEN $7 THEN $8::text::json ELSE blocks END,
                    metadata = coalesce($9::text::json, metadata)
              WHERE workspace_id = $1 AND message_id = $2 AND created_on = $3 AND agent_id = $4",
        )
        .bind(scope.workspace_id().get())
        .bind(message.get())
        .bind(day_of(message.get()))
        .bind(author.get())
        .bind(change.text.map(|(text, _)| text))
        .bind(change.text.map(|(_, mentions)| mentions))
        .bind(change.blocks.is_some())
        .bind(change.blocks.flatten().map(Value::to_string))
        .bind(change.metadata.map(Value::to_string))
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if change.text.is_some() {
            search_index::replace(&mut tx, scope.workspace_id().get(), message.get()).await?;
        }
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        // One statement later than the counter's lock wants, but only now the number is known; edits are rare.
        message_edits::keep(&mut tx, scope, message, recorded.first_seq, &replaced, at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }
}
