//! Measured window: counters before, load, drained deliveries, counters after.

use std::sync::Arc;

use anyhow::Result;

use crate::collector::Collector;
use crate::drive::{Load, drive};
use crate::payload::now_micros;
use crate::report::Row;
use crate::stats::Latency;
use crate::usage::{Roots, Sample, resident_kib};

/// Open window over the processes in `roots`.
pub(crate) struct Window<'a> {
    roots: &'a Roots,
    collector: &'a Arc<Collector>,
    before: Sample,
    began_at: u64,
}

impl<'a> Window<'a> {
    /// Starts counting deliveries of messages sent from now on.
    pub(crate) fn open(roots: &'a Roots, collector: &'a Arc<Collector>) -> Self {
        Self::counting_from(now_micros(), roots, collector)
    }

    /// Starts counting all deliveries, whatever the age of their message.
    pub(crate) fn open_for_old(roots: &'a Roots, collector: &'a Arc<Collector>) -> Self {
        Self::counting_from(0, roots, collector)
    }

    fn counting_from(sent_since: u64, roots: &'a Roots, collector: &'a Arc<Collector>) -> Self {
        collector.reset(sent_since);
        Self { roots, collector, before: Sample::now(roots), began_at: now_micros() }
    }

    /// Ends the window; throughput counts up to the last delivery.
    pub(crate) fn close(self, run: impl Into<String>) -> Row {
        let cpu = Sample::now(self.roots).since(&self.before);
        let delivered = self.collector.delivered_count();
        let seconds = self.collector.last_at().saturating_sub(self.began_at) as f64 / 1e6;
        Row {
            run: run.into(),
            delivered,
            seconds,
            per_second: (seconds > 0.0).then(|| delivered as f64 / seconds),
            latency: Latency::from_micros(self.collector.take_samples()),
            cpu,
            resident_kib: resident_kib(self.roots),
            problems: self.collector.problems(),
            ..Row::default()
        }
    }
}

/// Runs `load` in its own window and waits for all its deliveries.
pub(crate) async fn measure<F, R>(run: &str, roots: &Roots, collector: &Arc<Collector>, load: &Load, send: F) -> Row
where
    F: Fn(usize, u64) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Result<()>> + Send,
{
    let window = Window::open(roots, collector);
    let sent = drive(load, collector, send).await;
    let missing = collector.drain(sent.accepted * load.fan_out).await;
    let mut row = window.close(run);
    row.add_sent(sent);
    if missing > 0 {
        row.problems.push(format!("{missing} deliveries never came"));
    }
    row
}
