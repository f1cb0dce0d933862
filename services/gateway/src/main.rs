//! `relay-gateway`: starts the engine, the sockets and the HTTP server, and drains them on shutdown.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context as _;
use axum::{
    Router,
    extract::{ConnectInfo, Request},
    http::{HeaderValue, header::CONNECTION},
    response::{IntoResponse as _, Response},
};
use relay_domain::{GatewayId, metric_names as name};
use relay_engine::{
    Engine, EngineConfig,
    access::{
        limits::LimitsConfig,
        operators::{IssuerConfig, Operators, OperatorsConfig},
    },
    observers::SealingSecret,
    recovery::Readiness,
};
use relay_gateway::{
    config::{Config, Switch},
    connections::{Admission, Connections, PeerAddress},
    error::{ApiError, DropConnection},
    middleware,
    node::Registry,
    router,
    state::AppState,
};
use relay_runtime::{
    allocator, metrics,
    server::{self, Timeouts},
    settings,
    shutdown::Shutdown,
    telemetry,
};
use relay_tasks::{TaskSet, spawn_isolated};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// A gateway allocates small objects at a high rate from several threads, which is slow with the system's allocator
/// (loadtest/RESULTS.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Period over which sockets are closed, so that their nodes do not all reconnect at once.
const DRAIN_SPREAD: Duration = Duration::from_secs(5);
/// Time for requests in flight at shutdown. The later steps need the rest of the hard limit.
const REQUEST_DRAIN_TIMEOUT: Duration = Duration::from_secs(15);
/// Below the 30 s of a request, so that a statement ends before its request is given up.
const STATEMENT_LIMIT: Duration = Duration::from_secs(15);
/// Open files that are no connections of clients: to Postgres and NATS, of logs and stored files.
const RESERVED_FILES: usize = 512;

fn main() -> anyhow::Result<()> {
    // Before `run`, whose runtime starts the threads that both settings are for.
    allocator::return_freed_memory();
    allocator::disable_huge_pages();
    run()
}

#[tokio::main]
async fn run() -> anyhow::Result<()> {
    let Some(config) = settings::read::<Config>()? else { return Ok(()) };
    // Bound to a name, because `_` would drop it here. Its end exports the last spans.
    let _telemetry = telemetry::init("relay-gateway")?;
    let shutdown = Shutdown::on_signals().context("listen for signals")?;
    let recorder = metrics::install()?;
    if config.hosted == Switch::On {
        config.security().warn();
    }
    // Set at start, so that a gateway without nodes differs from a missing gateway.
    for gauge in [name::CONNECTED_NODES, name::CONNECTED_AGENTS] {
        ::metrics::gauge!(gauge).set(0);
    }

    let tasks = TaskSet::new(shutdown.token());
    // The start waits for Postgres without limit, so a signal must end it.
    let started = shutdown.token().run_until_cancelled_owned(start_engine(&config, &tasks)).await;
    let Some(engine) = started else { return Ok(tasks.check()?) };
    let engine = engine?;
    let operators = configure_operators(&config)?;
    let connections = count_connections(&config);
    let state = AppState::new(engine.clone(), shutdown.clone(), connections, operators, config.public_url);
    tasks.spawn("storage-probe", state.clone().watch_storage());
    let registry = state.registry.clone();
    tasks.spawn("recovery-watch", close_after_recovery(engine.clone(), registry.clone()));
    let gateway_id = state.gateway_id;
    // The lease precedes the first socket: a gateway without a lease counts as expired.
    let leased = shutdown.token().run_until_cancelled_owned(wait_for_lease(&engine, gateway_id)).await;
    if leased.is_none() {
        return Ok(tasks.check()?);
    }
    // The loops, above all the lease renewal, continue while the sockets drain.
    let drained = CancellationToken::new();
    let copies = registry.clone().run_live_copies(engine.clone(), gateway_id, drained.clone());
    tasks.spawn("live-copies", copies);
    let loops = tasks.spawn("socket-loops", registry.clone().run(engine.clone(), gateway_id, drained.clone()));
    let drain = tasks.spawn("drain", {
        let (registry, shutdown) = (registry.clone(), shutdown.clone());
        async move {
            shutdown.wait_requested().await;
            registry.drain(DRAIN_SPREAD, 1012, "draining").await;
        }
    });
    let ready = state.clone();
    let export = metrics::export_metrics("relay-gateway", recorder.clone(), shutdown.token());
    if let Some(export) = export.context("export metrics")? {
        tasks.spawn("metrics-export", export);
    }
    let (metrics_addr, metrics_server) =
        metrics::serve(config.metrics_listen, recorder, Arc::new(move || ready.is_ready()), shutdown.token())
            .await
            .with_context(|| format!("listen on {} for metrics", config.metrics_listen))?;
    tasks.spawn("metrics-server", metrics_server);

    // Last: a client that connects finds the lease taken and the loops running.
    let listener = TcpListener::bind(config.listen).await.with_context(|| format!("listen on {}", config.listen))?;
    tracing::info!(listen = %listener.local_addr()?, metrics = %metrics_addr, "gateway started");
    serve_requests(listener, state, shutdown, config.connections.timeouts()).await;
    drain.await.context("drain the sockets")?;
    // Acks are stored after the sockets have ended, and the lease is released last: other processes take its end for
    // the end of the sockets.
    finish_connections(&engine, &registry).await;
    // Before the release: a renewal after it would insert the lease again.
    drained.cancel();
    loops.await.context("stop the socket loops")?;
    if let Err(error) = engine.processes().release_lease(gateway_id).await {
        tracing::warn!(error = &error as &dyn std::error::Error, "failed to release the gateway lease, it will expire");
    }
    tracing::info!("gateway drained");
    Ok(tasks.check()?)
}

async fn start_engine(config: &Config, tasks: &TaskSet) -> anyhow::Result<Engine> {
    let settings = EngineConfig {
        database: config.database.address(),
        nats: config.nats.servers(),
        nats_replicas: config.nats_replicas,
        database_connections: config.database_connections,
        statement_limit: STATEMENT_LIMIT,
        restore_margin: config.restore_margin,
        limits: LimitsConfig {
            requests: config.rate_limits == Switch::On,
            plans: config.plans,
            default_plan: config.default_plan(),
        },
        files: config.files.clone(),
        secret_keys: config.secret_keys.clone(),
        egress: config.egress.clone(),
    };
    let engine = Engine::start(settings, tasks).await.context("start the engine")?;
    // Loaded before the first request: a token revoked earlier must not pass because this process has just started.
    let secret =
        config.signing_secret.as_deref().map(SealingSecret::new).transpose().context("RELAY_SIGNING_SECRET")?;
    engine.observers().serve(secret).await.context("load observer tokens")?;
    Ok(engine)
}

/// Takes the lease of this gateway, however long Postgres is unavailable.
async fn wait_for_lease(engine: &Engine, gateway_id: GatewayId) {
    while let Err(error) = engine.processes().renew_lease(gateway_id).await {
        tracing::warn!(error = &error as &dyn std::error::Error, "gateway lease unavailable, retrying");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

fn configure_operators(config: &Config) -> anyhow::Result<Operators> {
    let issuer = config.operator_issuer.clone().zip(config.operator_audience.clone());
    Operators::new(OperatorsConfig {
        bootstrap_secret: config.bootstrap_secret.clone(),
        issuer: issuer.map(|(issuer, audience)| IssuerConfig {
            issuer,
            audience,
            jwks_url: config.operator_jwks_url.clone(),
        }),
        hosted: config.hosted == Switch::On,
    })
    .context("configure the operators")
}

/// Creates the counts of connections, which may not need more files than the process may open.
fn count_connections(config: &Config) -> Connections {
    let mut limits = config.connections.clone();
    if let Some(files) = server::raise_file_limit() {
        let most = usize::try_from(files).unwrap_or(usize::MAX).saturating_sub(RESERVED_FILES).max(1);
        if most < limits.max_connections {
            tracing::info!(
                files,
                max_connections = most,
                "the limit of open files allows fewer connections than configured"
            );
            limits.max_connections = most;
        }
    }
    Connections::new(&limits, config.trusted_proxies.clone())
}

/// Serves HTTP until shutdown is requested, then finishes requests in flight within [`REQUEST_DRAIN_TIMEOUT`].
async fn serve_requests(listener: TcpListener, state: AppState, shutdown: Shutdown, timeouts: Timeouts) {
    let connections = state.connections.clone();
    let router = router::router(state);
    let accept = move |peer| {
        let admission = Arc::new(connections.admit(peer)?);
        let (admitted, router) = (Arc::clone(&admission), router.clone());
        Some((move |request| answer(router.clone(), Arc::clone(&admitted), peer, request), admission))
    };
    tokio::select! {
        () = server::serve(listener, timeouts, accept, shutdown.token()) => {}
        // The remaining steps must finish before the hard stop.
        () = async { shutdown.wait_requested().await; tokio::time::sleep(REQUEST_DRAIN_TIMEOUT).await } => {
            tracing::warn!("requests still in flight after the drain timeout, closing them");
        }
    }
}

/// Answers one request of a connection. An error closes the connection without a status.
async fn answer(
    router: Router,
    admission: Arc<Admission>,
    peer: SocketAddr,
    mut request: Request,
) -> Result<Response, DropConnection> {
    // An answer instead of a closed connection: published clients retry a 503 with the same token and increasing
    // delays.
    if let Admission::Refused(limit, _) = &*admission {
        let mut refusal = ApiError::too_many_connections(*limit).into_response();
        refusal.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        return Ok(refusal);
    }
    request.extensions_mut().insert(ConnectInfo(PeerAddress(peer)));
    // A router cannot fail: its errors are answers already.
    let Ok(response) = router.oneshot(middleware::collapse_leading_slashes(request)).await;
    match response.extensions().get::<DropConnection>() {
        Some(drop) => Err(*drop),
        None => Ok(response),
    }
}

/// Waits for the connections to end, and stores their last acks.
async fn finish_connections(engine: &Engine, registry: &Registry) {
    let emptied = async {
        while registry.connections() > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    // Sockets that are open after it end with the process; rows without an ack are sent again elsewhere, under the
    // same ids.
    let _ = tokio::time::timeout(DRAIN_SPREAD, emptied).await;
    if let Err(error) = engine.mailboxes().flush_cursors().await {
        tracing::warn!(error = &error as &dyn std::error::Error, "failed to store the last acks");
    }
}

/// Closes all sockets after a recovery: their streams hold positions of the lost database.
async fn close_after_recovery(engine: Engine, registry: Registry) {
    let mut standing = engine.recovery().watch_readiness();
    // 0: the database has not changed since this process first opened it, so no socket holds outdated positions.
    let mut round = 0;
    loop {
        if let Readiness::Open(now) = *standing.borrow_and_update()
            && now > round
        {
            round = now;
            // Not awaited: another recovery may begin while the sockets close one after the other.
            let registry = registry.clone();
            spawn_isolated("drain", async move { registry.drain(DRAIN_SPREAD, 1012, "recovered").await });
        }
        if standing.changed().await.is_err() {
            return;
        }
    }
}
