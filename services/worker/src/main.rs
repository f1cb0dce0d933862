//! `relay-worker`: background loops of an engine and the http_push dispatcher. Several may run. Accepting and
//! delivering messages over sockets needs no worker, but without one nothing expires and nothing is repaired in the
//! background.

mod config;
mod dispatch;
mod loops;
mod runner;
mod uptime;

use std::sync::Arc;

use anyhow::{Context as _, Result};
use relay_dispatch::destinations::Destinations;
use relay_engine::{Engine, settings::Switch};
use relay_runtime::{allocator, metrics, settings, shutdown::Shutdown, telemetry};
use relay_tasks::TaskSet;
use tokio::sync::OnceCell;

use loops::Loops;

/// Dispatching makes many small allocations per call, which are slow with the system's allocator
/// (loadtest/RESULTS.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

// `run` starts the runtime. The allocator is set up before, while there are no other threads.
fn main() -> Result<()> {
    allocator::return_freed_memory();
    allocator::disable_huge_pages();
    run()
}

#[tokio::main]
async fn run() -> Result<()> {
    let Some(config) = settings::read::<config::Config>()? else { return Ok(()) };
    let _telemetry = telemetry::init("relay-worker")?;
    let recorder = metrics::install()?;
    if config.hosted == Switch::On {
        config.security().warn();
    }
    let shutdown = Shutdown::on_signals().context("listen to signals")?;

    let tasks = TaskSet::new(shutdown.token());
    let export = metrics::export_metrics("relay-worker", recorder.clone(), shutdown.token());
    if let Some(export) = export.context("export metrics")? {
        tasks.spawn("metrics-export", export);
    }
    // The probes answer from the start; the worker is ready once the loops run and Postgres answers.
    let loops: Arc<OnceCell<Arc<Loops>>> = Arc::default();
    let ready = Arc::clone(&loops);
    let readiness = Arc::new(move || ready.get().is_some_and(|loops| loops.storage_is_up()));
    let (listening, server) = metrics::serve(config.metrics_listen, recorder, readiness, shutdown.token())
        .await
        .with_context(|| format!("listen on {}", config.metrics_listen))?;
    tracing::info!(metrics.listen = %listening, "worker started");
    let server = tasks.spawn("metrics-server", server);

    // The start waits for Postgres without limit, so a signal must end it.
    let started = shutdown.token().run_until_cancelled_owned(Engine::start(config.engine(), &tasks)).await;
    let Some(engine) = started else { return Ok(tasks.check()?) };
    let engine = engine.context("start the engine")?;
    let destinations = Arc::new(Destinations::new(config.destinations.clone()));
    let (push, stop) = (config.push.clone(), shutdown.token());
    let pusher = runner::run_pusher(engine.clone(), push, Arc::clone(&destinations), stop);
    let dispatching = tasks.spawn("push-dispatcher", pusher);
    let running = Arc::new(Loops::new(engine, config.retention(), destinations));
    loops.set(Arc::clone(&running)).ok().context("the loops were started twice")?;
    // After a signal the loops and the dispatcher drain side by side; the order of the waits does not matter.
    runner::run_loops(running, &tasks, &shutdown.token()).await;
    dispatching.await.context("dispatch http_push deliveries")?;
    server.await.context("serve metrics")?;
    tracing::info!("worker drained");
    Ok(tasks.check()?)
}
