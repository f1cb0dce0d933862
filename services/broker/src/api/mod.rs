//! The listen API for drivers: HTTP and WebSocket on a loopback port. [`router`] is served from the first moment; until
//! the broker has joined the engine every route but `/health` answers 503. Main types: [`Api`], the state of all
//! routes, [`Ready`], the extractor of a broker that has joined, and [`ApiError`].

mod access;
mod agents;
mod delivery_mode;
mod error;
mod events;
mod extract;
mod inbound;
mod input_stream;
mod overview;
mod reports;
mod sending;
mod session;
mod spawning;
mod state;
mod terminal;
pub(crate) mod types;

use std::time::Duration;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    middleware,
    routing::{delete, get, post},
};

use crate::runner;

pub(crate) use error::ApiError;
pub(crate) use extract::{Ready, Upgrade};
pub(crate) use inbound::{Inbound, MAX_READ, close_too_large};
pub(crate) use spawning::{release_agent, start_agent};
pub(crate) use state::{Api, Broker, Inner};

/// Largest body of a request.
const MAX_BODY: usize = 8 << 20;
/// Published clients give up after 30 s.
const ROUTE_TIMEOUT: Duration = Duration::from_secs(25);

/// Text of the refusal of a workspace that was not joined.
const UNKNOWN_WORKSPACE: &str = "this broker is not in that workspace";

pub(crate) fn router(api: Api) -> Router {
    let sockets = Router::new()
        .route("/ws", get(events::stream))
        .route("/api/input/{name}/stream", get(input_stream::open))
        .route("/api/fleet/ws", get(runner::open));
    guard(calls().merge(sockets), &api).with_state(api)
}

/// The routes that answer once, for calls from inside.
pub(crate) fn routes(api: Api) -> Router {
    guard(calls(), &api).with_state(api)
}

fn calls() -> Router<Api> {
    Router::new()
        .route("/api/session", get(session::show))
        .route("/api/session/renew", post(session::renew))
        .route("/api/config", get(session::config))
        .route("/api/shutdown", post(session::shutdown))
        .route("/api/spawn", post(spawning::spawn))
        .route("/api/spawned", get(agents::list))
        .route("/api/spawned/{name}", delete(spawning::release))
        .route("/api/spawned/{name}/model", post(terminal::set_model))
        .route("/api/spawned/{name}/subscribe", post(agents::subscribe))
        .route("/api/spawned/{name}/unsubscribe", post(agents::unsubscribe))
        .route("/api/spawned/{name}/snapshot", get(terminal::snapshot))
        .route("/api/spawned/{name}/delivery-mode", get(delivery_mode::show).put(delivery_mode::set))
        .route("/api/spawned/{name}/pending", get(delivery_mode::pending))
        .route("/api/spawned/{name}/flush", post(delivery_mode::flush))
        .route("/api/input/{name}", post(terminal::input))
        .route("/api/resize/{name}", post(terminal::resize))
        .route("/api/send", post(sending::send))
        .route("/api/metrics", get(overview::metrics))
        .route("/api/status", get(overview::status))
        .route("/api/crash-insights", get(overview::crash_insights))
        .route("/api/preflight", post(spawning::preflight))
        .route("/api/events/replay", get(events::replay))
        .route("/api/verification", get(overview::verification).delete(overview::reset_verification))
        .route("/metrics", get(overview::prometheus))
        .route("/api/agent-result", post(reports::result))
        .route("/api/delivery-ack", post(reports::ack))
        .route("/api/dead-letters", get(reports::dead_letters))
        .route("/api/dead-letters/{delivery_id}/redeliver", post(reports::redeliver))
        // Only here: sockets last longer than any call.
        .layer(middleware::from_fn(access::limit_time))
}

fn guard(routes: Router<Api>, api: &Api) -> Router<Api> {
    routes
        // The last layer runs first: pages of other origins are refused, then callers without the key, and only then is
        // the broker's state looked at. `/health` is added after the key's layer, and needs no key.
        .layer(middleware::from_fn_with_state(api.clone(), access::require_ready))
        .layer(middleware::from_fn_with_state(api.clone(), access::require_key))
        .route("/health", get(session::health))
        .layer(middleware::from_fn_with_state(api.clone(), access::refuse_browsers))
        .fallback(error::unknown_path)
        .method_not_allowed_fallback(error::wrong_method)
        .layer(DefaultBodyLimit::max(MAX_BODY))
}
