//! What is known of files. Their bytes are elsewhere: here is which object a file consists of, and
//! `file_objects` tells which objects there are at all (see `file_objects.rs`).

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, FileId, WorkspaceScope, event, observer::ObserverFilters};
use serde_json::json;
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    events::{self, NewEvent, Recorded},
    filters,
};

/// A file.
#[derive(Debug, Clone)]
pub struct FileRow {
    /// The file.
    pub file_id: FileId,
    /// What its owner calls it.
    pub filename: String,
    /// What its owner says it is.
    pub content_type: String,
    /// Its size, as declared; an upload has exactly this size.
    pub size_bytes: i64,
    /// Its owner.
    pub agent_id: AgentId,
    /// Its owner's name.
    pub uploaded_by: String,
    /// What became of it.
    pub status: FileStatus,
    /// The upload that it consists of.
    pub object_id: Option<i64>,
    /// When it was declared.
    pub created_at: DateTime<Utc>,
    /// Until when it must be complete.
    pub expires_at: DateTime<Utc>,
}

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileStatus {
    /// Declared; its bytes may be there or not.
    Pending,
    /// Its bytes are there and stay as they are.
    Complete,
    /// Deleted by its owner, or given up because it was never completed.
    Deleted,
}

impl FileStatus {
    /// The word on the wire and in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Complete => "complete",
            Self::Deleted => "deleted",
        }
    }
}

impl FromRow<'_, PgRow> for FileRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            file_id: FileId::new(row.try_get("file_id")?),
            filename: row.try_get("filename")?,
            content_type: row.try_get("content_type")?,
            size_bytes: row.try_get("size_bytes")?,
            agent_id: AgentId::new(row.try_get("agent_id")?),
            uploaded_by: row.try_get("uploaded_by")?,
            status: match row.try_get("status")? {
                "pending" => FileStatus::Pending,
                "complete" => FileStatus::Complete,
                _ => FileStatus::Deleted,
            },
            object_id: row.try_get("object_id")?,
            created_at: row.try_get("created_at")?,
            expires_at: row.try_get("expires_at")?,
        })
    }
}

/// A file to be declared.
#[derive(Debug)]
pub struct NewFile<'a> {
    /// Its id.
    pub file_id: FileId,
    /// What its owner calls it.
    pub filename: &'a str,
    /// What its owner says it is.
    pub content_type: &'a str,
    /// Its size.
    pub size_bytes: i64,
    /// Its owner.
    pub agent_id: AgentId,
    /// When it is declared.
    pub at: DateTime<Utc>,
    /// Until when it must be complete.
    pub expires_at: DateTime<Utc>,
}

/// What became of completing a file.
#[derive(Debug)]
pub enum Completion {
    /// It is complete from now on.
    Completed(FileRow, Recorded),
    /// It was complete before.
    AlreadyComplete(FileRow),
    /// Its bytes are not there.
    NotUploaded,
    /// The agent has no such file, or it is deleted.
    NotFound,
}

/// What became of deleting a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deletion {
    /// It is deleted; its bytes go soon.
    Deleted,
    /// It is another agent's.
    NotOwner,
    /// There is no such file, or it was deleted before.
    NotFound,
}

macro_rules! file {
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

impl Store {
    /// Declares a file. False when the files of the workspace would have more than `ceiling` bytes together.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn create_file(
        &self,
        scope: WorkspaceScope,
        new: &NewFile<'_>,
        ceiling: Option<i64>,
    ) -> StoreResult<bool> {
        let made = sqlx::query(
            "INSERT INTO files (workspace_id, file_id, filename, content_type, size_bytes, agent_id,
                                created_at, expires_at)
             SELECT $1, $2, $3, $4, $5, $6, $7, $8
              WHERE $9::bigint IS NULL
                 OR (SELECT coalesce(sum(size_bytes), 0) FROM files
                      WHERE workspace_id = $1 AND status <> 'deleted') + $5 <= $9",
        )
        .bind(scope.workspace_id().get())
        .bind(new.file_id.get())
        .bind(new.filename)
        .bind(new.content_type)
        .bind(new.size_bytes)
        .bind(new.agent_id.get())
        .bind(new.at)
        .bind(new.expires_at)
        .bind(ceiling)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("declaring a file"))?;
        Ok(made.rows_affected() == 1)
    }

    /// A file, deleted ones included.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn file(&self, scope: WorkspaceScope, file: FileId) -> StoreResult<Option<FileRow>> {
        sqlx::query_as(file!("WHERE f.workspace_id = $1 AND f.file_id = $2"))
            .bind(scope.workspace_id().get())
            .bind(file.get())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a file"))
    }

    /// Complete files that the filters show, newest first; with `owner` only that agent's.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn files(
        &self,
        scope: WorkspaceScope,
        owner: Option<AgentId>,
        filters: &ObserverFilters,
        limit: i64,
    ) -> StoreResult<Vec<FileRow>> {
        let query = match owner {
            Some(_) => sqlx::query_as(file!(
                "WHERE f.workspace_id = $1 AND f.status = 'complete' AND f.agent_id = $5
                   AND ($3::bigint[] IS NULL OR f.agent_id = ANY($3)) AND f.created_at >= $4
                 ORDER BY f.file_id DESC LIMIT $2"
            )),
            None => sqlx::query_as(file!(
                "WHERE f.workspace_id = $1 AND f.status = 'complete'
                   AND ($3::bigint[] IS NULL OR f.agent_id = ANY($3)) AND f.created_at >= $4
                 ORDER BY f.file_id DESC LIMIT $2"
            )),
        };
        let query = query
            .bind(scope.workspace_id().get())
            .bind(limit)
            .bind(filters::agent_ids(filters))
            .bind(filters::not_before(filters).0);
        match owner {
            Some(owner) => query.bind(owner.get()).fetch_all(&self.pool).await,
            None => query.fetch_all(&self.pool).await,
        }
        .map_err(StoreError::from_sqlx("listing files"))
    }

    /// Those of these files that are complete, in no order.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn complete_files(&self, scope: WorkspaceScope, files: &[FileId]) -> StoreResult<Vec<FileRow>> {
        let ids: Vec<i64> = files.iter().map(|file| file.get()).collect();
        sqlx::query_as(file!("WHERE f.workspace_id = $1 AND f.file_id = ANY($2) AND f.status = 'complete'"))
            .bind(scope.workspace_id().get())
            .bind(ids)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading attached files"))
    }

    /// Makes a file complete: from now on it can be attached and downloaded, and does not change.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn complete_file(
        &self,
        scope: WorkspaceScope,
        file: FileId,
        owner: AgentId,
        at: DateTime<Utc>,
    ) -> StoreResult<Completion> {
        let doing = "completing a file";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let row: Option<FileRow> =
            sqlx::query_as(file!("WHERE f.workspace_id = $1 AND f.file_id = $2 FOR UPDATE OF f"))
                .bind(scope.workspace_id().get())
                .bind(file.get())
                .fetch_optional(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        let Some(mut row) = row else { return Ok(Completion::NotFound) };
        match row.status {
            FileStatus::Deleted => return Ok(Completion::NotFound),
            _ if row.agent_id != owner => return Ok(Completion::NotFound),
            FileStatus::Complete => return Ok(Completion::AlreadyComplete(row)),
            FileStatus::Pending if row.object_id.is_none() => return Ok(Completion::NotUploaded),
            FileStatus::Pending => {}
        }
        sqlx::query(
            "UPDATE files SET status = 'complete', completed_at = $3
              WHERE workspace_id = $1 AND file_id = $2 AND status = 'pending'",
        )
        .bind(scope.workspace_id().get())
        .bind(file.get())
        .bind(at)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        row.status = FileStatus::Complete;
        let uploaded = json!({
            "file": { "file_id": file, "filename": row.filename, "uploaded_by": row.uploaded_by },
            "agent_id": owner,
        });
        let event = NewEvent::new(event::FILE_UPLOADED, uploaded).by(owner);
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Completion::Completed(row, recorded))
    }

    /// Deletes a file and lets its bytes go.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn delete_file(
        &self,
        scope: WorkspaceScope,
        file: FileId,
        owner: AgentId,
        at: DateTime<Utc>,
    ) -> StoreResult<Deletion> {
        let doing = "deleting a file";
        let found: Option<(i64, bool)> = sqlx::query_as(
            "WITH found AS (
                SELECT workspace_id, file_id, agent_id FROM files
                 WHERE workspace_id = $1 AND file_id = $2 AND status <> 'deleted' FOR UPDATE
             ), deleted AS (
                UPDATE files f SET status = 'deleted', deleted_at = $4 FROM found
                 WHERE f.workspace_id = found.workspace_id AND f.file_id = found.file_id AND f.agent_id = $3
                RETURNING f.workspace_id, f.file_id
             ), objects AS (
                UPDATE file_objects o SET remove_after = now() FROM deleted
                 WHERE o.workspace_id = deleted.workspace_id AND o.file_id = deleted.file_id
             )
             SELECT agent_id, EXISTS (SELECT FROM deleted) FROM found",
        )
        .bind(scope.workspace_id().get())
        .bind(file.get())
        .bind(owner.get())
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
