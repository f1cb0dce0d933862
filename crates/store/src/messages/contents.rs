//! Contents of listed messages, read apart from the lists: a list decides on its rows and knows their sizes, then reads
//! the contents of a few rows at a time.

use std::collections::HashMap;

use chrono::NaiveDate;
use const_format::formatcp;
use relay_domain::{JsonText, MessageId, WorkspaceScope};
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    decode::{decode_row, json_text, to_count},
    messages::days::{MESSAGES_BY_KEY, day_of_id},
};

/// Row without its contents, and an upper bound of their bytes (`content_bytes`).
pub(crate) struct SizedRow<T>(pub(crate) T, pub(crate) usize);

impl<'r, T: FromRow<'r, PgRow>> FromRow<'r, PgRow> for SizedRow<T> {
    fn from_row(row: &'r PgRow) -> sqlx::Result<Self> {
        let bytes: Option<i64> = row.try_get("content_bytes")?;
        // A row without contents has no size.
        let bytes = bytes.map(|bytes| to_count("content_bytes", bytes)).transpose()?.unwrap_or(0);
        Ok(Self(T::from_row(row)?, bytes))
    }
}

/// Decodes rows of `table` with their sizes.
pub(crate) fn decode_sized<T: for<'r> FromRow<'r, PgRow>>(
    table: &'static str,
    rows: &[PgRow],
) -> StoreResult<Vec<(T, usize)>> {
    rows.iter().map(|row| decode_row(table, row).map(|SizedRow(row, bytes)| (row, bytes))).collect()
}

/// Returns the days of these messages, which bound the partitions that a statement opens.
pub(crate) fn days_of(ids: &[MessageId]) -> Vec<NaiveDate> {
    ids.iter().map(|id| day_of_id(id.get())).collect()
}

impl Store {
    /// Reads the texts of these messages. Removed messages are left out.
    pub async fn message_texts(
        &self,
        scope: WorkspaceScope,
        ids: &[MessageId],
    ) -> StoreResult<HashMap<MessageId, String>> {
        if ids.is_empty() {
            return Ok(HashMap::new());
        }
        let rows: Vec<(MessageId, String)> = sqlx::query_as(formatcp!(
            "SELECT m.message_id, m.text
               FROM unnest($2::bigint[], $3::date[]) AS k (message_id, created_on) {MESSAGES_BY_KEY}"
        ))
        .bind(scope.workspace_id())
        .bind(ids)
        .bind(days_of(ids))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the texts of messages"))?;
        Ok(rows.into_iter().collect())
    }

    /// Reads the first `chars` characters of the texts of these messages. Removed messages are left out.
    pub async fn beginnings_of_texts(
        &self,
        scope: WorkspaceScope,
        ids: &[MessageId],
        chars: i32,
    ) -> StoreResult<HashMap<MessageId, String>> {
        if ids.is_empty() {
            return Ok(HashMap::new());
        }
        let rows: Vec<(MessageId, String)> = sqlx::query_as(formatcp!(
            "SELECT m.message_id, left(m.text, $4)
               FROM unnest($2::bigint[], $3::date[]) AS k (message_id, created_on) {MESSAGES_BY_KEY}"
        ))
        .bind(scope.workspace_id())
        .bind(ids)
        .bind(days_of(ids))
        .bind(chars)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the beginnings of texts"))?;
        Ok(rows.into_iter().collect())
    }

    /// Reads the texts and the metadata of these messages. Removed messages are left out.
    pub async fn message_texts_and_metadata(
        &self,
        scope: WorkspaceScope,
        ids: &[MessageId],
    ) -> StoreResult<HashMap<MessageId, (String, JsonText)>> {
        let rows = sqlx::query(formatcp!(
            "SELECT m.message_id, m.text, m.metadata
               FROM unnest($2::bigint[], $3::date[]) AS k (message_id, created_on) {MESSAGES_BY_KEY}"
        ))
        .bind(scope.workspace_id())
        .bind(ids)
        .bind(days_of(ids))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the texts and the metadata of messages"))?;
        let found = rows.into_iter().map(|row| decode_row::<TextAndMetadata>("messages", &row));
        found.map(|row| row.map(|row| (row.message_id, (row.text, row.metadata)))).collect()
    }
}

struct TextAndMetadata {
    message_id: MessageId,
    text: String,
    metadata: JsonText,
}

impl FromRow<'_, PgRow> for TextAndMetadata {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            message_id: row.try_get("message_id")?,
            text: row.try_get("text")?,
            metadata: json_text(row, "metadata")?.unwrap_or_else(JsonText::empty_object),
        })
    }
}
