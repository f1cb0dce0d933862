//! Settings and state of the database for `relayctl doctor`.

use chrono::{DateTime, Utc};

use crate::{MIGRATOR, Store, StoreError, StoreResult};

/// Settings and connections of the Postgres server.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct DatabaseHealth {
    /// For example `150018`.
    pub server_version_num: i32,
    /// Encoding of the database; must be UTF8.
    pub encoding: String,
    /// `on` or `off`.
    pub fsync: String,
    /// `on` or `off`.
    pub full_page_writes: String,
    /// With `off`, Postgres confirms a commit before it is durable.
    pub synchronous_commit: String,
    /// Standbys that commits wait for; empty: none.
    pub synchronous_standby_names: String,
    /// Standbys that follow now.
    pub standbys: i64,
    /// Those of them that commits wait for; `None` if this user may not see it.
    pub synchronous_standbys: Option<i64>,
    pub max_connections: i32,
    /// Connections reserved for superusers and privileged roles.
    pub reserved: i32,
    /// Open connections of all users.
    pub connections: i64,
    /// Open connections of gateways, workers and this process.
    pub own: i64,
    /// Whether the server is a standby, which accepts no writes.
    pub in_recovery: bool,
    /// Clock of Postgres.
    pub now: DateTime<Utc>,
}

/// Schema in the database, compared with that of this program, and state of the processes that use it.
#[derive(Debug, Clone, serde::Serialize)]
pub struct SchemaState {
    /// Newest migration in the database.
    pub applied: Option<i64>,
    /// Newest migration of this program.
    pub known: i64,
    /// Migrations that failed or were changed after they were applied.
    pub broken: Vec<i64>,
    /// Days from today for which all partitioned tables have their partition; `None` without a schema.
    pub partition_days: Option<i64>,
    /// Gateways with a valid lease.
    pub gateways: i64,
    /// Workers with a valid lease; `None` if the schema is older than this program's.
    pub workers: Option<i64>,
    /// Batches that are not marked as published.
    pub outbox: i64,
    /// Age of the oldest of them, in seconds.
    pub outbox_seconds: f64,
    /// Tables that the user does not own, so that it cannot create partitions of them; at most 20.
    pub foreign_tables: Vec<String>,
}

impl Store {
    /// Returns the settings that the engine relies on.
    pub async fn database_health(&self) -> StoreResult<DatabaseHealth> {
        sqlx::query_as(
            "SELECT current_setting('server_version_num')::int AS server_version_num,
                    (SELECT pg_encoding_to_char(encoding)::text FROM pg_database WHERE datname = current_database())
                        AS encoding,
                    current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes,
                    current_setting('synchronous_commit') AS synchronous_commit,
                    current_setting('synchronous_standby_names') AS synchronous_standby_names,
                    (SELECT count(*) FROM pg_stat_replication WHERE coalesce(state, 'streaming') = 'streaming') AS standbys,
                    -- The columns are visible to members of pg_monitor only.
                    (SELECT CASE WHEN count(*) = count(sync_state) THEN count(*) FILTER (WHERE sync_state IN ('sync', 'quorum'))
                             END
                       FROM pg_stat_replication WHERE coalesce(state, 'streaming') = 'streaming') AS synchronous_standbys,
                    current_setting('max_connections')::int AS max_connections,
                    current_setting('superuser_reserved_connections')::int
                        + coalesce(current_setting('reserved_connections', true)::int, 0) AS reserved,
                    clients.connections, clients.own, pg_is_in_recovery() AS in_recovery, clock_timestamp() AS now
               -- backend_type of other users' backends is visible to privileged roles only, datid to all roles.
               FROM (SELECT count(*) AS connections,
                            count(*) FILTER (WHERE datname = current_database() AND application_name = 'relay') AS own
                       FROM pg_stat_activity
                      WHERE datid IS NOT NULL AND coalesce(backend_type, 'client backend') = 'client backend') clients",
        )
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the settings of postgres"))
    }

    /// Returns the state of the schema. Reads only tables that the schema version in the database is known to have.
    pub async fn schema_state(&self) -> StoreResult<SchemaState> {
        let doing = "reading the state of the schema";
        let known = MIGRATOR.iter().map(|migration| migration.version).max().unwrap_or(0);
        let mut state = SchemaState {
            applied: None,
            known,
            broken: Vec::new(),
            partition_days: None,
            gateways: 0,
            workers: None,
            outbox: 0,
            outbox_seconds: 0.0,
            foreign_tables: Vec::new(),
        };
        // `relayctl doctor` is also used before the first migration.
        let has_schema: bool = sqlx::query_scalar("SELECT to_regclass('_sqlx_migrations') IS NOT NULL")
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        if !has_schema {
            return Ok(state);
        }
        let rows: Vec<(i64, bool, Vec<u8>)> =
            sqlx::query_as("SELECT version, success, checksum FROM _sqlx_migrations ORDER BY version")
                .fetch_all(&self.pool)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        state.applied = rows.last().map(|(version, ..)| *version);
        for (version, success, checksum) in rows {
            let changed =
                MIGRATOR.iter().any(|migration| migration.version == version && migration.checksum[..] != checksum[..]);
            if !success || changed {
                state.broken.push(version);
            }
        }
        let (gateways, outbox, outbox_seconds, foreign_tables) = sqlx::query_as(
            "SELECT (SELECT count(*) FROM gateways WHERE lease_until > relay_now()),
                    (SELECT count(*) FROM outbox WHERE published_at IS NULL),
                    coalesce((SELECT extract(epoch FROM relay_now() - min(created_at))::float8 FROM outbox
                               WHERE published_at IS NULL), 0),
                    ARRAY(SELECT c.relname::text FROM pg_class c
                           WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p')
                             AND NOT pg_has_role(c.relowner, 'USAGE') ORDER BY 1 LIMIT 20)",
        )
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        (state.gateways, state.outbox, state.outbox_seconds, state.foreign_tables) =
            (gateways, outbox, outbox_seconds, foreign_tables);
        if state.applied >= Some(known) {
            state.workers = sqlx::query_scalar("SELECT count(*) FROM push_workers WHERE lease_until > relay_now()")
                .fetch_one(&self.pool)
                .await
                .map(Some)
                .map_err(StoreError::from_sqlx(doing))?;
        }
        // relay_ensure_partitions ends the name of a partition with its day.
        state.partition_days = sqlx::query_scalar(
            "SELECT min(days) FROM (
                SELECT max(to_date(right(child.relname, 8), 'YYYYMMDD')) - (relay_now() AT TIME ZONE 'UTC')::date AS days
                  FROM pg_inherits i
                  JOIN pg_class child ON child.oid = i.inhrelid
                  JOIN pg_class parent ON parent.oid = i.inhparent AND parent.relkind = 'p'
                 WHERE parent.relnamespace = current_schema()::regnamespace AND child.relname ~ '_[0-9]{8}$'
                 GROUP BY parent.oid
             ) tables",
        )
        .fetch_one(&self.pool)
        .await
        .map(|days: Option<i32>| days.map(i64::from))
        .map_err(StoreError::from_sqlx(doing))?;
        Ok(state)
    }
}
