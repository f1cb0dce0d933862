//! Connections that are used again without a test. Everything in this crate reaches Postgres through them. Main types:
//! [`ConnectionPool`], [`Lease`] of one connection, [`Transaction`], and [`DatabaseSession`], on which statements run.
//!
//! The driver's pool tests a connection when it is taken and when it is returned: two round trips around each
//! statement. [`ConnectionPool`] leaves connections checked out between statements, and trusts one that was used within
//! the last second. Such a connection may be dead nevertheless, and on a dead network the answer of a statement never
//! arrives, so each statement has a deadline on this side (ADR 0054).
//!
//! Behind a pooler in transaction mode each statement is in an explicit transaction, whose BEGIN carries the settings
//! and the comparison with the known database (ADR 0065).

mod database_session;
mod executor;
mod opening;

use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::{Executor as _, PgPool, Postgres, pool::PoolConnection, postgres::PgRow};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};

use self::opening::{Begin, is_other_epoch};
pub(crate) use self::{
    database_session::DatabaseSession,
    opening::{Opening, SETTINGS},
};

/// Time after its last use for which a connection counts as alive.
const TRUSTED_FOR: Duration = Duration::from_secs(1);
/// Time after which an unused connection returns to the driver's pool.
const UNUSED_FOR: Duration = Duration::from_secs(10);
/// Time after which a used connection returns to the driver's pool, which replaces it after half an hour.
const KEPT_AT_MOST: Duration = Duration::from_secs(60);
/// Longest use of a plan. Postgres plans a prepared statement once for each connection, by the sizes that the tables
/// have then. On a new installation they are empty, every index looks alike, and many plans read whole workspaces.
/// Postgres itself replaces a plan after the first ANALYZE of its tables, which takes up to a minute.
const PLANS_KEPT_AT_MOST: Duration = Duration::from_secs(60);
/// Least time between two plans of a connection, whose statements take milliseconds to plan.
const PLANS_KEPT_AT_LEAST: Duration = Duration::from_secs(1);
/// Wait for the answer to a test or a BEGIN, for which Postgres itself needs no time.
const TEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Wait for a connection to settle, before which a statement that was given up has to end.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for statement and answer to travel, beyond the time that Postgres gives the statement.
const TRAVEL_TIME: Duration = Duration::from_secs(1);
/// Connections that are reserved for the commits of batches: a gateway has two commits at a time, of which one is rare.
const COMMIT_CONNECTIONS: usize = 2;
/// Size of a pool from which on it reserves connections for commits, so that most are there for the others.
const RESERVING_POOL_SIZE: u32 = 8;

/// Pool of connections. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionPool {
    driver: PgPool,
    kept: Arc<Mutex<KeptConnections>>,
    /// Time that Postgres gives each statement. `None`: as long as it needs; then no connection is kept.
    statement_limit: Option<Duration>,
    opening: Opening,
    created_at: Instant,
}

/// Connections between two uses.
#[derive(Debug, Default)]
struct KeptConnections {
    /// Sorted by their last use; the last one is used next.
    connections: Vec<KeptConnection>,
    /// Callers that wait for the driver's pool. Connections return to it for them.
    waiting: usize,
    /// Last time at which the plans of a connection from the driver's pool were dropped.
    dropped_at: Option<Instant>,
    /// Connections that are returned to the driver's pool.
    returns: JoinSet<()>,
}

impl KeptConnections {
    /// Takes the connection that was used last for the purpose.
    fn take(&mut self, purpose: Purpose) -> Option<KeptConnection> {
        let index = self.connections.iter().rposition(|kept| kept.purpose == purpose)?;
        Some(self.connections.remove(index))
    }

    fn count_for(&self, purpose: Purpose) -> usize {
        self.connections.iter().filter(|kept| kept.purpose == purpose).count()
    }

    /// Returns a connection to the driver's pool, apart from the caller.
    // The set keeps tasks that have ended until they are joined.
    fn give_back(&mut self, session: DatabaseSession, settle: &'static str) {
        while self.returns.try_join_next().is_some() {}
        self.returns.spawn(give_back(session, settle));
    }
}

#[derive(Debug)]
struct KeptConnection {
    session: DatabaseSession,
    taken_at: Instant,
    planned_at: Option<Instant>,
    used_at: Instant,
    purpose: Purpose,
}

/// Statements that a connection is used for.
///
/// Postgres plans a statement once for each connection. The plan that commits a batch takes milliseconds to make, and
/// is so large that a backend which has waited while others ran reads most of it from memory: a commit costs 1.4 times
/// as much CPU of Postgres if 20 connections take turns. By the order of their last use they do, because each burst of
/// other statements shuffles them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Statements that commit a batch, on the connection that executed one last if it is free.
    Commits,
    /// Transactions that place invocations, one at a time.
    Placements,
    /// Statements that record outcomes of invocations, one at a time.
    Outcomes,
    Others,
}

impl Purpose {
    /// Connections that are kept for the purpose.
    const fn connections(self) -> usize {
        match self {
            Self::Commits => COMMIT_CONNECTIONS,
            Self::Placements | Self::Outcomes => 1,
            Self::Others => usize::MAX,
        }
    }
}

impl ConnectionPool {
    pub(crate) fn new(driver: PgPool, statement_limit: Option<Duration>, opening: Opening) -> Self {
        Self { driver, kept: Arc::default(), statement_limit, opening, created_at: Instant::now() }
    }

    /// Returns the driver's pool, for its options and counts.
    pub(crate) fn driver(&self) -> &PgPool {
        &self.driver
    }

    pub(crate) fn opening(&self) -> &Opening {
        &self.opening
    }

    pub(crate) fn statement_limit(&self) -> Option<Duration> {
        self.statement_limit
    }

    /// Counts the connections that are not in use. Those that are reserved for commits count as used while other
    /// statements wait.
    pub(crate) fn idle_count(&self) -> usize {
        let kept = self.lock();
        let left = if kept.waiting > 0 { kept.count_for(Purpose::Commits) } else { 0 };
        self.driver.num_idle() + kept.connections.len() - left
    }

    /// Takes a connection for one statement, which is a transaction of its own. Only [`Lease::finish`] completes it.
    pub(crate) async fn for_statement(&self, purpose: Purpose) -> sqlx::Result<Lease> {
        if self.opening.is_pooled() {
            Ok(self.open(purpose, self.opening.begin()).await?.0)
        } else {
            self.acquire(purpose).await
        }
    }

    /// Begins a transaction. BEGIN tests the connection.
    pub(crate) async fn begin(&self) -> sqlx::Result<Transaction> {
        Ok(Transaction(self.open(Purpose::Others, self.opening.begin()).await?.0))
    }

    /// Begins a transaction with a query in the same message, whose rows are the last that are returned. Postgres may
    /// need no more time for it than for BEGIN: it waits for no lock.
    pub(crate) async fn begin_with(&self, purpose: Purpose, query: &str) -> sqlx::Result<(Transaction, Vec<PgRow>)> {
        let (lease, rows) = self.open(purpose, self.opening.begin().with(query)).await?;
        Ok((Transaction(lease), rows))
    }

    async fn open(&self, purpose: Purpose, begin: Begin<'_>) -> sqlx::Result<(Lease, Vec<PgRow>)> {
        let mut lease = self.acquire(purpose).await?;
        lease.opened(&begin);
        match timeout(TEST_TIMEOUT, begin.send(&mut lease)).await {
            Ok(Ok(rows)) => return Ok((lease, rows)),
            // Another connection would meet the same database.
            Ok(Err(error)) if is_other_epoch(&error) => return Err(error),
            // The connection had died since its last use. Nothing was executed yet, so the other attempt repeats
            // nothing.
            Ok(Err(_)) | Err(_) => lease.close(),
        }
        let mut lease = self.acquire_from_driver(purpose).await?;
        lease.opened(&begin);
        let sent = timeout(TEST_TIMEOUT, begin.send(&mut lease)).await;
        // An answer that is still outstanding would have to be awaited before any further statement.
        if sent.is_err() {
            lease.close();
        }
        let rows = sent.unwrap_or(Err(sqlx::Error::PoolTimedOut))?;
        Ok((lease, rows))
    }

    /// Takes a connection that was tested, or used within the last second.
    async fn acquire(&self, purpose: Purpose) -> sqlx::Result<Lease> {
        // A statement of its own: in the condition below, the guard would be held across the waits.
        let own = self.lock().take(purpose);
        if let Some(own) = own {
            if let Some(lease) = self.checked(own, purpose).await {
                return Ok(lease);
            }
        } else if let Some(idle) = self.driver.try_acquire() {
            let lease = self.new_lease(idle, purpose);
            let plans_are_due = lease.plans_are_due();
            if let Some(lease) = lease.tested(plans_are_due).await {
                return Ok(lease);
            }
        } else {
            let other = self.take_of_other_purpose(purpose);
            if let Some(other) = other
                && let Some(lease) = self.checked(other, purpose).await
            {
                return Ok(lease);
            }
        }
        self.acquire_from_driver(purpose).await
    }

    /// Returns a kept connection, tested unless it was used within the last second.
    async fn checked(&self, kept: KeptConnection, purpose: Purpose) -> Option<Lease> {
        let KeptConnection { session, taken_at, planned_at, used_at, purpose: _ } = kept;
        let lease = self.lease(session, taken_at, planned_at, purpose);
        let plans_are_due = lease.plans_are_due();
        if used_at.elapsed() < TRUSTED_FOR && !plans_are_due { Some(lease) } else { lease.tested(plans_are_due).await }
    }

    /// Takes a kept connection for a purpose that has none, unless it has to be left to the others.
    fn take_of_other_purpose(&self, purpose: Purpose) -> Option<KeptConnection> {
        match purpose {
            Purpose::Placements | Purpose::Outcomes if self.reserves_for_commits() => self.lock().take(Purpose::Others),
            Purpose::Others if self.reserves_for_commits() => None,
            Purpose::Commits | Purpose::Placements | Purpose::Outcomes | Purpose::Others => {
                self.lock().connections.pop()
            }
        }
    }

    /// Returns whether other statements leave the connections of commits alone, even if they have to wait.
    fn reserves_for_commits(&self) -> bool {
        self.driver.options().get_max_connections() >= RESERVING_POOL_SIZE
    }

    /// Waits for a connection of the driver's pool, which opens or tests it, for 3 s at most.
    async fn acquire_from_driver(&self, purpose: Purpose) -> sqlx::Result<Lease> {
        // A connection that is released from now on wakes the caller; none was kept unnoticed before.
        // Kept connections count as used in the driver's pool, which could open none while all are kept.
        let waiting = {
            let mut kept = self.lock();
            kept.waiting += 1;
            for unused in std::mem::take(&mut kept.connections) {
                let is_reserved = unused.purpose == Purpose::Commits && unused.used_at.elapsed() < UNUSED_FOR;
                if is_reserved && self.reserves_for_commits() {
                    kept.connections.push(unused);
                } else {
                    kept.give_back(unused.session, "SELECT");
                }
            }
            WaitingCaller(self)
        };
        // Apart from this future: the driver's has 14 kB, and each request that may begin a transaction would hold
        // them, and move them twice.
        let connection = Box::pin(self.driver.acquire()).await;
        drop(waiting);
        Ok(self.new_lease(connection?, purpose))
    }

    fn new_lease(&self, connection: PoolConnection<Postgres>, purpose: Purpose) -> Lease {
        self.lease(DatabaseSession::new(connection, self.opening.statements()), Instant::now(), None, purpose)
    }

    fn lease(
        &self,
        session: DatabaseSession,
        taken_at: Instant,
        planned_at: Option<Instant>,
        purpose: Purpose,
    ) -> Lease {
        Lease { session: Some(session), is_open: false, epoch: None, taken_at, planned_at, purpose, pool: self.clone() }
    }

    /// Returns the time for which plans are used: half the age of this pool, since new tables grow fast.
    fn plans_kept_for(&self) -> Duration {
        (self.created_at.elapsed() / 2).clamp(PLANS_KEPT_AT_LEAST, PLANS_KEPT_AT_MOST)
    }

    /// Returns whether a connection of the driver's pool, whose plans have an unknown age, is to drop them: as often as
    /// if each were known. While many callers wait, connections pass through that pool between any two statements.
    fn takes_turn_of_unknown_plans(&self) -> bool {
        let turn = self.plans_kept_for() / self.driver.options().get_max_connections().max(1);
        // Read and set under one lock, so that two callers do not take the same turn.
        let dropped_at = &mut self.lock().dropped_at;
        let is_due = dropped_at.is_none_or(|at| at.elapsed() >= turn);
        if is_due {
            *dropped_at = Some(Instant::now());
        }
        is_due
    }

    fn keep(&self, session: DatabaseSession, taken_at: Instant, planned_at: Option<Instant>, purpose: Purpose) {
        let is_due = self.statement_limit.is_none() || taken_at.elapsed() > KEPT_AT_MOST || self.driver.is_closed();
        let mut kept = self.lock();
        // Two uses at once leave more connections than the purpose needs.
        let purpose = if kept.count_for(purpose) < purpose.connections() { purpose } else { Purpose::Others };
        let is_wanted = kept.waiting > 0 && !(purpose == Purpose::Commits && self.reserves_for_commits());
        if is_due || is_wanted {
            // It has just answered: the pool's test will not hang.
            return;
        }
        kept.connections.push(KeptConnection { session, taken_at, planned_at, used_at: Instant::now(), purpose });
        // Sorted by last use: the first is the oldest. Removing at most one for each that is added suffices.
        if kept.connections.first().is_some_and(|first| first.used_at.elapsed() > UNUSED_FOR) {
            let unused = kept.connections.remove(0);
            kept.give_back(unused.session, "SELECT");
        }
    }

    /// Closes the connections between two uses. After a failover one that was used within the last second would be
    /// trusted, and its statement fail.
    pub(crate) fn close_kept(&self) {
        for mut kept in std::mem::take(&mut self.lock().connections) {
            kept.session.close_on_drop();
        }
    }

    fn lock(&self) -> MutexGuard<'_, KeptConnections> {
        // Usable after a panic: a connection that was being moved was dropped, and returns to the driver's pool.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a statement until its deadline. The error maps to `Unavailable`; the statement may have run.
    async fn before_deadline<T>(&self, statement: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
        match self.statement_limit {
            Some(limit) => timeout(limit + TRAVEL_TIME, statement).await.unwrap_or(Err(sqlx::Error::PoolTimedOut)),
            None => statement.await,
        }
    }
}

/// Caller that is counted as waiting until this is dropped.
struct WaitingCaller<'a>(&'a ConnectionPool);

impl Drop for WaitingCaller<'_> {
    fn drop(&mut self) {
        self.0.lock().waiting -= 1;
    }
}

/// Connection in use. Dropped, it returns to the driver's pool if it still answers: a statement may have failed or been
/// given up. After a success, [`Lease::finish`] keeps it for the next statement.
#[derive(Debug)]
pub(crate) struct Lease {
    /// `None` once it was kept.
    session: Option<DatabaseSession>,
    /// In an explicit transaction, or its BEGIN was given up.
    is_open: bool,
    /// Recovery epoch of the transaction.
    epoch: Option<i64>,
    taken_at: Instant,
    /// Since then no plan is older. `None` if that is unknown.
    planned_at: Option<Instant>,
    purpose: Purpose,
    pool: ConnectionPool,
}

impl Lease {
    /// Returns whether the next test is to drop the plans. Behind a pooler none is kept.
    fn plans_are_due(&self) -> bool {
        if self.pool.opening.is_pooled() {
            return false;
        }
        match self.planned_at {
            Some(at) => at.elapsed() >= self.pool.plans_kept_for(),
            None => self.pool.takes_turn_of_unknown_plans(),
        }
    }

    /// Notes that a transaction begins, before the attempt: it may be given up after BEGIN was sent.
    fn opened(&mut self, begin: &Begin<'_>) {
        (self.is_open, self.epoch) = (true, begin.epoch());
    }

    /// Commits the transaction, if there is one, and keeps the connection for the next statement.
    pub(crate) async fn finish(mut self) -> sqlx::Result<()> {
        // An error leaves the session here, so that the drop rolls back.
        if self.is_open {
            self.execute("COMMIT").await?;
        }
        if let Some(session) = self.session.take() {
            self.pool.keep(session, self.taken_at, self.planned_at, self.purpose);
        }
        Ok(())
    }

    /// Returns the connection if it answers. With `drops_plans`, it has no plan afterwards.
    async fn tested(mut self, drops_plans: bool) -> Option<Self> {
        let answer =
            async { if drops_plans { self.execute("DISCARD PLANS").await.map(drop) } else { self.ping().await } };
        if matches!(timeout(TEST_TIMEOUT, answer).await, Ok(Ok(()))) {
            if drops_plans {
                self.planned_at = Some(Instant::now());
            }
            return Some(self);
        }
        self.close();
        None
    }

    /// Closes the connection instead of returning it.
    fn close(&mut self) {
        if let Some(mut session) = self.session.take() {
            session.close_on_drop();
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            // A drop cannot wait, so a task waits for the connection. `SELECT` without columns is answered after all
            // that is still outstanding.
            self.pool.lock().give_back(session, if self.is_open { "ROLLBACK" } else { "SELECT" });
        }
    }
}

/// Returns a connection to the driver's pool after a statement that settles it, or closes it. The pool's own test has
/// no deadline, and its place would stay taken on a dead network.
async fn give_back(mut session: DatabaseSession, settle: &'static str) {
    if !matches!(timeout(SETTLE_TIMEOUT, session.execute(settle)).await, Ok(Ok(_))) {
        session.close_on_drop();
    }
}

impl Deref for Lease {
    type Target = DatabaseSession;

    fn deref(&self) -> &DatabaseSession {
        self.session.as_ref().expect("a lease has its connection until it is dropped")
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut DatabaseSession {
        self.session.as_mut().expect("a lease has its connection until it is dropped")
    }
}

/// Open transaction. It is rolled back when it is dropped before its end.
#[derive(Debug)]
pub(crate) struct Transaction(Lease);

impl Transaction {
    /// Returns the recovery epoch under which it began; `None` in tools and in a recovery.
    pub(crate) fn epoch(&self) -> Option<i64> {
        self.0.epoch
    }

    pub(crate) async fn commit(self) -> sqlx::Result<()> {
        self.0.finish().await
    }
}

impl Deref for Transaction {
    type Target = DatabaseSession;

    fn deref(&self) -> &DatabaseSession {
        &self.0
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut DatabaseSession {
        &mut self.0
    }
}

#[cfg(test)]
mod tests;
