//! Runs each worker loop on its period: one task per loop, one tick at a time, until the worker drains.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use relay_dispatch::{
    destinations::Destinations,
    push::{PushConfig, PushDispatcher},
};
use relay_domain::metric_names as name;
use relay_engine::{Engine, tick::TickOutcome};
use relay_runtime::telemetry;
use relay_tasks::TaskSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    dispatch::EnginePushQueue,
    loops::{Loop, Loops},
};

/// Maximum delay before a failed loop is retried; shorter periods are kept.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);

/// Time after which a loop that waits for work ticks without any: some do more than they wait for, such as removing
/// rows that have become old, and a condition that misses work costs no more than this.
const TICK_AT_LEAST_EVERY: Duration = Duration::from_secs(60);

/// Runs all loops until `stop`, then waits for ticks in progress. A tick does a bounded amount of work and takes
/// seconds at most.
pub(crate) async fn run_loops(loops: Arc<Loops>, tasks: &TaskSet, stop: &CancellationToken) {
    let start = |which: Loop| tasks.spawn(which.name(), run_loop(Arc::clone(&loops), which, stop.clone()));
    let running: Vec<_> = Loop::ALL.into_iter().map(start).collect();
    let (recording, stopped) = (Arc::clone(&loops), stop.clone());
    // Ends at `stop`: the set would take an earlier end for a failure.
    tasks.spawn("uptime", async move { _ = stopped.run_until_cancelled(recording.record_reads()).await });
    for task in running {
        // Its end, if unexpected, has been recorded by the set.
        let _ = task.await;
    }
    loops.drain().await;
}

/// Runs the http_push dispatcher until `stop`. Waits while Postgres is unavailable. A recovery of the database ends the
/// dispatcher, whose positions may be those of lost deliveries, and another one begins.
pub(crate) async fn run_pusher(
    engine: Engine,
    config: PushConfig,
    destinations: Arc<Destinations>,
    stop: CancellationToken,
) {
    while !stop.is_cancelled() {
        stop.run_until_cancelled(engine.recovery().wait_until_ready()).await;
        let serving = stop.child_token();
        // Its tasks end with it.
        let tasks = TaskSet::new(serving.clone());
        let queue = Arc::new(EnginePushQueue::new(engine.clone()));
        let mut readiness = engine.recovery().watch_readiness();
        // Read before the dispatcher starts: a recovery during the start ends it as well.
        let opened = *readiness.borrow_and_update();
        match PushDispatcher::start(queue, &config, Arc::clone(&destinations), &tasks, &serving).await {
            Ok(pusher) => {
                // Fails only when the engine was dropped.
                let closed = async { drop(readiness.wait_for(|readiness| *readiness != opened).await) };
                let running = pusher.run();
                tokio::pin!(running);
                tokio::select! {
                    // If it was not asked to stop, the supervised set drains the process.
                    () = &mut running => return,
                    () = closed => serving.cancel(),
                }
                // Its attempts end and its mailboxes are released before the next dispatcher begins.
                running.await;
            }
            Err(error) => {
                tracing::warn!(
                    error = telemetry::format_error_chain(&error),
                    "http_push dispatcher could not start, retrying"
                );
                // The interval at which gateways check storage.
                stop.run_until_cancelled(tokio::time::sleep(Duration::from_secs(1))).await;
            }
        }
    }
}

async fn run_loop(loops: Arc<Loops>, which: Loop, stop: CancellationToken) {
    let mut failing_since: Option<Instant> = None;
    let mut work = loops.watch_work(which);
    let mut due = Instant::now();
    while stop.run_until_cancelled(loops.wait_until_ready()).await.is_some() {
        let began = Instant::now();
        let outcome = loops.tick(which).await;
        metrics::histogram!(name::LOOP_SECONDS, "loop" => which.name()).record(began.elapsed().as_secs_f64());
        let mut is_idle = false;
        let pause = match outcome {
            Ok(ticked) => {
                if let Some(since) = failing_since.take() {
                    let seconds = since.elapsed().as_secs();
                    tracing::info!(loop.name = which.name(), failed_seconds = seconds, "worker loop recovered");
                }
                metrics::gauge!(name::LOOP_LAST_SUCCESS, "loop" => which.name()).set(unix_seconds());
                metrics::counter!(name::LOOP_WORK, "loop" => which.name()).increment(ticked.worked);
                // A loop that measures no lag of its own is late by the delay of its start.
                let lag = ticked.lag.unwrap_or_else(|| began.saturating_duration_since(due));
                metrics::gauge!(name::LOOP_LAG_SECONDS, "loop" => which.name()).set(lag.as_secs_f64());
                is_idle = ticked.is_idle();
                let pause = match ticked {
                    TickOutcome { more: true, .. } => Duration::ZERO,
                    _ if is_idle => which.idle_period(),
                    _ => which.period(),
                };
                due = Instant::now() + pause;
                pause
            }
            Err(error) => {
                metrics::counter!(name::LOOP_FAILURES, "loop" => which.name()).increment(1);
                // Logged once per outage: the metric shows how long it lasts.
                if failing_since.is_none() {
                    let error = telemetry::format_error_chain(&error);
                    tracing::warn!(loop.name = which.name(), error, "worker loop failed, retrying");
                    failing_since = Some(began);
                }
                which.period().min(MAX_RETRY_DELAY)
            }
        };
        stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        if let (true, Some(work)) = (is_idle, &mut work) {
            // Does not underflow: loops that wait for work have periods of at most two seconds.
            stop.run_until_cancelled(tokio::time::timeout(TICK_AT_LEAST_EVERY - pause, work.wait())).await;
            // The wait for work is no lag.
            due = Instant::now();
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "Prometheus compares it with its own clock")]
fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
