//! Everything that a workspace has: written out, or removed for good, with a count of what is left.
//!
//! The tables are found by the catalog, so that one that a later version adds is neither forgotten in an export nor left behind.

use std::time::Duration;

use chrono::{DateTime, Utc};
use futures::TryStreamExt as _;
use relay_domain::{WorkspaceId, WorkspaceScope};
use sqlx::AssertSqlSafe;

use crate::{Store, StoreError, StoreResult};

/// Rows removed by one statement.
const BATCH: i64 = 5_000;
/// The table of workspaces themselves: an erasure that was cut off is found and repeated by the row there, so it goes last.
pub const OWN_TABLE: &str = "workspaces";
/// Keys and hashes, and what only the engine can use.
const NOT_EXPORTED: [&str; 5] = ["tokens", "idempotency_keys", "rate_budgets", "message_search", "usage_floors"];

/// What was removed from one table.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Erased {
    /// The table, a partition's parent for partitions.
    pub table: String,
    /// Rows removed.
    pub rows: u64,
}

/// A row of an export.
#[derive(Debug)]
pub struct ExportedRow<'a> {
    /// Its table.
    pub table: &'a str,
    /// The row as JSON.
    pub row: &'a str,
    /// How many rows there were up to it, itself counted.
    pub nth: u64,
    /// How many there are.
    pub of: u64,
}

/// A workspace that ended long ago.
#[derive(Debug)]
pub struct EndedWorkspace {
    /// Which.
    pub scope: WorkspaceScope,
    /// When it expired, if it has yet to be deleted.
    pub expired_at: Option<DateTime<Utc>>,
}

/// What a step of an erasure did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EraseStep {
    /// Rows removed.
    pub removed: u64,
    /// Whether nothing is left, its own row included.
    pub gone: bool,
}

/// A table with a tenant's rows.
#[derive(Debug, sqlx::FromRow)]
struct TenantTable {
    /// Quoted, for a statement.
    quoted: String,
    /// Its own name, or its parent's.
    shown: String,
}

impl Store {
    /// Calls `each` with each row of the workspace, in one snapshot of the database. Tokens, keys of repeated requests and the search index
    /// are left out.
    ///
    /// # Errors
    /// When Postgres does not answer, or `each` fails: with its error.
    pub async fn export_workspace<E: From<StoreError>>(
        &self,
        scope: WorkspaceScope,
        mut each: impl FnMut(&ExportedRow<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let doing = "exporting a workspace";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        sqlx::query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let mut tables = tables(&mut *tx, "NOT c.relispartition").await?;
        tables.retain(|table| !NOT_EXPORTED.contains(&table.shown.as_str()));
        let (mut nth, mut of) = (0, 0);
        for table in &tables {
            of += count(&mut *tx, table, scope).await?;
        }
        for table in &tables {
            let query = format!("SELECT row_to_json(t)::text FROM {} t WHERE workspace_id = $1", table.quoted);
            let mut rows =
                sqlx::query_scalar::<_, String>(AssertSqlSafe(query)).bind(scope.workspace_id().get()).fetch(&mut *tx);
            while let Some(row) = rows.try_next().await.map_err(StoreError::from_sqlx(doing))? {
                nth += 1;
                each(&ExportedRow { table: &table.shown, row: &row, nth, of })?;
            }
        }
        Ok(())
    }

    /// Whether the workspace is deleted: its tokens are dead, and nothing new is written for it.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn is_deleted(&self, scope: WorkspaceScope) -> StoreResult<Option<bool>> {
        sqlx::query_scalar("SELECT deleted_at IS NOT NULL FROM workspaces WHERE workspace_id = $1")
            .bind(scope.workspace_id().get())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a workspace"))
    }

    /// Files of the workspace whose bytes a worker has yet to remove. Their rows name the bytes, so they must go last.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn file_objects_left(&self, scope: WorkspaceScope) -> StoreResult<i64> {
        sqlx::query_scalar("SELECT count(*) FROM file_objects WHERE workspace_id = $1")
            .bind(scope.workspace_id().get())
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("counting the bytes of files"))
    }

    /// Removes every row of a workspace but its own, in batches, and calls `each` with how many tables are done, and of how many. Safe to
    /// repeat; what is removed stays removed if it is cut off.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn erase_workspace(
        &self,
        scope: WorkspaceScope,
        mut each: impl FnMut(u64, u64),
    ) -> StoreResult<Vec<Erased>> {
        let mut erased: Vec<Erased> = Vec::new();
        let mut tables = self.tables_with_rows().await?;
        tables.retain(|table| table.shown != OWN_TABLE);
        let of = tables.len() as u64;
        for (table, done) in tables.into_iter().zip(1..) {
            let mut rows = 0;
            loop {
                let removed = self.erase_batch(scope, &table).await?;
                rows += removed;
                if removed == 0 {
                    break;
                }
            }
            match erased.iter_mut().find(|known| known.table == table.shown) {
                Some(known) => known.rows += rows,
                None => erased.push(Erased { table: table.shown, rows }),
            }
            each(done, of);
        }
        Ok(erased)
    }

    /// Removes a deleted workspace's own row, after which nothing tells that it was there. Returns how many rows that were.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn erase_own_row(&self, scope: WorkspaceScope) -> StoreResult<u64> {
        let done = sqlx::query("DELETE FROM workspaces WHERE workspace_id = $1 AND deleted_at IS NOT NULL")
            .bind(scope.workspace_id().get())
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("erasing a workspace"))?;
        Ok(done.rows_affected())
    }

    /// The workspace that ended first, if that is longer ago than `age`: by being deleted, or else by expiring. Left out are those that
    /// expired while suspended, those with files whose bytes a worker has yet to remove, and those with observer tokens whose signature
    /// still verifies: only their rows say that they are dead.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn ended_workspace(&self, age: Duration) -> StoreResult<Option<EndedWorkspace>> {
        let found: Option<(i64, Option<DateTime<Utc>>)> = sqlx::query_as(
            "SELECT w.workspace_id, CASE WHEN w.deleted_at IS NULL THEN w.expires_at END
               FROM workspaces w
              WHERE coalesce(w.deleted_at, w.expires_at) < now() - make_interval(secs => $1)
                AND (w.deleted_at IS NOT NULL OR w.suspended_at IS NULL)
                AND (w.deleted_at IS NULL OR NOT EXISTS (
                     SELECT FROM file_objects o WHERE o.workspace_id = w.workspace_id))
                -- As the pruning of observer tokens has it.
                AND (w.deleted_at IS NULL OR NOT EXISTS (
                     SELECT FROM observer_tokens t
                      WHERE t.workspace_id = w.workspace_id AND t.signed_until >= now() - interval '1 day'
                        AND (w.deleted_at < (SELECT min(created_at) FROM signing_keys WHERE retired_at IS NULL))
                            IS NOT TRUE))
              ORDER BY coalesce(w.deleted_at, w.expires_at) LIMIT 1",
        )
        .bind(age.as_secs_f64())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for a workspace that ended"))?;
        Ok(found.map(|(workspace, expired_at)| EndedWorkspace {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(workspace)),
            expired_at,
        }))
    }

    /// Removes about `limit` rows of a deleted workspace. Its own row goes with the step that finds no other. Safe to repeat, and to be done
    /// by several at once.
    ///
    /// # Errors
    /// When Postgres does not answer; what was removed stays removed.
    pub async fn erase_some(&self, scope: WorkspaceScope, limit: u64) -> StoreResult<EraseStep> {
        let mut removed = 0;
        let mut tables = self.tables_with_rows().await?;
        tables.retain(|table| table.shown != OWN_TABLE);
        for table in &tables {
            loop {
                let batch = self.erase_batch(scope, table).await?;
                removed += batch;
                if removed >= limit {
                    return Ok(EraseStep { removed, gone: false });
                }
                if batch == 0 {
                    break;
                }
            }
        }
        if removed > 0 {
            return Ok(EraseStep { removed, gone: false });
        }
        let removed = self.erase_own_row(scope).await?;
        Ok(EraseStep { removed, gone: removed > 0 })
    }

    /// Counts what is left of a workspace in each table that could hold something of it, partitions one by one.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn rows_left(&self, scope: WorkspaceScope) -> StoreResult<Vec<Erased>> {
        let tables = self.tables_with_rows().await?;
        let mut left = Vec::new();
        for table in &tables {
            left.push(Erased { table: table.quoted.clone(), rows: count(&self.pool, table, scope).await? });
        }
        Ok(left)
    }

    /// Removes up to [`BATCH`] rows from one table. Returns how many.
    async fn erase_batch(&self, scope: WorkspaceScope, table: &TenantTable) -> StoreResult<u64> {
        // By place, so that each batch reads what it removes and nothing else. A batch is a transaction of its own.
        let query = format!(
            "DELETE FROM {0} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {0} WHERE workspace_id = $1 LIMIT $2))",
            table.quoted
        );
        let done = sqlx::query(AssertSqlSafe(query))
            .bind(scope.workspace_id().get())
            .bind(BATCH)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("erasing a workspace"))?;
        Ok(done.rows_affected())
    }

    /// The tables that hold rows themselves: partitions in place of their parents.
    async fn tables_with_rows(&self) -> StoreResult<Vec<TenantTable>> {
        tables(&self.pool, "c.relkind = 'r'").await
    }
}

/// Tables with a column `workspace_id` that meet a condition on `pg_class c`, by name.
async fn tables<'c>(executor: impl sqlx::PgExecutor<'c>, condition: &'static str) -> StoreResult<Vec<TenantTable>> {
    sqlx::query_as(AssertSqlSafe(format!(
        "SELECT quote_ident(c.relname) AS quoted, coalesce(parent.relname, c.relname)::text AS shown
           FROM pg_class c
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'workspace_id' AND NOT a.attisdropped
           LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
           LEFT JOIN pg_class parent ON parent.oid = i.inhparent
          WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p') AND {condition}
          ORDER BY c.relname"
    )))
    .fetch_all(executor)
    .await
    .map_err(StoreError::from_sqlx("finding the tables of tenants"))
}

/// How many rows of a workspace are in a table.
async fn count<'c>(
    executor: impl sqlx::PgExecutor<'c>,
    table: &TenantTable,
    scope: WorkspaceScope,
) -> StoreResult<u64> {
    let query = format!("SELECT count(*) FROM {} WHERE workspace_id = $1", table.quoted);
    let rows: i64 = sqlx::query_scalar(AssertSqlSafe(query))
        .bind(scope.workspace_id().get())
        .fetch_one(executor)
        .await
        .map_err(StoreError::from_sqlx("counting the rows of a workspace"))?;
    Ok(rows.unsigned_abs())
}
