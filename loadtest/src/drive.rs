//! Sends, as fast as the window allows or at a fixed rate, and counts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::collector::Collector;
use crate::payload::now_micros;

/// How much is sent, and how.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    /// Requests under way at once, at most.
    pub(crate) in_flight: usize,
    /// Sends per second; `None` sends as fast as the window and the backlog allow.
    pub(crate) rate: Option<f64>,
    /// No new request after this.
    pub(crate) duration: Duration,
    /// No more requests than this.
    pub(crate) most: u64,
    /// Deliveries that each request causes.
    pub(crate) fan_out: u64,
    /// While more deliveries than this are outstanding, nothing new is sent.
    pub(crate) backlog: u64,
    /// Ends it before its time, once set.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Load {
    /// One recipient a request, as fast as possible for `duration`.
    pub(crate) fn closed(in_flight: usize, duration: Duration) -> Self {
        Self { in_flight, backlog: 10_000, ..Self::of(None, duration) }
    }

    /// One recipient a request, `rate` requests a second for `duration`.
    pub(crate) fn paced(rate: f64, duration: Duration) -> Self {
        Self::of(Some(rate), duration)
    }

    /// `count` requests to one recipient each, as fast as the window allows.
    pub(crate) fn counted(in_flight: usize, count: u64) -> Self {
        Self { in_flight, most: count, ..Self::of(None, Duration::from_secs(300)) }
    }

    fn of(rate: Option<f64>, duration: Duration) -> Self {
        let stop = Arc::default();
        Self { in_flight: 256, rate, duration, most: u64::MAX, fan_out: 1, backlog: u64::MAX, stop }
    }
}

/// What was sent.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    /// Requests that were accepted.
    pub(crate) accepted: u64,
    /// Requests that were refused, or whose answer never came.
    pub(crate) failed: u64,
    /// The first failure.
    pub(crate) first_failure: Option<String>,
    /// Microseconds from request to answer, of the accepted ones.
    pub(crate) took: Vec<u32>,
    /// At a fixed rate: how late the requests left, in microseconds; the generator's own fault.
    pub(crate) late: Vec<u32>,
}

struct Shared {
    next: AtomicU64,
    accepted: AtomicU64,
}

/// Runs `load`; `send` gets the request's number and the stamp to put into its text.
pub(crate) async fn drive<F, R>(load: &Load, collector: &Arc<Collector>, send: F) -> Sent
where
    F: Fn(u64, u64) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Result<()>> + Send,
{
    let shared = Arc::new(Shared { next: AtomicU64::new(0), accepted: AtomicU64::new(0) });
    let total = Arc::new(Mutex::new(Sent::default()));
    let start = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..load.in_flight {
        let (load, shared, total) = (load.clone(), Arc::clone(&shared), Arc::clone(&total));
        let (collector, send) = (Arc::clone(collector), send.clone());
        workers.spawn(async move {
            let mut mine = Sent::default();
            work(&load, &shared, &collector, start, &send, &mut mine).await;
            add(&mut total.lock().unwrap_or_else(PoisonError::into_inner), mine);
        });
    }
    while workers.join_next().await.is_some() {}
    std::mem::take(&mut total.lock().unwrap_or_else(PoisonError::into_inner))
}

async fn work<F, R>(load: &Load, shared: &Shared, collector: &Collector, start: Instant, send: &F, mine: &mut Sent)
where
    F: Fn(u64, u64) -> R,
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
                // A server that refuses is not to be hammered.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

fn outstanding(load: &Load, shared: &Shared, collector: &Collector) -> u64 {
    let accepted = shared.accepted.load(Ordering::Relaxed) * load.fan_out;
    accepted.saturating_sub(collector.delivered_count())
}

fn add(total: &mut Sent, one: Sent) {
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

    #[tokio::test(start_paused = true)]
    async fn a_paced_load_sends_its_rate() {
        let collector = Arc::new(Collector::default());
        let load = Load::paced(100.0, Duration::from_secs(2));
        let sent = drive(&load, &collector, |_, _| async { Ok(()) }).await;
        assert_eq!((sent.accepted, sent.failed), (200, 0));
        assert_eq!(sent.late.len(), 200);
    }

    #[tokio::test(start_paused = true)]
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

    #[tokio::test(start_paused = true)]
    async fn a_backlog_that_nobody_takes_stops_the_sending() {
        let collector = Arc::new(Collector::default());
        let load = Load { backlog: 5, ..Load::closed(2, Duration::from_secs(3)) };
        let sent = drive(&load, &collector, |_, _| async { Ok(()) }).await;
        assert!((6..=7).contains(&sent.accepted), "{sent:?}");
    }
}
