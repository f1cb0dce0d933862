//! Everything that a workspace has: written out, or removed for good, with a count of what is left.
//!
//! The tables are found by the catalog, so that one that a later version adds is neither forgotten in an export nor left behind.

use futures::TryStreamExt as _;
use relay_domain::WorkspaceScope;
use sqlx::AssertSqlSafe;

use crate::{Store, StoreError, StoreResult};

/// Rows removed by one statement.
const BATCH: i64 = 5_000;
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

/// A table with a tenant's rows.
#[derive(Debug, sqlx::FromRow)]
struct TenantTable {
    /// Quoted, for a statement.
    quoted: String,
    /// Its own name, or its parent's.
    shown: String,
}

impl Store {
    /// Calls `each` with the table and the row as JSON, for each row of the workspace, in one snapshot of the database. Tokens, keys of
    /// repeated requests and the search index are left out.
    ///
    /// # Errors
    /// When Postgres does not answer, or `each` fails: with its error.
    pub async fn export_workspace<E: From<StoreError>>(
        &self,
        scope: WorkspaceScope,
        mut each: impl FnMut(&str, &str) -> Result<(), E>,
    ) -> Result<(), E> {
        let doing = "exporting a workspace";
        let failed = StoreError::from_sqlx(doing);
        let mut tx = self.pool.begin().await.map_err(failed)?;
        sqlx::query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        for table in tables(&mut *tx, "NOT c.relispartition").await? {
            if NOT_EXPORTED.contains(&table.shown.as_str()) {
                continue;
            }
            let query = format!("SELECT row_to_json(t)::text FROM {} t WHERE workspace_id = $1", table.quoted);
            let mut rows =
                sqlx::query_scalar::<_, String>(AssertSqlSafe(query)).bind(scope.workspace_id().get()).fetch(&mut *tx);
            while let Some(row) = rows.try_next().await.map_err(StoreError::from_sqlx(doing))? {
                each(&table.shown, &row)?;
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

    /// Removes every row of a workspace, in batches, its own row last. Safe to repeat; what is removed stays removed if it is cut off.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn erase_workspace(&self, scope: WorkspaceScope) -> StoreResult<Vec<Erased>> {
        let doing = "erasing a workspace";
        let mut erased: Vec<Erased> = Vec::new();
        let mut tables = self.tables_with_rows().await?;
        tables.sort_by_key(|table| table.shown == "workspaces");
        for table in tables {
            // By place, so that each batch reads what it removes and nothing else. A batch is a transaction of its own.
            let query = format!(
                "DELETE FROM {0} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {0} WHERE workspace_id = $1 LIMIT $2))",
                table.quoted
            );
            let mut rows = 0;
            loop {
                let removed = sqlx::query(AssertSqlSafe(query.clone()))
                    .bind(scope.workspace_id().get())
                    .bind(BATCH)
                    .execute(&self.pool)
                    .await
                    .map_err(StoreError::from_sqlx(doing))?
                    .rows_affected();
                rows += removed;
                if removed == 0 {
                    break;
                }
            }
            match erased.iter_mut().find(|known| known.table == table.shown) {
                Some(known) => known.rows += rows,
                None => erased.push(Erased { table: table.shown, rows }),
            }
        }
        Ok(erased)
    }

    /// Counts what is left of a workspace in each table that could hold something of it, partitions one by one.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn rows_left(&self, scope: WorkspaceScope) -> StoreResult<Vec<Erased>> {
        let tables = self.tables_with_rows().await?;
        let mut left = Vec::new();
        for table in &tables {
            let query = format!("SELECT count(*) FROM {} WHERE workspace_id = $1", table.quoted);
            let rows: i64 = sqlx::query_scalar(AssertSqlSafe(query))
                .bind(scope.workspace_id().get())
                .fetch_one(&self.pool)
                .await
                .map_err(StoreError::from_sqlx("counting what is left of a workspace"))?;
            left.push(Erased { table: table.quoted.clone(), rows: rows.unsigned_abs() });
        }
        Ok(left)
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
