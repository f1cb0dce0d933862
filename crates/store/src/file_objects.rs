//! The objects that files consist of, or were to consist of.
//!
//! An object's row is written before its first byte and goes after its last one, so that whatever dies in
//! between leaves nothing that no row names. The worker removes what is due.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{FileId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult};

/// The name of an object: workspace, file and upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub struct FileObject {
    /// The tenant.
    pub workspace_id: i64,
    /// The file.
    pub file_id: i64,
    /// The upload.
    pub object_id: i64,
}

impl Store {
    /// Notes that an object of a file is about to be written. It will be removed at `remove_after` unless
    /// the file takes it before. False when the file is not there, not pending, or its time is up.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn begin_upload(
        &self,
        scope: WorkspaceScope,
        file: FileId,
        object: i64,
        remove_after: DateTime<Utc>,
    ) -> StoreResult<bool> {
        let noted = sqlx::query(
            "INSERT INTO file_objects (workspace_id, file_id, object_id, remove_after)
             SELECT workspace_id, file_id, $3, $4 FROM files
              WHERE workspace_id = $1 AND file_id = $2 AND status = 'pending' AND expires_at > now()",
        )
        .bind(scope.workspace_id().get())
        .bind(file.get())
        .bind(object)
        .bind(remove_after)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("beginning an upload"))?;
        Ok(noted.rows_affected() == 1)
    }

    /// The file consists of this object from now on; one it consisted of before is removed soon. False
    /// when the file is no longer pending, or the object is being removed.
    ///
    /// # Errors
    /// When Postgres is away; nothing has changed then.
    pub async fn take_upload(&self, scope: WorkspaceScope, file: FileId, object: i64) -> StoreResult<bool> {
        let doing = "taking an upload";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let pending: Option<Option<i64>> = sqlx::query_scalar(
            "SELECT object_id FROM files
              WHERE workspace_id = $1 AND file_id = $2 AND status = 'pending' FOR UPDATE",
        )
        .bind(scope.workspace_id().get())
        .bind(file.get())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(former) = pending else { return Ok(false) };
        let kept = sqlx::query(
            "UPDATE file_objects SET remove_after = NULL
              WHERE workspace_id = $1 AND file_id = $2 AND object_id = $3 AND NOT removing",
        )
        .bind(scope.workspace_id().get())
        .bind(file.get())
        .bind(object)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if kept.rows_affected() == 0 {
            return Ok(false);
        }
        sqlx::query(
            "WITH former AS (
                UPDATE file_objects SET remove_after = now()
                 WHERE workspace_id = $1 AND file_id = $2 AND object_id = $4
             )
             UPDATE files SET object_id = $3 WHERE workspace_id = $1 AND file_id = $2",
        )
        .bind(scope.workspace_id().get())
        .bind(file.get())
        .bind(object)
        .bind(former)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(true)
    }

    /// An object will not be taken by its file: it is removed at the next occasion.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn drop_upload(&self, scope: WorkspaceScope, file: FileId, object: i64) -> StoreResult<()> {
        sqlx::query(
            "UPDATE file_objects SET remove_after = now()
              WHERE workspace_id = $1 AND file_id = $2 AND object_id = $3 AND remove_after IS NOT NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(file.get())
        .bind(object)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("dropping an upload"))?;
        Ok(())
    }

    /// Gives up to `limit` files up that were not complete `grace` after their time. Returns how many.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn give_up_files(&self, grace: Duration, limit: i64) -> StoreResult<u64> {
        let done: i64 = sqlx::query_scalar(
            "WITH late AS (
                SELECT workspace_id, file_id FROM files
                 WHERE status = 'pending' AND expires_at < now() - make_interval(secs => $1)
                 ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED
             ), given_up AS (
                UPDATE files f SET status = 'deleted', deleted_at = now() FROM late
                 WHERE f.workspace_id = late.workspace_id AND f.file_id = late.file_id
                RETURNING f.workspace_id, f.file_id
             ), objects AS (
                UPDATE file_objects o SET remove_after = now() FROM given_up g
                 WHERE o.workspace_id = g.workspace_id AND o.file_id = g.file_id AND o.remove_after IS NULL
             )
             SELECT count(*) FROM given_up",
        )
        .bind(grace.as_secs_f64())
        .bind(limit)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("giving files up"))?;
        Ok(done.unsigned_abs())
    }

    /// Up to `limit` objects that are due. For `claim` nobody else gets them; then they are due again.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn claim_due_objects(&self, claim: Duration, limit: i64) -> StoreResult<Vec<FileObject>> {
        sqlx::query_as(
            "WITH due AS (
                SELECT workspace_id, file_id, object_id FROM file_objects
                 WHERE remove_after < now() ORDER BY remove_after LIMIT $2 FOR UPDATE SKIP LOCKED
             )
             UPDATE file_objects o SET removing = true, remove_after = now() + make_interval(secs => $1)
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

    /// These objects are gone.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn forget_objects(&self, gone: &[FileObject]) -> StoreResult<()> {
        let workspaces: Vec<i64> = gone.iter().map(|object| object.workspace_id).collect();
        let files: Vec<i64> = gone.iter().map(|object| object.file_id).collect();
        let objects: Vec<i64> = gone.iter().map(|object| object.object_id).collect();
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
        .map_err(StoreError::from_sqlx("forgetting removed objects"))?;
        Ok(())
    }

    /// Forgets up to `limit` files deleted longer than `age` ago whose bytes are gone. Returns how many.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn prune_files(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM files f
              USING (SELECT workspace_id, file_id FROM files d
                      WHERE status = 'deleted' AND deleted_at < now() - make_interval(secs => $1)
                        AND NOT EXISTS (SELECT FROM file_objects o
                                         WHERE o.workspace_id = d.workspace_id AND o.file_id = d.file_id)
                      ORDER BY deleted_at LIMIT $2 FOR UPDATE SKIP LOCKED) AS old
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
