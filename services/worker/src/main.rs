//! `relay-worker`: the loops that keep an engine tidy. Several may run; none is needed for a message to
//! be accepted or delivered, but without any, nothing expires and nothing is repaired in the background.

mod config;
mod runner;

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use relay_engine::{Engine, worker::Loops};
use relay_runtime::{metrics, settings, shutdown::Shutdown, telemetry};
use tokio::sync::OnceCell;

/// A worker that pushes makes and drops dozens of small things for each call, which the system's allocator pays for most
/// (loadtest/RESULTS.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> Result<()> {
    let Some(config) = settings::read::<config::Config>()? else { return Ok(()) };
    let _telemetry = telemetry::init("relay-worker")?;
    let recorder = metrics::install()?;
    let shutdown = Shutdown::on_signals().context("listen to signals")?;

    metrics::export("relay-worker", recorder.clone(), shutdown.token()).context("export metrics")?;
    // The probes answer from the first moment on; ready only once the loops run and Postgres answers.
    let loops: Arc<OnceCell<Arc<Loops>>> = Arc::default();
    let ready = Arc::clone(&loops);
    let readiness = Arc::new(move || ready.get().is_some_and(|loops| loops.storage_is_up()));
    let (listening, server) = metrics::serve(config.metrics_listen, recorder, readiness, shutdown.token())
        .await
        .with_context(|| format!("listen on {}", config.metrics_listen))?;
    tracing::info!(metrics.listen = %listening, "worker started");
    let server = tokio::spawn(server);

    let started = shutdown.token().run_until_cancelled_owned(Engine::start(config.engine())).await;
    let Some(engine) = started else { return Ok(()) };
    let engine = engine.context("start the engine")?;
    let mut pushing = tokio::spawn(runner::push(engine.clone(), config.push.clone(), shutdown.token()));
    let running = Arc::new(Loops::new(engine, config.retention()));
    loops.set(Arc::clone(&running)).ok().context("the loops were started twice")?;
    let stop = shutdown.token();
    let mut looping = std::pin::pin!(runner::run_all(running, &stop));
    tokio::select! {
        () = &mut looping => pushing.await.context("push deliveries")?,
        ended = &mut pushing => {
            ended.context("push deliveries")?;
            // Whatever runs this starts it again; its mailboxes have been given back.
            ensure!(stop.is_cancelled(), "pushing deliveries has ended by itself");
            looping.await;
        }
    }

    server.await.context("serve metrics")?.context("serve metrics")?;
    tracing::info!("worker drained");
    Ok(())
}
