//! Stored objects: the contents of files, one object per upload.
//!
//! The row of an object is written before its first byte and deleted after its last one, so that a process that
//! stops in between never leaves an object without a row. The worker removes objects that are due.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{FileId, FileObjectId, WorkspaceId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult};

/// Key of an object: workspace, file and upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub struct FileObject {
    pub workspace_id: WorkspaceId,
    pub file_id: FileId,
    pub object_id: FileObjectId,
}

impl Store {
    /// Records an object before it is written. It is removed at `remove_after` unless it is attached before. Returns
    /// false when the file is unknown, not pending, or expired.
    pub async fn begin_upload(
        &self,
        scope: WorkspaceScope,
        file: FileId,
        object: FileObjectId,
        remove_after: DateTime<Utc>,
    ) -> StoreResult<bool> {
        let recorded = sqlx::query(
            // From `files`, so that no object is recorded for a file that is gone or complete.
            "INSERT INTO file_objects (workspace_id, file_id, object_id, remove_after)
             SELECT workspace_id, file_id, $3, $4 FROM files
              WHERE workspace_id = $1 AND file_id = $2 AND status = 'pending' AND expires_at > relay_now()",
        )
        .bind(scope.workspace_id())
        .bind(file)
        .bind(object)
        .bind(remove_after)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("beginning an upload"))?;
        Ok(recorded.rows_affected() == 1)
    }

    /// Makes an object the content of its file; the previous object is removed soon. Returns false when the file is
    /// no longer pending, or the object is being removed.
    pub async fn attach_upload(&self, scope: WorkspaceScope, file: FileId, object: FileObjectId) -> StoreResult<bool> {
        let doing = "attaching an upload";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let pending: Option<Option<FileObjectId>> = sqlx::query_scalar(
            "SELECT object_id FROM files
              WHERE workspace_id = $1 AND file_id = $2 AND status = 'pending' FOR UPDATE",
        )
        .bind(scope.workspace_id())
        .bind(file)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(former) = pending else { return Ok(false) };
        // The file's row lock makes concurrent uploads of one file take turns: the last one is its content.
        // `NOT removing`: the worker may already be deleting an upload that took too long.
        let kept = sqlx::query(
            "UPDATE file_objects SET remove_after = NULL
              WHERE workspace_id = $1 AND file_id = $2 AND object_id = $3 AND NOT removing",
        )
        .bind(scope.workspace_id())
        .bind(file)
        .bind(object)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if kept.rows_affected() == 0 {
            return Ok(false);
        }
        sqlx::query(
            "WITH former AS (
                UPDATE file_objects SET remove_after = relay_now()
                 WHERE workspace_id = $1 AND file_id = $2 AND object_id = $4
             )
             UPDATE files SET object_id = $3 WHERE workspace_id = $1 AND file_id = $2",
        )
        .bind(scope.workspace_id())
        .bind(file)
        .bind(object)
        .bind(former)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(true)
    }

    /// Schedules the removal of an object that is not attached to its file.
    pub async fn discard_upload(&self, scope: WorkspaceScope, file: FileId, object: FileObjectId) -> StoreResult<()> {
        sqlx::query(
            "UPDATE file_objects SET remove_after = relay_now()
              WHERE workspace_id = $1 AND file_id = $2 AND object_id = $3 AND remove_after IS NOT NULL
              -- An attached object has no removal date, and a late discard must not give it one.",
        )
        .bind(scope.workspace_id())
        .bind(file)
        .bind(object)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("discarding an upload"))?;
        Ok(())
    }

    /// Deletes up to `limit` files that were not complete `grace` after their expiry. Returns the number deleted.
    pub async fn expire_pending_files(&self, grace: Duration, limit: i64) -> StoreResult<u64> {
        // Only attached objects get a date: an upload in progress keeps the one that it was begun with.
        let done: i64 = sqlx::query_scalar(
            "WITH late AS (
                SELECT workspace_id, file_id FROM files
                 WHERE status = 'pending' AND expires_at < relay_now() - make_interval(secs => $1)
                 ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED
             ), expired AS (
                UPDATE files f SET status = 'deleted', deleted_at = relay_now() FROM late
                 WHERE f.workspace_id = late.workspace_id AND f.file_id = late.file_id
                RETURNING f.workspace_id, f.file_id
             ), objects AS (
                UPDATE file_objects o SET remove_after = relay_now() FROM expired g
                 WHERE o.workspace_id = g.workspace_id AND o.file_id = g.file_id AND o.remove_after IS NULL
             )
             SELECT count(*) FROM expired",
        )
        .bind(grace.as_secs_f64())
        .bind(limit)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("expiring pending files"))?;
        Ok(done.unsigned_abs())
    }

    /// Claims up to `limit` objects that are due for removal. No other worker gets them for the duration of `claim`;
    /// then they are due again. `removing` is final: such an object can no longer be attached.
    pub async fn claim_due_objects(&self, claim: Duration, limit: i64) -> StoreResult<Vec<FileObject>> {
        sqlx::query_as(
            // SKIP LOCKED: several workers remove objects at the same time.
            "WITH due AS (
                SELECT workspace_id, file_id, object_id FROM file_objects
                 WHERE remove_after < relay_now() ORDER BY remove_after LIMIT $2 FOR UPDATE SKIP LOCKED
             )
             UPDATE file_objects o SET removing = true, remove_after = relay_now() + make_interval(secs => $1)
               FROM due
              WHERE o.workspace_id = due.workspace_id AND o.file_id = due.file_id AND o.object_id = due.object_id
             RETURNING o.workspace_id, o.file_id, o.object_id",
        )
        .bind(claim.as_secs_f64())
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("claiming objects to remove"))
    }

    /// Deletes the rows of objects whose bytes have been removed.
    pub async fn delete_objects(&self, removed: &[FileObject]) -> StoreResult<()> {
        let workspaces: Vec<WorkspaceId> = removed.iter().map(|object| object.workspace_id).collect();
        let files: Vec<FileId> = removed.iter().map(|object| object.file_id).collect();
        let objects: Vec<FileObjectId> = removed.iter().map(|object| object.object_id).collect();
        sqlx::query(
            "DELETE FROM file_objects o
              USING unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, file_id, object_id)
              WHERE o.workspace_id = k.workspace_id AND o.file_id = k.file_id AND o.object_id = k.object_id
                AND o.removing",
        )
        .bind(workspaces)
        .bind(files)
        .bind(objects)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("deleting removed objects"))?;
        Ok(())
    }

    /// Removes the rows of up to `limit` files that were deleted more than `age` ago and have no objects left. Returns
    /// the number removed.
    pub async fn prune_files(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "WITH old AS (
                SELECT workspace_id, file_id FROM files d
                 WHERE status = 'deleted' AND deleted_at < relay_now() - make_interval(secs => $1)
                   AND NOT EXISTS (SELECT FROM file_objects o
                                    WHERE o.workspace_id = d.workspace_id AND o.file_id = d.file_id)
                 ORDER BY deleted_at LIMIT $2 FOR UPDATE SKIP LOCKED
             ), attachments AS (
                DELETE FROM file_attachments t USING old
                 WHERE t.workspace_id = old.workspace_id AND t.file_id = old.file_id
             )
             DELETE FROM files f USING old
              WHERE f.workspace_id = old.workspace_id AND f.file_id = old.file_id",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning files"))?;
        Ok(done.rows_affected())
    }
}
