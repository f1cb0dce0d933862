//! Limits of what one tenant sends to one host, by http_push and subscriptions together. Main type:
//! [`Destinations`], one per worker; both dispatchers reserve their calls there.
//!
//! One message may match a thousand subscriptions or recipients, all of them at the same host, which has not been
//! asked. A tenant is a family of workspaces: child workspaces do not multiply its limits.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use relay_domain::{metric_names, workspaces::family::FamilyId};
use tokio::time::Instant;

/// Calls of this time may leave at once after a pause.
const BURST: Duration = Duration::from_secs(1);
/// A call waits for its turn at most this long. It holds a permit meanwhile, and the lease must outlast it.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(2);
/// Upper bound of the pause of a call whose turn is later.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Hosts' worth of calls that a family has in all. Names cost nothing, and many may lead to one victim.
const HOSTS_PER_FAMILY: u32 = 4;
/// Key of the calls to all hosts of a family.
const ALL_HOSTS: &str = "";
/// An unused pace has no debts after this long.
const IDLE: Duration = Duration::from_secs(600);
const MAX_REMEMBERED: u64 = 100_000;

/// Limits of a worker's calls to one host.
#[derive(Debug, Clone, clap::Args)]
pub struct DestinationConfig {
    /// Maximum number of calls per second of one workspace and its children to one host, from all workers together; to
    /// all hosts, four times as many.
    #[arg(long = "destination-call-rate", env = "RELAY_DESTINATION_CALL_RATE", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub call_rate: u32,
    /// Maximum number of bytes per second, likewise. Larger bodies leave one after the other, and each once.
    #[arg(long = "destination-byte-rate", env = "RELAY_DESTINATION_BYTE_RATE", default_value_t = 16 * 1024 * 1024,
          value_parser = clap::value_parser!(u64).range(65_536..=10_737_418_240))]
    pub byte_rate: u64,
}

/// Calls of all tenants to their hosts. All workers have an equal share of each limit.
#[derive(Debug)]
pub struct Destinations {
    config: DestinationConfig,
    /// Number of live workers, including this one.
    workers: AtomicU32,
    paces: moka::sync::Cache<(FamilyId, String), Arc<Mutex<Pace>>>,
}

impl Destinations {
    /// Creates the limits of a worker that is alone.
    #[must_use]
    pub fn new(config: DestinationConfig) -> Self {
        let paces = moka::sync::Cache::builder().max_capacity(MAX_REMEMBERED).time_to_idle(IDLE).build();
        Self { config, workers: AtomicU32::new(1), paces }
    }

    /// Sets the number of live workers.
    pub(crate) fn set_worker_count(&self, workers: usize) {
        self.workers.store(u32::try_from(workers.max(1)).unwrap_or(u32::MAX), Relaxed);
    }

    /// Waits for the turn of a call with a body of `bytes`, for [`MAX_WAIT`] at most. The error is the pause after
    /// which its turn is expected: nothing is reserved then.
    pub(crate) async fn wait_for_turn(&self, family: FamilyId, host: &str, bytes: usize) -> Result<(), Duration> {
        let wait = self.reserve(family, host, bytes, MAX_WAIT)?;
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        Ok(())
    }

    /// Reserves a call if it may leave after `max_wait` at most, and returns the wait.
    pub(crate) fn reserve(
        &self,
        family: FamilyId,
        host: &str,
        bytes: usize,
        max_wait: Duration,
    ) -> Result<Duration, Duration> {
        let (host, all) = (self.pace(family, host), self.pace(family, ALL_HOSTS));
        // Always locked in this order.
        let mut host = host.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let cost = self.cost(bytes);
        let wait = host.wait(now).max(all.wait(now));
        if wait > max_wait {
            metrics::counter!(metric_names::DESTINATION_DEFERRALS).increment(1);
            // Both accounts queue the call, and the later turn counts: it needs room in both.
            return Err(host.defer(now, cost).max(all.defer(now, cost / HOSTS_PER_FAMILY)).min(MAX_PAUSE));
        }
        host.take(now, cost);
        all.take(now, cost / HOSTS_PER_FAMILY);
        Ok(wait)
    }

    fn pace(&self, family: FamilyId, host: &str) -> Arc<Mutex<Pace>> {
        self.paces.get_with((family, host.to_owned()), || Arc::new(Mutex::new(Pace::new(Instant::now()))))
    }

    /// Returns the time that one call takes of its host's. Calls and bytes share one account: the larger part counts.
    fn cost(&self, bytes: usize) -> Duration {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let by_bytes = Duration::from_micros(bytes.saturating_mul(1_000_000) / self.config.byte_rate.max(1));
        let by_calls = Duration::from_secs(1) / self.config.call_rate.max(1);
        // Each worker has an equal share of the rate, so a call takes as many times longer as there are workers.
        by_bytes.max(by_calls).saturating_mul(self.workers.load(Relaxed))
    }
}

/// Account of calls, each of which takes some time of it.
#[derive(Debug)]
struct Pace {
    /// End of the calls that were taken.
    busy_until: Instant,
    /// End of those that were deferred, as if they were taken in the order in which they came: each has a turn of its
    /// own to come back at.
    deferred_until: Instant,
}

impl Pace {
    const fn new(now: Instant) -> Self {
        Self { busy_until: now, deferred_until: now }
    }

    /// Returns the wait of the next call.
    fn wait(&self, now: Instant) -> Duration {
        self.busy_until.saturating_duration_since(now).saturating_sub(BURST)
    }

    fn take(&mut self, now: Instant, cost: Duration) {
        self.busy_until = self.busy_until.max(now) + cost;
    }

    /// Returns the pause of a call that is not taken. Its turn is after those that were deferred before.
    fn defer(&mut self, now: Instant, cost: Duration) -> Duration {
        let turn = self.deferred_until.max(self.busy_until);
        // Bounded: a long queue would push the turns of later calls beyond any useful pause. Calls at the end share a
        // turn.
        self.deferred_until = (turn + cost).min(now + BURST + MAX_PAUSE);
        turn.saturating_duration_since(now).saturating_sub(BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1024;

    fn family(id: i64) -> FamilyId {
        FamilyId::of_workspace(relay_domain::WorkspaceId::new(id), None)
    }

    fn destinations(call_rate: u32, byte_rate: u64) -> Destinations {
        Destinations::new(DestinationConfig { call_rate, byte_rate })
    }

    /// Makes calls for ten seconds, each as soon as it may leave, and returns their number.
    async fn calls_in_ten_seconds(destinations: &Destinations, host: &str, bytes: usize) -> usize {
        let end = Instant::now() + Duration::from_secs(10);
        let mut calls = 0;
        while Instant::now() < end {
            match destinations.wait_for_turn(family(1), host, bytes).await {
                Ok(()) => calls += 1,
                Err(pause) => tokio::time::sleep(pause).await,
            }
        }
        calls
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_gets_its_rate_and_a_burst_of_one_second() {
        for (bytes, expected) in [(0, 1100), (KIB, 1100), (100 * KIB, 110), (900 * KIB, 13)] {
            let destinations = destinations(100, 1024 * KIB as u64);
            let calls = calls_in_ten_seconds(&destinations, "a", bytes).await;
            assert!((expected..=expected + expected / 20 + 1).contains(&calls), "{calls} calls of {bytes} bytes");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn workers_share_a_rate() {
        let destinations = destinations(100, 1024 * KIB as u64);
        destinations.set_worker_count(4);
        let calls = calls_in_ten_seconds(&destinations, "a", 0).await;
        assert!((275..290).contains(&calls), "{calls}");
    }

    #[tokio::test(start_paused = true)]
    async fn hosts_and_families_wait_for_themselves_only() {
        let destinations = destinations(1, 1024 * KIB as u64);
        let reserve = |id: i64, host: &str| destinations.reserve(family(id), host, 0, Duration::ZERO);
        assert_eq!((reserve(1, "a"), reserve(1, "a")), (Ok(Duration::ZERO), Ok(Duration::ZERO)));
        assert!(reserve(1, "a").is_err());
        assert_eq!((reserve(1, "b"), reserve(2, "a")), (Ok(Duration::ZERO), Ok(Duration::ZERO)));
        let names = (0..100).filter(|name| reserve(3, &name.to_string()).is_ok()).count();
        assert!(names <= 8, "{names} names of one family");
    }

    #[tokio::test(start_paused = true)]
    async fn deferred_calls_come_back_one_after_the_other() {
        let destinations = destinations(1, 1024 * KIB as u64);
        let reserve = || destinations.reserve(family(1), "a", 0, Duration::ZERO);
        while reserve().is_ok() {}
        let pauses: Vec<_> = (0..3).filter_map(|_| reserve().err()).map(|pause| pause.as_secs()).collect();
        assert_eq!(pauses, [2, 3, 4]);
        let last = (0..1000).filter_map(|_| reserve().err()).max();
        assert_eq!(last, Some(MAX_PAUSE));
    }
}
