//! Export and erasure of all rows of a workspace, with a count of the rows left.
//!
//! The tables are found in the catalog, so that a table of a later version is exported and erased too. Called by
//! `relayctl` and by the worker that erases ended workspaces.

use std::time::Duration;

use chrono::{DateTime, Utc};
use futures::TryStreamExt as _;
use relay_domain::{WorkspaceId, WorkspaceScope};
use sqlx::AssertSqlSafe;

use crate::{Store, StoreError, StoreResult};

/// Rows removed by one statement.
const BATCH: i64 = 5_000;
/// Table whose row is erased last: an interrupted erasure is found again by it.
pub const WORKSPACES_TABLE: &str = "workspaces";
/// Tables without a meaning outside the installation, or with credentials.
const NOT_EXPORTED: [&str; 6] =
    ["tokens", "former_agent_tokens", "idempotency_keys", "rate_budgets", "message_search", "usage_floors"];

/// Number of rows in one table, removed or left.
#[derive(Debug, Clone, serde::Serialize)]
pub struct TableRowCount {
    pub table: String,
    pub rows: u64,
}

#[derive(Debug)]
pub struct ExportedRow<'a> {
    pub table: &'a str,
    /// JSON object.
    pub row: &'a str,
    pub number: u64,
    /// Number of rows in the export.
    pub total: u64,
}

/// Workspace that was deleted, or has expired, long ago.
#[derive(Debug)]
pub struct EndedWorkspace {
    pub scope: WorkspaceScope,
    /// Expiry of a workspace that is not deleted yet.
    pub expired_at: Option<DateTime<Utc>>,
}

/// Result of one step of an erasure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EraseStep {
    /// Number of removed rows.
    pub removed: u64,
    /// Whether the row of the workspace itself was removed, which is the last one.
    pub complete: bool,
}

/// Table with a column `workspace_id`.
#[derive(Debug, sqlx::FromRow)]
struct TenantTable {
    /// Quoted name, for statements.
    quoted: String,
    /// Plain name; that of the parent for a partition.
    name: String,
}

impl Store {
    /// Calls `each` with each row of the workspace, in one snapshot of the database. Excludes tokens, idempotency keys,
    /// rate limits and the search index.
    ///
    /// # Errors
    /// Fails with the error of `each` as soon as a call fails.
    pub async fn export_workspace<E: From<StoreError>>(
        &self,
        scope: WorkspaceScope,
        mut each: impl FnMut(&ExportedRow<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let doing = "exporting a workspace";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // A recovery does not wait for a transaction of another name, and this one assigns no numbers.
        // The isolation level has to precede the first query. BEGIN contains none here, because tools know no recovery
        // epoch.
        for statement in [
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
            "SET LOCAL application_name = 'relay-export'",
        ] {
            sqlx::query(statement).execute(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?;
        }
        let mut tables = list_tables(&mut *tx, "NOT c.relispartition").await?;
        tables.retain(|table| !NOT_EXPORTED.contains(&table.name.as_str()));
        let (mut number, mut total) = (0, 0);
        // Counted before the first row is passed on, in the same snapshot, so that both numbers agree.
        for table in &tables {
            total += count_table_rows(&mut *tx, table, scope).await?;
        }
        for table in &tables {
            let query = format!("SELECT row_to_json(t)::text FROM {} t WHERE workspace_id = $1", table.quoted);
            let mut rows =
                sqlx::query_scalar::<_, String>(AssertSqlSafe(query)).bind(scope.workspace_id()).fetch(&mut *tx);
            while let Some(row) = rows.try_next().await.map_err(StoreError::from_sqlx(doing))? {
                number += 1;
                each(&ExportedRow { table: &table.name, row: &row, number, total })?;
            }
        }
        Ok(())
    }

    /// Returns whether the workspace is deleted; `None` if it does not exist.
    pub async fn is_deleted(&self, scope: WorkspaceScope) -> StoreResult<Option<bool>> {
        sqlx::query_scalar("SELECT deleted_at IS NOT NULL FROM workspaces WHERE workspace_id = $1")
            .bind(scope.workspace_id())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a workspace"))
    }

    /// Counts the files whose bytes a worker has yet to remove. Their rows name the bytes, so the bytes must go first.
    pub async fn count_file_objects(&self, scope: WorkspaceScope) -> StoreResult<i64> {
        sqlx::query_scalar("SELECT count(*) FROM file_objects WHERE workspace_id = $1")
            .bind(scope.workspace_id())
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("counting files to remove"))
    }

    /// Removes all rows of a workspace except its own, in batches, and calls `each` with the number of tables done and
    /// the total. Idempotent; an interrupted call keeps what it removed.
    pub async fn erase_workspace(
        &self,
        scope: WorkspaceScope,
        mut each: impl FnMut(u64, u64),
    ) -> StoreResult<Vec<TableRowCount>> {
        let mut erased: Vec<TableRowCount> = Vec::new();
        let mut tables = self.tables_with_rows().await?;
        tables.retain(|table| table.name != WORKSPACES_TABLE);
        let total = tables.len() as u64;
        for (table, done) in tables.into_iter().zip(1..) {
            let mut rows = 0;
            loop {
                let removed = self.erase_batch(scope, &table).await?;
                rows += removed;
                // Not a batch that is short: rows may be added while the batches run.
                if removed == 0 {
                    break;
                }
            }
            // Partitions count for their parent.
            match erased.iter_mut().find(|counted| counted.table == table.name) {
                Some(counted) => counted.rows += rows,
                None => erased.push(TableRowCount { table: table.name, rows }),
            }
            each(done, total);
        }
        Ok(erased)
    }

    /// Removes the row of a deleted workspace itself. Returns 1, or 0 if it does not exist or is not deleted.
    pub async fn erase_own_row(&self, scope: WorkspaceScope) -> StoreResult<u64> {
        let done = sqlx::query("DELETE FROM workspaces WHERE workspace_id = $1 AND deleted_at IS NOT NULL")
            .bind(scope.workspace_id())
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("erasing a workspace"))?;
        Ok(done.rows_affected())
    }

    /// Returns the workspace that was deleted, or else expired, first, if that was longer than `age` ago.
    ///
    /// Skips workspaces that expired while suspended, those with files whose bytes a worker has yet to remove, and
    /// those with observer tokens whose signature still verifies, because only the overrides revoke them.
    pub async fn find_ended_workspace(&self, age: Duration) -> StoreResult<Option<EndedWorkspace>> {
        let found: Option<(WorkspaceId, Option<DateTime<Utc>>)> = sqlx::query_as(
            "SELECT w.workspace_id, CASE WHEN w.deleted_at IS NULL THEN w.expires_at END
               FROM workspaces w
              WHERE coalesce(w.deleted_at, w.expires_at) < relay_now() - make_interval(secs => $1)
                AND (w.deleted_at IS NOT NULL OR w.suspended_at IS NULL)
                AND (w.deleted_at IS NULL OR NOT EXISTS (
                     SELECT FROM file_objects o WHERE o.workspace_id = w.workspace_id))
                -- The condition of prune_observer_tokens.
                AND (w.deleted_at IS NULL OR NOT EXISTS (
                     SELECT FROM observer_tokens t
                      WHERE t.workspace_id = w.workspace_id AND t.signed_until >= relay_now() - interval '1 day'
                        AND (w.deleted_at < (SELECT min(created_at) FROM signing_keys WHERE retired_at IS NULL))
                            IS NOT TRUE))
              ORDER BY coalesce(w.deleted_at, w.expires_at) LIMIT 1",
        )
        .bind(age.as_secs_f64())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("finding a workspace to erase"))?;
        Ok(found.map(|(workspace, expired_at)| EndedWorkspace {
            scope: WorkspaceScope::from_engine_row(workspace),
            expired_at,
        }))
    }

    /// Removes about `limit` rows of a deleted workspace. A step that finds no row removes that of the workspace
    /// itself. Idempotent and safe to run concurrently. Removed rows stay removed after an error.
    pub async fn erase_rows(&self, scope: WorkspaceScope, limit: u64) -> StoreResult<EraseStep> {
        let mut removed = 0;
        let mut tables = self.tables_with_rows().await?;
        tables.retain(|table| table.name != WORKSPACES_TABLE);
        for table in &tables {
            loop {
                let batch = self.erase_batch(scope, table).await?;
                removed += batch;
                if removed >= limit {
                    return Ok(EraseStep { removed, complete: false });
                }
                if batch == 0 {
                    break;
                }
            }
        }
        // Tables that were read first may have got rows since. Only a pass that finds none ends the erasure.
        if removed > 0 {
            return Ok(EraseStep { removed, complete: false });
        }
        let removed = self.erase_own_row(scope).await?;
        Ok(EraseStep { removed, complete: removed > 0 })
    }

    /// Counts the rows of a workspace in each table and partition.
    pub async fn count_rows_left(&self, scope: WorkspaceScope) -> StoreResult<Vec<TableRowCount>> {
        let tables = self.tables_with_rows().await?;
        let mut left = Vec::new();
        for table in &tables {
            left.push(TableRowCount {
                table: table.quoted.clone(),
                rows: count_table_rows(&self.pool, table, scope).await?,
            });
        }
        Ok(left)
    }

    /// Removes up to [`BATCH`] rows from one table. Returns their number.
    async fn erase_batch(&self, scope: WorkspaceScope, table: &TenantTable) -> StoreResult<u64> {
        // By ctid, so that each batch reads only the rows that it removes. A separate transaction per batch holds locks
        // briefly and lets vacuum follow.
        let query = format!(
            "DELETE FROM {0} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {0} WHERE workspace_id = $1 LIMIT $2))",
            table.quoted
        );
        let done = sqlx::query(AssertSqlSafe(query))
            .bind(scope.workspace_id())
            .bind(BATCH)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("erasing a workspace"))?;
        Ok(done.rows_affected())
    }

    /// Returns the tables that store rows: partitions instead of their parents.
    async fn tables_with_rows(&self) -> StoreResult<Vec<TenantTable>> {
        list_tables(&self.pool, "c.relkind = 'r'").await
    }
}

/// Returns the tables with a column `workspace_id` that meet a condition on `pg_class c`, by name.
async fn list_tables<'c>(
    executor: impl sqlx::PgExecutor<'c>,
    condition: &'static str,
) -> StoreResult<Vec<TenantTable>> {
    sqlx::query_as(AssertSqlSafe(format!(
        "SELECT quote_ident(c.relname) AS quoted, coalesce(parent.relname, c.relname)::text AS name
           FROM pg_class c
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'workspace_id' AND NOT a.attisdropped
           LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
           LEFT JOIN pg_class parent ON parent.oid = i.inhparent
          WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p') AND {condition}
          ORDER BY c.relname"
    )))
    .fetch_all(executor)
    .await
    .map_err(StoreError::from_sqlx("listing the tables of workspaces"))
}

/// Counts the rows of a workspace in a table.
async fn count_table_rows<'c>(
    executor: impl sqlx::PgExecutor<'c>,
    table: &TenantTable,
    scope: WorkspaceScope,
) -> StoreResult<u64> {
    let query = format!("SELECT count(*) FROM {} WHERE workspace_id = $1", table.quoted);
    let rows: i64 = sqlx::query_scalar(AssertSqlSafe(query))
        .bind(scope.workspace_id())
        .fetch_one(executor)
        .await
        .map_err(StoreError::from_sqlx("counting the rows of a workspace"))?;
    // A count is never negative.
    Ok(rows.unsigned_abs())
}
