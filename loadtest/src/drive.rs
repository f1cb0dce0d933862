//! Load driver: sends as fast as possible or at a fixed rate, and counts.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::collector::Collector;
use crate::payload::now_micros;

/// Amount and rate of a load.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    /// Maximum number of concurrent requests.
    pub(crate) in_flight: usize,
    /// Requests per second; `None` sends as fast as concurrency and backlog allow.
    pub(crate) rate: Option<f64>,
    /// Time after which no new request is sent.
    pub(crate) duration: Duration,
    /// Maximum number of requests.
    pub(crate) most: usize,
    /// Number of deliveries per request.
    pub(crate) fan_out: u64,
    /// Maximum number of outstanding deliveries, above which sending pauses.
    pub(crate) backlog: u64,
    /// Stops the load when set.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Load {
    /// Creates a load of one recipient per request, as fast as possible for `duration`.
    pub(crate) fn closed(in_flight: usize, duration: Duration) -> Self {
        Self { in_flight, backlog: 10_000, ..Self::with_rate(None, duration) }
    }

    /// Creates a load of one recipient per request, `rate` requests a second for `duration`.
    pub(crate) fn paced(rate: f64, duration: Duration) -> Self {
        Self::with_rate(Some(rate), duration)
    }

    /// Creates a load of `count` requests to one recipient each, as fast as possible.
    pub(crate) fn counted(in_flight: usize, count: usize) -> Self {
        Self { in_flight, most: count, ..Self::with_rate(None, Duration::from_secs(300)) }
    }

    fn with_rate(rate: Option<f64>, duration: Duration) -> Self {
        let stop = Arc::default();
        Self { in_flight: 256, rate, duration, most: usize::MAX, fan_out: 1, backlog: u64::MAX, stop }
    }
}

/// Results of a load.
#[derive(Debug, Default)]
pub(crate) struct SendTotals {
    /// Number of accepted requests.
    pub(crate) accepted: u64,
    /// Number of refused requests and of requests without an answer.
    pub(crate) failed: u64,
    /// Error of the first failure.
    pub(crate) first_failure: Option<String>,
    /// Time from request to answer of the accepted requests, in microseconds.
    pub(crate) took: Vec<u32>,
    /// At a fixed rate: delay of the requests in microseconds, caused by the generator itself.
    pub(crate) late: Vec<u32>,
}

struct Shared {
    next: AtomicUsize,
    accepted: AtomicU64,
}

/// Runs `load`; `send` gets the request's number and the timestamp for its text.
pub(crate) async fn drive<F, R>(load: &Load, collector: &Arc<Collector>, send: F) -> SendTotals
where
    F: Fn(usize, u64) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Result<()>> + Send,
{
    let shared = Arc::new(Shared { next: AtomicUsize::new(0), accepted: AtomicU64::new(0) });
    let total = Arc::new(Mutex::new(SendTotals::default()));
    let start = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..load.in_flight {
        let (load, shared, total) = (load.clone(), Arc::clone(&shared), Arc::clone(&total));
        let (collector, send) = (Arc::clone(collector), send.clone());
        workers.spawn(async move {
            let mut mine = SendTotals::default();
            work(&load, &shared, &collector, start, &send, &mut mine).await;
            add(&mut total.lock().unwrap_or_else(PoisonError::into_inner), mine);
        });
    }
    while workers.join_next().await.is_some() {}
    std::mem::take(&mut total.lock().unwrap_or_else(PoisonError::into_inner))
}

async fn work<F, R>(
    load: &Load,
    shared: &Shared,
    collector: &Collector,
    start: Instant,
    send: &F,
    mine: &mut SendTotals,
) where
    F: Fn(usize, u64) -> R,
    R: Future<Output = Result<()>>,
{
    loop {
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let due = load.rate.map(|rate| start + Duration::from_secs_f64(number as f64 / rate));
        let ends = start + load.duration;
        let stopped = load.stop.load(Ordering::Relaxed);
        if stopped || number >= load.most || due.unwrap_or_else(Instant::now) >= ends {
            return;
        }
        if let Some(due) = due {
            tokio::time::sleep_until(due).await;
            mine.late.push(micros(due.elapsed()));
        }
        while outstanding(load, shared, collector) > load.backlog {
            tokio::time::sleep(Duration::from_millis(1)).await;
            if Instant::now() >= ends {
                return;
            }
        }
        let stamp = now_micros();
        match send(number, stamp).await {
            Ok(()) => {
                mine.accepted += 1;
                shared.accepted.fetch_add(1, Ordering::Relaxed);
                mine.took.push(u32::try_from(now_micros() - stamp).unwrap_or(u32::MAX));
            }
            Err(error) => {
                mine.failed += 1;
                mine.first_failure.get_or_insert_with(|| format!("{error:#}"));
                // Back off from a server that refuses.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

fn outstanding(load: &Load, shared: &Shared, collector: &Collector) -> u64 {
    let accepted = shared.accepted.load(Ordering::Relaxed) * load.fan_out;
    accepted.saturating_sub(collector.delivered_count())
}

fn add(total: &mut SendTotals, one: SendTotals) {
    total.accepted += one.accepted;
    total.failed += one.failed;
    total.took.extend(one.took);
    total.late.extend(one.late);
    if total.first_failure.is_none() {
        total.first_failure = one.first_failure;
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_paced_load_sends_its_rate() {
        let collector = Arc::new(Collector::default());
        let load = Load::paced(1000.0, Duration::from_millis(200));
        let sent = drive(&load, &collector, |_, _| async { Ok(()) }).await;
        assert_eq!((sent.accepted, sent.failed), (200, 0));
        assert_eq!(sent.late.len(), 200);
    }

    #[tokio::test]
    async fn a_counted_load_stops_at_its_count_and_reports_failures() {
        let collector = Arc::new(Collector::default());
        let sent = drive(&Load::counted(8, 50), &collector, |number, _| async move {
            anyhow::ensure!(number != 7, "seven is refused");
            Ok(())
        })
        .await;
        assert_eq!((sent.accepted, sent.failed), (49, 1));
        assert_eq!(sent.first_failure.as_deref(), Some("seven is refused"));
    }

    #[tokio::test]
    async fn an_unread_backlog_stops_the_sending() {
        let collector = Arc::new(Collector::default());
        let load = Load { backlog: 5, ..Load::closed(2, Duration::from_millis(500)) };
        let sent = drive(&load, &collector, |_, _| async { Ok(()) }).await;
        assert!((6..=7).contains(&sent.accepted), "{sent:?}");
    }
}
