//! Which path leads where. One function per noun; static segments win over parameters by themselves.

use axum::{
    Router, middleware as layer,
    routing::{delete, get, patch, post},
};
use tower_http::catch_panic::CatchPanicLayer;

use crate::{
    middleware, node,
    routes::{agents, channels, deliveries, dms, health, messages, nodes, send, workspaces},
    state::AppState,
};

/// All routes with what surrounds them. What must wrap even this is added in `main`.
pub fn router(state: AppState) -> Router {
    Router::new()
        .merge(health_routes())
        .merge(workspace_routes())
        .merge(agent_routes())
        .merge(channel_routes())
        .merge(node_routes())
        .merge(delivery_routes())
        .merge(message_routes())
        .merge(dm_routes())
        .merge(node::routes())
        .fallback(middleware::fallback)
        .method_not_allowed_fallback(middleware::method_fallback)
        .layer(CatchPanicLayer::custom(middleware::panicked))
        .layer(layer::from_fn(middleware::around))
        .layer(middleware::cors())
        .with_state(state)
}

fn health_routes() -> Router<AppState> {
    Router::new().route("/health", get(health::health)).route("/ready", get(health::ready))
}

fn workspace_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/workspaces", post(workspaces::create))
        .route("/v1/workspaces/by-name/{name}", get(workspaces::by_name))
        .route("/v1/workspaces/{id}", delete(workspaces::delete_by_id))
        .route("/v1/workspace", get(workspaces::info).patch(workspaces::update).delete(workspaces::delete))
}

fn agent_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/agents", post(agents::register).get(agents::list))
        .route("/v1/agents/presence", get(agents::presence))
        .route("/v1/agents/heartbeat", post(agents::heartbeat))
        .route("/v1/agents/disconnect", post(agents::disconnect))
        // Clients post to siblings of this path that later issues bring (`spawn`, `release`): until then
        // they must hear 404 `not_found`, not 405.
        .route(
            "/v1/agents/{name}",
            get(agents::get).patch(agents::update).delete(agents::delete).post(middleware::fallback),
        )
        .route("/v1/agents/{name}/rotate-token", post(agents::rotate_token))
        .route("/v1/agent", get(agents::me))
}

fn channel_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/channels", post(channels::create).get(channels::list))
        .route("/v1/channels/{name}", get(channels::get).patch(channels::update).delete(channels::archive))
        .route("/v1/channels/{name}/topic", patch(channels::set_topic))
        .route("/v1/channels/{name}/join", post(channels::join))
        .route("/v1/channels/{name}/leave", post(channels::leave))
        .route("/v1/channels/{name}/invite", post(channels::invite))
        .route("/v1/channels/{name}/members", get(channels::members))
        .route("/v1/channels/{name}/mute", post(channels::mute))
        .route("/v1/channels/{name}/unmute", post(channels::unmute))
}

fn node_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/nodes", post(nodes::enrol).get(nodes::list))
        .route("/v1/nodes/{name}", get(nodes::get))
        .route("/v1/nodes/{name}/agents", get(nodes::agents).post(nodes::bind))
        .route("/v1/nodes/{name}/agents/{agent}", delete(nodes::unbind))
        .route("/v1/nodes/{name}/providers/{provider}", delete(nodes::forget_provider))
        .route("/v1/agent/node-token", post(nodes::mint_direct_token))
}

fn delivery_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/deliveries", get(deliveries::list))
        .route("/v1/deliveries/{id}/ack", post(deliveries::ack))
        .route("/v1/deliveries/{id}/fail", post(deliveries::fail))
        .route("/v1/deliveries/{id}/defer", post(deliveries::defer))
}

fn message_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/channels/{name}/messages", get(messages::of_channel).post(send::to_channel))
        .route("/v1/messages/{id}", get(messages::get))
        .route("/v1/messages/{id}/replies", get(messages::replies).post(send::reply))
        .route("/v1/messages/{id}/read", post(messages::read))
}

fn dm_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/dm", post(send::dm))
        .route("/v1/dm/conversations", get(dms::conversations))
        .route("/v1/dm/group", post(dms::create_group))
        .route("/v1/dm/{id}/messages", get(dms::messages).post(send::to_conversation))
        .route("/v1/dm/{id}/participants", post(dms::add_participant))
        .route("/v1/dm/{id}/participants/{name}", delete(dms::remove_participant))
}
