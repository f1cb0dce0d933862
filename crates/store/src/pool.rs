//! The connection pool and the migrations.

use std::time::{Duration, Instant};

use sqlx::{
    PgPool,
    migrate::MigrateError,
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::{StoreError, StoreResult, patience::Patient as _};

/// The schema, embedded from `migrations/`.
pub static MIGRATOR: sqlx::migrate::Migrator = sqlx::migrate!("../../migrations");

/// How long to wait before a migration that lost against a lock is tried again.
const MIGRATE_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// A handle on Postgres. Cheap to clone; all clones share one pool.
#[derive(Debug, Clone)]
pub struct Store {
    pub(crate) pool: PgPool,
}

/// The pool's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connections {
    /// At work.
    pub used: u32,
    /// Open, with nothing to do.
    pub idle: u32,
    /// As many may be open.
    pub max: u32,
}

impl Store {
    /// Connects with at most `connections` connections. The first one is opened lazily, so that a
    /// process starts, and reports itself as not ready, while Postgres is away.
    ///
    /// # Errors
    /// When the URL is not a Postgres URL.
    pub fn connect(url: &str, connections: u32) -> StoreResult<Self> {
        let options: PgConnectOptions = url.parse().map_err(StoreError::from_sqlx("reading the database url"))?;
        // A batch waits this long for a mailbox head at most (design: lock order and lock_timeout).
        let options = options.application_name("relay").options([
            ("lock_timeout", "2s"),
            // No transaction here pauses. One that does belongs to a process that is frozen or cut off, and holds
            // mailbox heads that every other gateway's commits wait for.
            ("idle_in_transaction_session_timeout", "3s"),
            ("timezone", "UTC"),
            // Every statement has its index. Tables that have grown since they were last analysed look small
            // to the planner, and a plan that scans them whole may be kept for a minute.
            ("enable_seqscan", "off"),
            // Such a plan that cannot do without a scan is priced so high that Postgres would compile it to machine
            // code at every run, for a hundred milliseconds. No statement runs long enough to earn that back.
            ("jit", "off"),
            // A request is one backend's work: starting helpers takes longer than any of them should run.
            ("max_parallel_workers_per_gather", "0"),
            // Statements are few and prepared; planning each anew over daily partitions would cost more
            // than running it. Partitions are pruned when it runs.
            ("plan_cache_mode", "force_generic_plan"),
        ]);
        let pool = PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(Duration::from_secs(3))
            .connect_lazy_with(options);
        Ok(Self { pool })
    }

    /// Whether `url` is a Postgres URL, without going there.
    ///
    /// # Errors
    /// When it is none, with the reason and without the URL.
    pub fn check_url(url: &str) -> Result<(), String> {
        // The driver reads URLs of any scheme.
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err("must begin with postgres://".to_owned());
        }
        match url.parse::<PgConnectOptions>() {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Configuration(cause)) => Err(cause.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// How the pool's connections are used right now.
    #[must_use]
    pub fn connections(&self) -> Connections {
        let open = self.pool.size();
        // Both numbers move while they are read.
        let idle = u32::try_from(self.pool.num_idle()).unwrap_or(open).min(open);
        Connections { used: open - idle, idle, max: self.pool.options().get_max_connections() }
    }

    /// The same database over one connection of its own. The connections of a pool take turns, and each plans each
    /// statement for itself; a loop that goes round many times a second plans once here, and waits for nobody.
    #[must_use]
    pub fn alone(&self) -> Self {
        let options = self.pool.options().clone().max_connections(1);
        Self { pool: options.connect_lazy_with((*self.pool.connect_options()).clone()) }
    }

    /// Brings the schema up to date. One that a newer version has brought further is left as it is: it still carries this one.
    ///
    /// A lock that somebody else holds, another migration or a `pg_dump`, is waited for up to `patience`, in tries that are as short as any
    /// statement's wait for a lock: what a table's own traffic waits behind is never more than one of them.
    ///
    /// # Errors
    /// When Postgres is away, a migration fails, or a lock was not to be had; a failed migration leaves no trace.
    pub async fn migrate(&self, patience: Duration) -> Result<(), MigrateError> {
        let mut migrator = sqlx::migrate::Migrator::with_migrations(MIGRATOR.migrations.to_vec());
        migrator.set_ignore_missing(true);
        let began = Instant::now();
        loop {
            // A connection for each try: the driver does not give back its own lock after a failure, so it goes with that.
            let alone = self.alone();
            let done = migrator.run(&alone.pool).await;
            alone.pool.close().await;
            match done {
                Err(error) if is_held_up(&error) && began.elapsed() < patience => {
                    tokio::time::sleep(MIGRATE_AGAIN_AFTER).await;
                }
                done => return done,
            }
        }
    }

    /// The version that this program needs the schema to have at least.
    #[must_use]
    pub fn needed_schema_version() -> i64 {
        MIGRATOR.iter().map(|migration| migration.version).max().unwrap_or_default()
    }

    /// The last migration that is complete; none without a schema.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn schema_version(&self) -> StoreResult<Option<i64>> {
        let doing = "reading the version of the schema";
        let there: bool = sqlx::query_scalar("SELECT to_regclass('_sqlx_migrations') IS NOT NULL")
            .fetch_one(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        if !there {
            return Ok(None);
        }
        sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations WHERE success")
            .fetch_one(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx(doing))
    }

    /// One round trip, for readiness. Returns Postgres' clock in unix milliseconds.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn ping(&self) -> StoreResult<i64> {
        sqlx::query_scalar("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
            .fetch_one(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("asking postgres for its clock"))
    }
}

/// Whether a migration lost against somebody else's lock, by waiting too long or by a deadlock.
fn is_held_up(error: &MigrateError) -> bool {
    let (MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _)) = error else { return false };
    let code = cause.as_database_error().and_then(|error| error.code());
    matches!(code.as_deref(), Some("55P03" | "40P01"))
}
