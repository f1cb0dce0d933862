//! Statistics of tables that have just grown: without them, Postgres keeps plans that it made for empty tables, until
//! the first run of autovacuum, a minute later. Called by a worker loop. ADR 0054 has the reasons.

use std::collections::HashMap;

use const_format::formatcp;
use sqlx::AssertSqlSafe;

use crate::{Store, StoreError, StoreResult, statement_timeout::StatementTimeout as _};

/// Pages below which any plan is fast.
const LEAST_PAGES: i64 = 8;
/// Growth since the last statistics from which on they mislead the planner. It bounds the work: a table is analyzed at
/// 8 pages, at 32, at 128, and so on, so that all its turns together read little more than its size.
const GROWTH: i64 = 4;
/// Pages (128 MiB) beyond which a table takes so long to grow fourfold that autovacuum is soon enough.
const MAX_PAGES: i64 = 16_384;
/// Tables of one turn: 2 ms for a small one, half a second for the largest. The next turn has the others.
const BATCH_SIZE: usize = 16;

/// A table without statistics has `relpages` 0. Reading the size opens the table, which takes memory of the connection
/// and, the first time, 0.1 ms: large tables are left out, and the partitions of other days, which hardly grow.
/// `OFFSET 0` keeps the planner from reading it once for each condition.
const GROWN: &str = formatcp!(
    "
SELECT format('%I', c.relname), size.pages
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = current_schema()
 CROSS JOIN LATERAL (
       SELECT pg_relation_size(c.oid) / current_setting('block_size')::bigint AS pages OFFSET 0) AS size
 WHERE c.relkind = 'r' AND c.relpages <= {MAX_PAGES} / {GROWTH}
   AND (NOT c.relispartition OR right(c.relname, 8) = (SELECT to_char(relay_now() AT TIME ZONE 'UTC', 'YYYYMMDD')))
   AND size.pages BETWEEN greatest({LEAST_PAGES}, c.relpages * {GROWTH}) AND {MAX_PAGES}
 ORDER BY size.pages"
);

/// Tables that have grown and were analyzed, with their pages then, until Postgres shows the result. It never does for
/// the tables of another role, and for those where ANALYZE fails: they are analyzed again when they have grown again.
#[derive(Debug, Default)]
pub struct AnalyzedTables(HashMap<String, i64>);

impl Store {
    /// Analyzes the tables that have grown to a multiple of their size at the last statistics. Returns their number.
    ///
    /// An ANALYZE lets every connection of every process plan again. Several workers may run this at once: one skips a
    /// table that another, or autovacuum, is analyzing.
    pub async fn analyze_grown_tables(&self, analyzed: &mut AnalyzedTables) -> StoreResult<u64> {
        let grown: Vec<(String, i64)> = sqlx::query_as(GROWN)
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("listing tables that have grown"))?;
        let AnalyzedTables(analyzed) = analyzed;
        analyzed.retain(|name, _| grown.iter().any(|(grown, _)| grown == name));
        let is_due = |(name, pages): &(String, i64)| analyzed.get(name).is_none_or(|then| *pages >= then * GROWTH);
        let due: Vec<_> = grown.into_iter().filter(is_due).take(BATCH_SIZE).collect();
        let mut done = 0;
        for (name, pages) in due {
            // Noted before the attempt: one that fails, or is given up with the turn, is not repeated either.
            analyzed.insert(name.clone(), pages);
            // Not prepared: each text would take a place among the prepared statements. Unlike VACUUM, it may run in
            // the transaction that each statement has behind a pooler.
            sqlx::raw_sql(AssertSqlSafe(format!("ANALYZE (SKIP_LOCKED) {name}")))
                .execute(&self.pool)
                .with_timeout()
                .await
                .map_err(StoreError::from_sqlx("analyzing a table that has grown"))?;
            done += 1;
        }
        Ok(done)
    }
}
