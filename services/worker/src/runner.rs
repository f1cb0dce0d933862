//! Runs each loop on its period: one task a loop, one tick at a time, until the worker is to drain.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use relay_domain::metric_names as name;
use relay_engine::{
    Engine,
    push::{PushConfig, Pusher},
    worker::{Loop, Loops},
};
use relay_runtime::telemetry;
use tokio_util::sync::CancellationToken;

/// A loop that failed tries again after its period, but no later than this.
const RETRY_WITHIN: Duration = Duration::from_secs(10);

/// Runs all loops until `stop`, then waits for the ticks under way. A tick does a bounded amount of work,
/// so that takes seconds at most.
pub(crate) async fn run_all(loops: Arc<Loops>, stop: &CancellationToken) {
    let tasks: Vec<_> = Loop::ALL
        .into_iter()
        .map(|which| (which, tokio::spawn(run(Arc::clone(&loops), which, stop.clone()))))
        .collect();
    for (which, task) in tasks {
        if let Err(error) = task.await {
            tracing::error!(loop.name = which.name(), %error, "a loop ended by itself");
        }
    }
    loops.drain().await;
}

/// Pushes deliveries until `stop`. Waits for a Postgres that is away.
pub(crate) async fn push(engine: Engine, config: PushConfig, stop: CancellationToken) {
    stop.run_until_cancelled(engine.recovered()).await;
    while !stop.is_cancelled() {
        match Pusher::start(engine.clone(), &config, &stop).await {
            Ok(pusher) => return pusher.run().await,
            Err(error) => {
                tracing::warn!(error = telemetry::chain(&error), "waiting to push deliveries");
                // As often as a gateway asks whether storage is back.
                stop.run_until_cancelled(tokio::time::sleep(Duration::from_secs(1))).await;
            }
        }
    }
}

async fn run(loops: Arc<Loops>, which: Loop, stop: CancellationToken) {
    let mut failing_since: Option<Instant> = None;
    let mut due = Instant::now();
    while !stop.is_cancelled() {
        let began = Instant::now();
        let outcome = loops.tick(which).await;
        metrics::histogram!(name::LOOP_SECONDS, "loop" => which.name()).record(began.elapsed().as_secs_f64());
        let pause = match outcome {
            Ok(ticked) => {
                if let Some(since) = failing_since.take() {
                    let seconds = since.elapsed().as_secs();
                    tracing::info!(loop.name = which.name(), failed_seconds = seconds, "a loop works again");
                }
                metrics::gauge!(name::LOOP_LAST_SUCCESS, "loop" => which.name()).set(unix_seconds());
                metrics::counter!(name::LOOP_WORK, "loop" => which.name()).increment(ticked.worked);
                // A loop that failed for a while is as late as it failed.
                let lag = ticked.lag.unwrap_or_else(|| began.saturating_duration_since(due));
                metrics::gauge!(name::LOOP_LAG_SECONDS, "loop" => which.name()).set(lag.as_secs_f64());
                due = Instant::now() + if ticked.more { Duration::ZERO } else { which.period() };
                if ticked.more { Duration::ZERO } else { which.period() }
            }
            Err(error) => {
                metrics::counter!(name::LOOP_FAILURES, "loop" => which.name()).increment(1);
                // Once per outage: the metric tells how long it lasts.
                if failing_since.is_none() {
                    tracing::warn!(loop.name = which.name(), error = telemetry::chain(&error), "a loop failed and will retry");
                    failing_since = Some(began);
                }
                which.period().min(RETRY_WITHIN)
            }
        };
        stop.run_until_cancelled(tokio::time::sleep(pause)).await;
    }
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
