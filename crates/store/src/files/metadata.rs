//! File metadata and the lifecycle of a file: declared, uploaded, complete, deleted. A file refers to the object with
//! its content; `files::objects` has all objects.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, FileId, WorkspaceScope,
    events::kind,
    files::{File, FileStatus},
    observers::ObserverView,
};
use relay_wire::{
    events::recorded_data::{FileUploaded, UploadedFile},
    field::ToValue as _,
};

use sqlx::{Postgres, postgres::PgArguments, query::Query};

use crate::{
    Store, StoreError, StoreResult,
    decode::{decode_row, decode_rows},
    events::{self, Event, RecordedEvents},
    observers::filters,
};

#[derive(Debug)]
pub struct NewFile<'a> {
    pub file_id: FileId,
    pub filename: &'a str,
    pub content_type: &'a str,
    pub size_bytes: i64,
    pub agent_id: AgentId,
    pub at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
}

/// Outcome of completing a file.
#[derive(Debug)]
pub enum Completion {
    Completed(File, RecordedEvents),
    AlreadyComplete(File),
    NotUploaded,
    /// Unknown or deleted, or owned by another agent.
    NotFound,
}

/// Outcome of deleting a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deletion {
    /// Deleted; the worker removes its objects soon.
    Deleted,
    /// Owned by another agent.
    NotOwner,
    /// Unknown, or deleted before.
    NotFound,
}

macro_rules! select_files {
    ($rest:literal) => {
        concat!(
            "SELECT f.file_id, f.filename, f.content_type, f.size_bytes, f.agent_id, f.status, f.object_id,
                    f.created_at, f.expires_at, coalesce(a.name, '') AS uploaded_by
               FROM files f
               LEFT JOIN agents a ON a.workspace_id = f.workspace_id AND a.agent_id = f.agent_id ",
            $rest
        )
    };
}

/// Condition that a file is attached to a message that an observer sees. The file is `f`; the parameters from `$6` on
/// are those of [`bind_view`].
// The day of the message keeps the join within one partition.
macro_rules! is_attached_to_visible {
    () => {
        "EXISTS (SELECT FROM file_attachments t
                   JOIN messages m ON m.workspace_id = t.workspace_id AND m.message_id = t.message_id
                                  AND m.created_on = t.created_on
                   JOIN channels c ON c.workspace_id = m.workspace_id AND c.channel_id = m.channel_id
                  WHERE t.workspace_id = f.workspace_id AND t.file_id = f.file_id
                    AND ($3::bigint[] IS NULL OR m.agent_id = ANY ($3)) AND m.created_at >= $4
                    AND CASE WHEN c.conversation_id IS NULL
                             THEN NOT $7 OR c.channel_id = ANY ($8) OR c.name = ANY ($9)
                             ELSE $10 AND ($11::text[] IS NULL OR c.conversation_id = ANY ($11)) END)"
    };
}

/// List of complete files under a condition on their owner.
macro_rules! visible_files {
    ($owner:literal) => {
        concat!(
            select_files!("WHERE f.workspace_id = $1 AND f.status = 'complete' AND "),
            $owner,
            " AND ($3::bigint[] IS NULL OR f.agent_id = ANY($3)) AND f.created_at >= $4 AND ($6 OR ",
            is_attached_to_visible!(),
            ") ORDER BY f.file_id DESC LIMIT $2"
        )
    };
}

/// Binds the parameters `$6` to `$11`: whether only a part of the messages is visible, and which part.
fn bind_view<'q>(query: Query<'q, Postgres, PgArguments>, view: &'q ObserverView) -> Query<'q, Postgres, PgArguments> {
    let filters = &view.filters;
    query
        .bind(view.sees_every_message_place())
        .bind(filters.limits_channels())
        .bind(filters::channel_ids(filters))
        .bind(filters.channel_names.as_deref())
        .bind(view.sees_direct_messages())
        .bind(filters.dm_conversation_ids.as_deref())
}

impl Store {
    /// Declares a file. Returns false when the files of the workspace would exceed `quota` bytes in total. Concurrent
    /// declarations do not lock each other, so together they may exceed it.
    pub async fn create_file(&self, scope: WorkspaceScope, new: &NewFile<'_>, quota: Option<i64>) -> StoreResult<bool> {
        let created = sqlx::query(
            "INSERT INTO files (workspace_id, file_id, filename, content_type, size_bytes, agent_id,
                                created_at, expires_at)
             SELECT $1, $2, $3, $4, $5, $6, $7, $8
              WHERE $9::bigint IS NULL
                 OR (SELECT coalesce(sum(size_bytes), 0) FROM files
                      WHERE workspace_id = $1 AND status <> 'deleted') + $5 <= $9",
        )
        .bind(scope.workspace_id())
        .bind(new.file_id)
        .bind(new.filename)
        .bind(new.content_type)
        .bind(new.size_bytes)
        .bind(new.agent_id)
        .bind(new.at)
        .bind(new.expires_at)
        .bind(quota)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("declaring a file"))?;
        Ok(created.rows_affected() == 1)
    }

    /// Reads a file, deleted or not.
    pub async fn file(&self, scope: WorkspaceScope, file: FileId) -> StoreResult<Option<File>> {
        let row = sqlx::query(select_files!("WHERE f.workspace_id = $1 AND f.file_id = $2"))
            .bind(scope.workspace_id())
            .bind(file)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a file"))?;
        row.map(|row| decode_row("files", &row)).transpose()
    }

    /// Returns whether a file is attached to a message that an observer sees.
    pub async fn is_attached_to_visible(
        &self,
        scope: WorkspaceScope,
        file: FileId,
        view: &ObserverView,
    ) -> StoreResult<bool> {
        let query = sqlx::query(concat!(
            "SELECT $6 OR ",
            is_attached_to_visible!(),
            " AS visible FROM files f WHERE f.workspace_id = $1 AND f.file_id = $2 AND $5"
        ))
        .bind(scope.workspace_id())
        .bind(file)
        .bind(filters::agent_ids(&view.filters))
        .bind(filters::not_before(&view.filters).0)
        // Lists have their owner in `$5`. Here it is a condition that always holds, so that the numbers of `bind_view`
        // fit.
        .bind(true);
        let row = bind_view(query, view).fetch_optional(&self.pool).await;
        let row = row.map_err(StoreError::from_sqlx("reading the messages of a file"))?;
        row.map_or(Ok(false), |row| decode_row::<(bool,)>("files", &row).map(|(visible,)| visible))
    }

    /// Lists complete files that an observer sees, newest first; with `owner`, only files of that agent.
    pub async fn files(
        &self,
        scope: WorkspaceScope,
        owner: Option<AgentId>,
        view: &ObserverView,
        limit: i64,
    ) -> StoreResult<Vec<File>> {
        // Two statements: with one, a generic plan could not use the index by owner.
        let query = match owner {
            Some(_) => sqlx::query(visible_files!("f.agent_id = $5")),
            None => sqlx::query(visible_files!("$5::bigint IS NULL")),
        };
        let query = query
            .bind(scope.workspace_id())
            .bind(limit)
            .bind(filters::agent_ids(&view.filters))
            .bind(filters::not_before(&view.filters).0)
            .bind(owner);
        let rows = bind_view(query, view).fetch_all(&self.pool).await;
        decode_rows("files", &rows.map_err(StoreError::from_sqlx("listing files"))?)
    }

    /// Reads the complete files among `files`, in no order.
    pub async fn completed_files(&self, scope: WorkspaceScope, files: &[FileId]) -> StoreResult<Vec<File>> {
        let rows =
            sqlx::query(select_files!("WHERE f.workspace_id = $1 AND f.file_id = ANY($2) AND f.status = 'complete'"))
                .bind(scope.workspace_id())
                .bind(files)
                .fetch_all(&self.pool)
                .await
                .map_err(StoreError::from_sqlx("reading attached files"))?;
        decode_rows("files", &rows)
    }

    /// Completes a file, which makes it immutable and ready to attach and download. Its row is locked against a
    /// concurrent upload or deletion.
    pub async fn complete_file(
        &self,
        scope: WorkspaceScope,
        file: FileId,
        owner: AgentId,
        at: DateTime<Utc>,
    ) -> StoreResult<Completion> {
        let doing = "completing a file";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let row = sqlx::query(select_files!("WHERE f.workspace_id = $1 AND f.file_id = $2 FOR UPDATE OF f"))
            .bind(scope.workspace_id())
            .bind(file)
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(Completion::NotFound) };
        let mut row: File = decode_row("files", &row)?;
        match row.status {
            FileStatus::Deleted => return Ok(Completion::NotFound),
            // Before the states: another agent does not learn whether the file is complete.
            FileStatus::Pending | FileStatus::Complete if row.agent_id != owner => return Ok(Completion::NotFound),
            FileStatus::Complete => return Ok(Completion::AlreadyComplete(row)),
            FileStatus::Pending if row.object_id.is_none() => return Ok(Completion::NotUploaded),
            FileStatus::Pending => {}
        }
        sqlx::query(
            "UPDATE files SET status = 'complete', completed_at = $3
              WHERE workspace_id = $1 AND file_id = $2 AND status = 'pending'",
        )
        .bind(scope.workspace_id())
        .bind(file)
        .bind(at)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        row.status = FileStatus::Complete;
        let uploaded = FileUploaded {
            file: UploadedFile { file_id: file, filename: &row.filename, uploaded_by: &row.uploaded_by },
            agent_id: owner,
        };
        let event = Event::new(kind::FILE_UPLOADED, uploaded.to_value()).by_agent(owner);
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Completion::Completed(row, recorded))
    }

    /// Deletes a file and schedules the removal of its objects.
    pub async fn delete_file(
        &self,
        scope: WorkspaceScope,
        file: FileId,
        owner: AgentId,
        at: DateTime<Utc>,
    ) -> StoreResult<Deletion> {
        let doing = "deleting a file";
        // One statement, so that no object is left without a removal date when the process stops in between.
        let found: Option<(AgentId, bool)> = sqlx::query_as(
            "WITH found AS (
                SELECT workspace_id, file_id, agent_id FROM files
                 WHERE workspace_id = $1 AND file_id = $2 AND status <> 'deleted' FOR UPDATE
             ), deleted AS (
                UPDATE files f SET status = 'deleted', deleted_at = $4 FROM found
                 WHERE f.workspace_id = found.workspace_id AND f.file_id = found.file_id AND f.agent_id = $3
                RETURNING f.workspace_id, f.file_id
             ), objects AS (
                UPDATE file_objects o SET remove_after = relay_now() FROM deleted
                 WHERE o.workspace_id = deleted.workspace_id AND o.file_id = deleted.file_id
             )
             SELECT agent_id, EXISTS (SELECT FROM deleted) FROM found",
        )
        .bind(scope.workspace_id())
        .bind(file)
        .bind(owner)
        .bind(at)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        Ok(match found {
            None => Deletion::NotFound,
            Some((_, true)) => Deletion::Deleted,
            Some((_, false)) => Deletion::NotOwner,
        })
    }
}
