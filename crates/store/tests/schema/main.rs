//! Migrations one after the other, as an installation meets them: what the version before uses is still there after
//! each.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

mod document;
#[path = "../loops/fixture.rs"]
#[allow(dead_code, reason = "shared with the tests of the worker loops, which use other parts")]
mod fixture;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use relay_store::MIGRATOR;
use relay_testkit::wait;
use sqlx::{PgPool, migrate::Migrator};

use crate::fixture::Database;

/// A column of a table, and what a program relies on that writes and reads it.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
struct Column {
    place: String,
    in_table: String,
    kind: String,
    not_null: bool,
    has_default: bool,
}

/// A rule that rows of a table must keep: a CHECK, a key, a unique index.
#[derive(Debug, sqlx::FromRow)]
struct Rule {
    name: String,
    in_table: String,
    columns: Vec<String>,
}

const COLUMNS: &str = "
SELECT c.relname || '.' || a.attname AS place, c.relname::text AS in_table,
       format_type(a.atttypid, a.atttypmod) AS kind, a.attnotnull AS not_null, a.atthasdef AS has_default
  FROM pg_class c
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition";

const RULES: &str = "
SELECT r.name, c.relname::text AS in_table,
       ARRAY(SELECT c.relname || '.' || a.attname FROM pg_attribute a
              WHERE a.attrelid = c.oid AND a.attnum = ANY (r.columns)) AS columns
  FROM (SELECT conname::text AS name, conrelid AS table_id, conkey AS columns FROM pg_constraint
         WHERE contype IN ('c', 'f', 'x')
        UNION ALL
        SELECT indexrelid::regclass::text, indrelid, indkey::int2[] FROM pg_index WHERE indisunique) AS r
  JOIN pg_class c ON c.oid = r.table_id
 WHERE c.relnamespace = 'public'::regnamespace AND NOT c.relispartition";

/// A database without a schema, on the server of `db`.
async fn empty(db: &Database) -> PgPool {
    let name = format!("relay_test_{}", uuid::Uuid::new_v4().simple());
    db.run(&format!("CREATE DATABASE {name}")).await;
    PgPool::connect_with((*db.pool.connect_options()).clone().database(&name)).await.unwrap()
}

async fn columns(pool: &PgPool) -> BTreeMap<String, Column> {
    let rows: Vec<Column> = sqlx::query_as(COLUMNS).fetch_all(pool).await.unwrap();
    rows.into_iter().map(|column| (column.place.clone(), column)).collect()
}

async fn rules(pool: &PgPool) -> Vec<Rule> {
    sqlx::query_as(RULES).fetch_all(pool).await.unwrap()
}

#[tokio::test]
async fn no_migration_removes_or_tightens_anything_that_the_version_before_uses() {
    let pool = empty(&Database::fresh().await).await;
    let mut before: Option<(BTreeMap<String, Column>, Vec<Rule>)> = None;
    for last in 0..MIGRATOR.migrations.len() {
        let version = MIGRATOR.migrations[last].version;
        Migrator::with_migrations(MIGRATOR.migrations[..=last].to_vec()).run(&pool).await.unwrap();
        let (now, rules_now) = (columns(&pool).await, rules(&pool).await);
        if let Some((columns_before, rules_before)) = before {
            for (place, was) in &columns_before {
                let is = now.get(place).unwrap_or_else(|| panic!("{version} takes {place} away"));
                assert_eq!(is.kind, was.kind, "{version} makes {place} something else");
                assert!(was.not_null || !is.not_null, "{version}: {place} was null, and may not be any more");
                assert!(is.has_default || !was.has_default, "{version}: {place} was filled by a default");
            }
            let tables: Vec<&str> = columns_before.values().map(|column| column.in_table.as_str()).collect();
            for (place, column) in now.iter().filter(|(place, _)| !columns_before.contains_key(*place)) {
                let is_filled = !column.not_null || column.has_default;
                assert!(is_filled || !tables.contains(&column.in_table.as_str()), "{version}: {place} is not filled");
            }
            for rule in &rules_now {
                // A constraint whose name exists already was replaced by a weaker one: `cargo xtask tidy` knows which.
                // One about a new column is met by what the program before leaves in that.
                let is_new = !rules_before.iter().any(|old| old.name == rule.name && old.in_table == rule.in_table);
                let is_on_old = tables.contains(&rule.in_table.as_str())
                    && rule.columns.iter().all(|place| columns_before.contains_key(place));
                assert!(!is_new || !is_on_old, "{version}: {} is a new rule for {:?}", rule.name, rule.columns);
            }
        }
        before = Some((now, rules_now));
    }
    pool.close().await;
}

/// The server processes that wait for a lock in the database of `pool`.
async fn waiting(pool: &PgPool) -> Vec<i32> {
    let waiting = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    sqlx::query_scalar(waiting).fetch_all(pool).await.unwrap()
}

#[tokio::test]
async fn a_migration_waits_for_the_holder_of_a_lock() {
    let db = Database::fresh().await;
    let mut other = db.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE _sqlx_migrations IN ACCESS EXCLUSIVE MODE").execute(&mut *other).await.unwrap();
    assert!(db.store.migrate(Duration::ZERO).await.is_err(), "it has no time");
    let store = db.store.clone();
    let patient = tokio::spawn(async move { store.migrate(Duration::from_secs(60)).await });
    // Each attempt has a connection of its own.
    let seen = RefCell::new(BTreeSet::new());
    let (pool, attempts) = (&db.pool, &seen);
    wait::until("a second attempt", Duration::from_secs(30), || async move {
        let found = waiting(pool).await;
        attempts.borrow_mut().extend(found);
        attempts.borrow().len() > 1
    })
    .await;
    other.rollback().await.unwrap();
    patient.await.unwrap().unwrap();
}
