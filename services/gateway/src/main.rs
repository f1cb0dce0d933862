//! Starts a gateway.

use std::{future::IntoFuture as _, sync::Arc, time::Duration};

use anyhow::Context as _;
use axum::{ServiceExt as MakeServiceExt, extract::Request, serve::ListenerExt as _};
use relay_domain::metric_names as name;
use relay_engine::{
    Engine, EngineConfig,
    limits::LimitsConfig,
    observers::SealingSecret,
    operators::{IssuerConfig, Operators, OperatorsConfig},
    recovery::Standing,
};
use relay_gateway::{
    config::{Config, Switch},
    middleware,
    node::Registry,
    router,
    state::AppState,
    stuck::{Guarded, Peer},
};
use relay_runtime::{metrics, settings, shutdown::Shutdown, telemetry};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// A gateway allocates small things at a high rate from several threads, which the system's allocator
/// pays for most (loadtest/RESULTS.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Sockets are closed over this long, so that their nodes do not all come back in the same moment.
const DRAIN_SPREAD: Duration = Duration::from_secs(5);
/// How long requests under way may take at the end. What comes after them has its time before the process ends hard.
const REQUESTS_WITHIN: Duration = Duration::from_secs(15);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Some(config) = settings::read::<Config>()? else { return Ok(()) };
    let _telemetry = telemetry::init("relay-gateway")?;
    let shutdown = Shutdown::on_signals().context("listen for signals")?;
    let recorder = metrics::install()?;
    // There from the start, so that a gateway without nodes is told from no gateway.
    for gauge in [name::CONNECTED_NODES, name::CONNECTED_AGENTS] {
        ::metrics::gauge!(gauge).set(0);
    }

    let engine = Engine::start(EngineConfig {
        database_url: config.database_url,
        nats_url: config.nats_url,
        nats_replicas: config.nats_replicas,
        database_connections: config.database_connections,
        restore_margin: config.restore_margin,
        limits: LimitsConfig { requests: config.rate_limits == Switch::On, plans: config.plans },
        files: config.files,
        secret_keys: config.secret_keys,
        egress: config.egress,
    })
    .await
    .context("start the engine")?;

    // Before the first request: a revoked token must not pass because this process has just started.
    let secret =
        config.signing_secret.as_deref().map(SealingSecret::new).transpose().context("RELAY_SIGNING_SECRET")?;
    engine.serve_observers(secret).await.context("load what is known of observer tokens")?;
    let operators = Operators::new(OperatorsConfig {
        bootstrap_secret: config.bootstrap_secret,
        issuer: config.operator_issuer.zip(config.operator_audience).map(|(issuer, audience)| IssuerConfig {
            issuer,
            audience,
            jwks_url: config.operator_jwks_url,
        }),
        hosted: config.hosted == Switch::On,
    })
    .context("know the operators")?;
    let state = AppState::new(engine.clone(), shutdown.clone(), config.trusted_proxies, operators)
        .with_public_url(config.public_url);
    tokio::spawn(state.clone().watch_storage());
    let registry = state.registry.clone();
    tokio::spawn(close_after_recovery(engine.clone(), registry.clone()));
    let gateway_id = state.gateway_id;
    // The lease comes before the first socket: who holds none counts as dead.
    while let Err(error) = engine.renew_lease(gateway_id).await {
        tracing::warn!(error = &error as &dyn std::error::Error, "waiting for a lease");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // Its loops, the lease above all, go on while the sockets drain.
    let drained = CancellationToken::new();
    let loops = tokio::spawn(registry.clone().run(engine.clone(), gateway_id, drained.clone()));
    let drain = tokio::spawn({
        let (registry, shutdown) = (registry.clone(), shutdown.clone());
        async move {
            shutdown.asked().await;
            registry.drain(DRAIN_SPREAD, 1012, "draining").await;
        }
    });
    let ready = state.clone();
    metrics::export("relay-gateway", recorder.clone(), shutdown.token()).context("export metrics")?;
    let (metrics_addr, metrics_server) =
        metrics::serve(config.metrics_listen, recorder, Arc::new(move || ready.is_ready()), shutdown.token())
            .await
            .with_context(|| format!("listen on {} for metrics", config.metrics_listen))?;
    tokio::spawn(metrics_server);

    let listener = TcpListener::bind(config.listen).await.with_context(|| format!("listen on {}", config.listen))?;
    tracing::info!(listen = %listener.local_addr()?, metrics = %metrics_addr, "gateway is up");
    let listener = listener.tap_io(|socket| {
        // Frames and answers are small and waited for.
        let _ = socket.set_nodelay(true);
    });
    let service = router::router(state)
        .map_request(middleware::collapse_leading_slashes)
        .map_response(middleware::hang_up_if_marked);
    let late = shutdown.clone();
    let served =
        axum::serve(Guarded(listener), MakeServiceExt::<Request>::into_make_service_with_connect_info::<Peer>(service))
            .with_graceful_shutdown(async move { shutdown.asked().await });
    tokio::select! {
        served = served.into_future() => served.context("serve")?,
        // What remains must be done before the process ends hard.
        () = async { late.asked().await; tokio::time::sleep(REQUESTS_WITHIN).await } => {
            tracing::warn!("some requests have not ended in time");
        }
    }
    drain.await.context("drain the sockets")?;
    let emptied = async {
        while registry.connections() > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let _ = tokio::time::timeout(DRAIN_SPREAD, emptied).await;
    if let Err(error) = engine.flush_cursors().await {
        tracing::warn!(error = &error as &dyn std::error::Error, "the last acks were not written");
    }
    if let Err(error) = engine.release_lease(gateway_id).await {
        tracing::warn!(error = &error as &dyn std::error::Error, "the lease runs out by itself");
    }
    drained.cancel();
    loops.await.context("end the socket loops")?;
    tracing::info!("gateway is drained");
    Ok(())
}

/// After a recovery sockets begin anew: what their sessions know was said by a database that is gone.
async fn close_after_recovery(engine: Engine, registry: Registry) {
    let mut standing = engine.watch_standing();
    let mut round = 0;
    loop {
        match *standing.borrow_and_update() {
            Standing::Open(now) if now > round => {
                round = now;
                let registry = registry.clone();
                tokio::spawn(async move { registry.drain(DRAIN_SPREAD, 1012, "recovered").await });
            }
            _ => {}
        }
        if standing.changed().await.is_err() {
            return;
        }
    }
}
