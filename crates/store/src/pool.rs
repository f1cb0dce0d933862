//! Connection pool, session settings and schema migrations.

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use sqlx::{
    migrate::MigrateError,
    postgres::{PgConnectOptions, PgPoolOptions, PgSslMode},
};
use tokio::time::Instant;

use crate::{
    StoreError, StoreResult,
    connections::{ConnectionPool, Opening, SETTINGS},
    recovery::epoch::EpochFence,
    statement_timeout::StatementTimeout as _,
};

/// Schema migrations, embedded from `migrations/`.
pub static MIGRATOR: sqlx::migrate::Migrator = sqlx::migrate!("../../migrations");

/// Pause before a migration that timed out on a lock is retried.
const MIGRATION_RETRY_DELAY: Duration = Duration::from_millis(250);

/// Connections for statements without a limit, and the time after which they are closed.
const UNLIMITED_CONNECTIONS: u32 = 2;
const UNUSED_AFTER: Duration = Duration::from_secs(30);

/// Handle on Postgres. Cheap to clone; all clones share one pool.
#[derive(Debug, Clone)]
pub struct Store {
    pub(crate) pool: ConnectionPool,
    pub(crate) fence: Arc<EpochFence>,
    /// Connection past a pooler, for what needs a session.
    pub(crate) direct: Arc<PgConnectOptions>,
}

/// Addresses of the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatabaseAddress {
    /// URL for clients' requests.
    pub url: String,
    /// Pooler that `url` leads to.
    pub pooler: Pooler,
    /// URL that leads past the pooler. `None`: `url` does.
    pub direct_url: Option<String>,
}

impl From<String> for DatabaseAddress {
    fn from(url: String) -> Self {
        Self { url, pooler: Pooler::Off, direct_url: None }
    }
}

/// Pooler between a process and Postgres.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooler {
    /// None, or one that assigns a server to each connection until it ends.
    Off,
    /// Assigns a server to each transaction, such as PgBouncer with `pool_mode = transaction`. Statements have no names
    /// then, and each is in an explicit transaction.
    Transaction,
}

/// Connection counts of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connections {
    pub used: u32,
    pub idle: u32,
    pub max: u32,
}

impl Store {
    /// Creates a pool of at most `connections` connections. They are opened lazily, so that a process starts, and
    /// reports itself as not ready, while Postgres is unavailable.
    ///
    /// # Errors
    /// If `url` is not a Postgres URL.
    pub fn connect(url: &str, connections: u32) -> StoreResult<Self> {
        let direct = direct_options(url)?;
        let fence = Arc::new(EpochFence::default());
        let driver = fence.guard(pool_options(connections)).connect_lazy_with(direct.clone());
        let pool = ConnectionPool::new(driver, None, Opening::direct(Arc::clone(&fence)));
        Ok(Self { pool, fence, direct: Arc::new(direct) })
    }

    /// Creates the pool of a process that serves clients. Postgres ends its statements after `statement_limit`: one
    /// whose caller has given up would otherwise run on and keep its connection.
    ///
    /// # Errors
    /// If a URL of `address` is not a Postgres URL.
    pub fn serve(address: &DatabaseAddress, connections: u32, statement_limit: Duration) -> StoreResult<Self> {
        let own = Self::connect(&address.url, connections)?;
        let direct_url = address.direct_url.as_ref().unwrap_or(&address.url);
        let own = Self { direct: Arc::new(direct_options(direct_url)?), ..own };
        match address.pooler {
            Pooler::Off => Ok(own.with_statement_limit(statement_limit)),
            Pooler::Transaction => {
                let driver = pool_options(connections).connect_lazy_with(pooled_options(&address.url)?);
                let opening = Opening::pooled(Arc::clone(&own.fence), statement_limit);
                Ok(own.with_pool(ConnectionPool::new(driver, Some(statement_limit), opening)))
            }
        }
    }

    /// Returns a handle with a pool of its own whose statements Postgres ends after `limit`.
    #[must_use]
    pub fn with_statement_limit(&self, limit: Duration) -> Self {
        let driver = self.pool.driver();
        let options = with_statement_timeout(&driver.connect_options(), limit);
        let driver = driver.options().clone().connect_lazy_with(options);
        self.with_pool(ConnectionPool::new(driver, Some(limit), Opening::direct(Arc::clone(&self.fence))))
    }

    /// Returns a handle with a small pool of its own for recovery: its statements take as long as they need, and it
    /// connects to any database, past a pooler. Its transactions require the recovery that it has begun itself. Its
    /// connections are closed when they are not used.
    #[must_use]
    pub fn for_recovery(&self) -> Self {
        let driver = pool_options(UNLIMITED_CONNECTIONS).idle_timeout(UNUSED_AFTER);
        let driver = driver.connect_lazy_with(with_statement_timeout(&self.direct, Duration::ZERO));
        // A fence of its own, which knows no database: that of the process refuses the one that is to be recovered.
        self.with_pool(ConnectionPool::new(driver, None, Opening::direct(Arc::default())))
    }

    /// Returns a handle with a connection of its own that passes a pooler by, for what cannot run within a transaction;
    /// `None` without a pooler. Its connection is compared with the database that this process serves.
    pub(crate) fn past_pooler(&self) -> Option<Self> {
        let limit = self.pool.statement_limit().filter(|_| self.pool.opening().is_pooled())?;
        let fence = Arc::clone(&self.fence);
        let driver = fence.guard(pool_options(1)).connect_lazy_with(with_statement_timeout(&self.direct, limit));
        // Without a limit of its own, the pool keeps no connection, which its end would wait for.
        Some(self.with_pool(ConnectionPool::new(driver, None, Opening::direct(fence))))
    }

    fn with_pool(&self, pool: ConnectionPool) -> Self {
        Self { pool, fence: Arc::clone(&self.fence), direct: Arc::clone(&self.direct) }
    }

    /// Checks that `url` is a Postgres URL, without connecting.
    ///
    /// # Errors
    /// The reason, without the URL.
    pub fn check_url(url: &str) -> Result<(), String> {
        // The driver accepts any scheme.
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err("must begin with postgres://".to_owned());
        }
        match url.parse::<PgConnectOptions>() {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Configuration(cause)) => Err(cause.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Returns the host of `url` unless its connections are encrypted and it proves its name. The environment's
    /// defaults, such as PGSSLMODE, count. `None` also for a socket of this machine, and for an unusable URL.
    pub fn unverified_host(url: &str) -> Option<String> {
        Self::check_url(url).ok()?;
        let options: PgConnectOptions = url.parse().ok()?;
        let is_safe = options.get_socket().is_some() || matches!(options.get_ssl_mode(), PgSslMode::VerifyFull);
        (!is_safe).then(|| options.get_host().to_owned())
    }

    /// Returns the current connection counts.
    #[must_use]
    pub fn connections(&self) -> Connections {
        let open = self.pool.driver().size();
        // The two numbers change between the reads.
        let idle = u32::try_from(self.pool.idle_count()).unwrap_or(open).min(open);
        Connections { used: open - idle, idle, max: self.pool.driver().options().get_max_connections() }
    }

    /// Opens a pool of one connection to the same database. Each connection plans each statement once, so a loop that
    /// runs many times a second plans once here instead of once per pooled connection, and never waits for the pool.
    #[must_use]
    pub fn with_dedicated_connection(&self) -> Self {
        let driver = self.pool.driver();
        let options = driver.options().clone().max_connections(1);
        let driver = options.connect_lazy_with((*driver.connect_options()).clone());
        self.with_pool(ConnectionPool::new(driver, self.pool.statement_limit(), self.pool.opening().clone()))
    }

    /// Migrates the schema to this program's version. A newer schema is left as it is, since migrations only add.
    ///
    /// Waits up to `lock_wait` for a lock held by another migration or a `pg_dump`, in attempts of at most
    /// `lock_timeout`, because the table's own traffic queues behind a waiting migration.
    ///
    /// # Errors
    /// If Postgres is unavailable, a migration fails, or the lock was not released in time. A failed migration is
    /// rolled back.
    pub async fn migrate(&self, lock_wait: Duration) -> Result<(), MigrateError> {
        let mut migrator = sqlx::migrate::Migrator::with_migrations(MIGRATOR.migrations.to_vec());
        migrator.set_ignore_missing(true);
        let began = Instant::now();
        loop {
            // One connection per attempt: after a failure the driver does not release its advisory lock, which ends
            // with the connection.
            let dedicated = self.with_dedicated_connection();
            let done = migrator.run(dedicated.pool.driver()).await;
            dedicated.pool.driver().close().await;
            match done {
                Err(error) if is_lock_conflict(&error) && began.elapsed() < lock_wait => {
                    tokio::time::sleep(MIGRATION_RETRY_DELAY).await;
                }
                done => return done,
            }
        }
    }

    /// Returns the lowest schema version that this program can run on.
    #[must_use]
    pub fn required_schema_version() -> i64 {
        // A program without migrations needs none.
        MIGRATOR.iter().map(|migration| migration.version).max().unwrap_or_default()
    }

    /// Returns the last completed migration, or `None` without a schema.
    pub async fn schema_version(&self) -> StoreResult<Option<i64>> {
        let doing = "reading the schema version";
        let there: bool = sqlx::query_scalar("SELECT to_regclass('_sqlx_migrations') IS NOT NULL")
            .fetch_one(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        if !there {
            return Ok(None);
        }
        sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations WHERE success")
            .fetch_one(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))
    }

    /// Makes one round trip, for readiness.
    pub async fn ping(&self) -> StoreResult<()> {
        let pinged = sqlx::query("SELECT 1").execute(&self.pool).with_timeout().await;
        pinged.map(|_| ()).map_err(StoreError::from_sqlx("pinging postgres"))
    }

    /// Reads the clock that all processes share.
    pub async fn now(&self) -> StoreResult<DateTime<Utc>> {
        // relay_now() is the start of the statement; the reading is to be as late as possible.
        sqlx::query_scalar("SELECT relay_now() + (clock_timestamp() - now())")
            .fetch_one(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("reading the clock of postgres"))
    }
}

/// Name by which a recovery finds the transactions of all processes.
const APPLICATION: &str = "relay";

fn parse_url(url: &str) -> StoreResult<PgConnectOptions> {
    let options: PgConnectOptions = url.parse().map_err(StoreError::from_sqlx("reading the database url"))?;
    Ok(options.application_name(APPLICATION))
}

fn direct_options(url: &str) -> StoreResult<PgConnectOptions> {
    Ok(parse_url(url)?.options(SETTINGS).options([("timezone", "UTC")]))
}

/// Options without the startup parameters that a pooler refuses: it cannot keep them for one client.
fn pooled_options(url: &str) -> StoreResult<PgConnectOptions> {
    // The capacity alone would not do: the driver names its statements even without a cache (`UnnamedQuery`).
    Ok(parse_url(url)?.extra_float_digits(None).statement_cache_capacity(0))
}

/// `limit`: 0 for none.
fn with_statement_timeout(options: &PgConnectOptions, limit: Duration) -> PgConnectOptions {
    options.clone().options([("statement_timeout", limit.as_millis().to_string())])
}

fn pool_options(connections: u32) -> PgPoolOptions {
    // A request that waits longer for a connection is answered with 503 `database_overloaded`.
    PgPoolOptions::new().max_connections(connections).acquire_timeout(Duration::from_secs(3))
}

/// Returns true if a migration failed on another session's lock, by timeout or deadlock.
fn is_lock_conflict(error: &MigrateError) -> bool {
    let (MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _)) = error else { return false };
    let code = cause.as_database_error().and_then(|error| error.code());
    matches!(code.as_deref(), Some("55P03" | "40P01"))
}
