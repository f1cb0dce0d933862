//! Rows of messages, and their conversion into domain types.

use relay_domain::{
    JsonText,
    messages::{ListedMessage, Message, ReactionCount},
};
use sqlx::{FromRow, Row, postgres::PgRow, types::Json};

use crate::decode::{json_text, parse_column};

/// A message with the columns of its channel. Statements name the author's columns `author_id` and `author_name`,
/// because some of them also select the recipient.
pub(crate) struct MessageRow(pub(crate) Message);

impl FromRow<'_, PgRow> for MessageRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(Message {
            id: row.try_get("message_id")?,
            channel_id: row.try_get("channel_id")?,
            channel_name: row.try_get("channel_name")?,
            channel_kind: row.try_get("channel_type")?,
            conversation_id: row.try_get("conversation_id")?,
            agent_id: row.try_get("author_id")?,
            agent_name: row.try_get("author_name")?,
            agent_kind: row.try_get("agent_type")?,
            thread_id: row.try_get("thread_id")?,
            text: row.try_get("text")?,
            blocks: json_text(row, "blocks")?,
            metadata: json_text(row, "metadata")?.unwrap_or_else(JsonText::empty_object),
            attachments: row.try_get("attachments")?,
            mentions: row.try_get("mentions")?,
            // Messages store the mode by name, deliveries by code.
            mode: parse_column(row, "mode")?,
            content_type: row.try_get("content_type")?,
            created_at: row.try_get("created_at")?,
        }))
    }
}

pub(crate) struct ListedMessageRow(pub(crate) ListedMessage);

impl FromRow<'_, PgRow> for ListedMessageRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let Json(reactions): Json<Vec<ReactionCount>> = row.try_get("reactions")?;
        Ok(Self(ListedMessage {
            message: MessageRow::from_row(row)?.0,
            reply_count: row.try_get("reply_count")?,
            read_by_count: row.try_get("read_by_count")?,
            reactions,
        }))
    }
}
