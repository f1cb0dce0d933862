//! Collector of all deliveries received in a run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::payload::now_micros;

/// A drain ends when no delivery arrives for this long; missing deliveries are reported as lost.
const NO_PROGRESS: Duration = Duration::from_secs(20);

/// Counts and latencies of one measured window.
#[derive(Debug, Default)]
pub(crate) struct Collector {
    delivered: AtomicU64,
    /// Start of the window; messages sent earlier belong to an earlier window.
    sent_since: AtomicU64,
    stragglers: AtomicU64,
    last_at: AtomicU64,
    duplicates: AtomicU64,
    repeated: AtomicU64,
    out_of_order: AtomicU64,
    closed_sockets: AtomicU64,
    caught_up: AtomicU64,
    samples: Mutex<Vec<u32>>,
    first_problem: Mutex<Option<String>>,
}

impl Collector {
    /// Records a delivery whose text contains the time of sending.
    pub(crate) fn delivered(&self, sent_at: Option<u64>) {
        let now = now_micros();
        if let Some(sent_at) = sent_at {
            if sent_at < self.sent_since.load(Ordering::Relaxed) {
                self.stragglers.fetch_add(1, Ordering::Relaxed);
                return;
            }
            let took = u32::try_from(now.saturating_sub(sent_at)).unwrap_or(u32::MAX);
            lock(&self.samples).push(took);
        }
        self.last_at.fetch_max(now, Ordering::Relaxed);
        self.delivered.fetch_add(1, Ordering::Release);
    }

    /// Records a delivery that this connection had already received.
    pub(crate) fn duplicate(&self) {
        self.duplicates.fetch_add(1, Ordering::Relaxed);
    }

    /// Records a delivery that an earlier connection received without acking it in time, which is allowed.
    pub(crate) fn repeated(&self) {
        self.repeated.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of repeated deliveries.
    pub(crate) fn repeated_count(&self) -> u64 {
        self.repeated.load(Ordering::Relaxed)
    }

    /// Records a delivery that skipped at least one seq on this connection.
    pub(crate) fn out_of_order(&self, detail: impl FnOnce() -> String) {
        self.out_of_order.fetch_add(1, Ordering::Relaxed);
        self.note(detail);
    }

    /// Records an unexpected end of a socket.
    pub(crate) fn closed(&self, why: impl FnOnce() -> String) {
        self.closed_sockets.fetch_add(1, Ordering::Relaxed);
        self.note(why);
    }

    /// Records that an agent has received everything it waits for.
    pub(crate) fn caught_up(&self) {
        self.last_at.fetch_max(now_micros(), Ordering::Relaxed);
        self.caught_up.fetch_add(1, Ordering::Release);
    }

    /// Returns the number of agents that have caught up.
    pub(crate) fn caught_up_count(&self) -> u64 {
        self.caught_up.load(Ordering::Acquire)
    }

    /// Returns the number of deliveries in this window.
    pub(crate) fn delivered_count(&self) -> u64 {
        self.delivered.load(Ordering::Acquire)
    }

    /// Returns the time of the last delivery, in microseconds of [`now_micros`].
    pub(crate) fn last_at(&self) -> u64 {
        self.last_at.load(Ordering::Relaxed)
    }

    /// Starts a new window, which counts only deliveries of messages sent since `sent_since`.
    pub(crate) fn reset(&self, sent_since: u64) {
        lock(&self.samples).clear();
        for counter in [
            &self.delivered,
            &self.last_at,
            &self.duplicates,
            &self.repeated,
            &self.out_of_order,
            &self.closed_sockets,
            &self.caught_up,
            &self.stragglers,
        ] {
            counter.store(0, Ordering::Release);
        }
        self.sent_since.store(sent_since, Ordering::Release);
        lock(&self.first_problem).take();
    }

    /// Returns the latencies of the window, in microseconds.
    pub(crate) fn take_samples(&self) -> Vec<u32> {
        std::mem::take(&mut lock(&self.samples))
    }

    /// Returns the problems of the window, one line each.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (counter, what) in [
            (&self.duplicates, "duplicate frames"),
            (&self.out_of_order, "frames out of order"),
            (&self.closed_sockets, "sockets closed"),
            (&self.stragglers, "deliveries of an earlier window"),
        ] {
            let count = counter.load(Ordering::Relaxed);
            if count > 0 {
                lines.push(format!("{count} {what}"));
            }
        }
        lines.extend(lock(&self.first_problem).clone().map(|first| format!("first: {first}")));
        lines
    }

    /// Waits for `count` deliveries; returns the number of missing ones when arrivals stop.
    pub(crate) async fn drain(&self, count: u64) -> u64 {
        self.drain_while_arriving(count, NO_PROGRESS).await
    }

    /// Waits for `count` deliveries until none arrives for `patience`.
    async fn drain_while_arriving(&self, count: u64, patience: Duration) -> u64 {
        let (mut seen, mut since) = (self.delivered_count(), tokio::time::Instant::now());
        while seen < count {
            tokio::time::sleep(Duration::from_millis(2)).await;
            let now = self.delivered_count();
            if now > seen {
                (seen, since) = (now, tokio::time::Instant::now());
            } else if since.elapsed() > patience {
                break;
            }
        }
        count.saturating_sub(seen)
    }

    fn note(&self, detail: impl FnOnce() -> String) {
        let mut first = lock(&self.first_problem);
        if first.is_none() {
            *first = Some(detail());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_drain_ends_when_arrivals_stop() {
        let collector = Collector::default();
        collector.delivered(Some(now_micros()));
        collector.delivered(None);
        assert_eq!(collector.drain(2).await, 0);
        assert_eq!(collector.drain_while_arriving(5, Duration::from_millis(10)).await, 3);
        assert_eq!(collector.take_samples().len(), 1);
        collector.out_of_order(|| "seq 3 after 1".into());
        assert_eq!(collector.problems(), ["1 frames out of order", "first: seq 3 after 1"]);
        collector.reset(now_micros() + 1_000_000);
        collector.delivered(Some(now_micros()));
        assert_eq!(collector.delivered_count(), 0);
        assert_eq!(collector.problems(), ["1 deliveries of an earlier window"]);
    }
}
