//! Routes: one function per noun. Static segments take precedence over parameters.

use axum::{
    Router, middleware as layer,
    routing::{delete, get, patch, post, put},
};

use crate::{
    console, middleware, node, observe,
    routes::{
        actions::{self, triggers},
        agents::{self, session_events, spawn},
        channels::{self, conversations},
        files, health,
        mailboxes::{self, dead_letters, deliveries, inbox, insight},
        messages::{self, batch, posting, reactions, reading, webhooks},
        nodes, observers, reference, search, subscriptions,
        workspaces::{self, activity, operator, usage},
    },
    state::AppState,
};

/// Builds all routes and their middleware. Middleware that must wrap even this is added in `main`.
pub fn router(state: AppState) -> Router {
    Router::new()
        .merge(health_routes())
        .merge(reference_routes())
        .merge(workspace_routes())
        .merge(observer_routes())
        .merge(operator_routes())
        .merge(agent_routes())
        .merge(channel_routes())
        .merge(node_routes())
        .merge(delivery_routes())
        .merge(message_routes())
        .merge(activity_routes())
        .merge(dm_routes())
        .merge(file_routes())
        .merge(webhook_routes())
        .merge(subscription_routes())
        .merge(action_routes())
        .merge(trigger_routes())
        .merge(node::routes())
        .merge(observe::routes())
        .merge(console::routes())
        // After the routes: `method_not_allowed_fallback` applies only to routes added before it. Before the layer,
        // which wraps both.
        .fallback(middleware::fallback)
        .method_not_allowed_fallback(middleware::method_fallback)
        .layer(layer::from_fn_with_state(state.clone(), middleware::serve_request))
        .with_state(state)
}

fn health_routes() -> Router<AppState> {
    Router::new().route("/health", get(health::health)).route("/ready", get(health::ready))
}

fn reference_routes() -> Router<AppState> {
    Router::new().route("/openapi.json", get(reference::openapi)).route("/docs", get(reference::page))
}

fn workspace_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/workspaces", post(workspaces::create))
        .route("/v1/workspaces/by-name/{name}", get(workspaces::by_name))
        .route("/v1/workspaces/{id}", delete(workspaces::delete_by_id))
        .route("/v1/workspace", get(workspaces::info).patch(workspaces::update).delete(workspaces::delete))
}

fn observer_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/observer-tokens", post(observers::create).get(observers::list))
        .route("/v1/observer-tokens/{id}", get(observers::get).patch(observers::update).delete(observers::revoke))
        .route("/v1/observer-tokens/{id}/rotate", post(observers::rotate))
}

fn operator_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/operator/workspaces", post(operator::create_workspace))
        .route("/v1/operator/workspaces/{id}/quotas", get(operator::quotas).put(operator::set_quotas))
        .route("/v1/operator/signing-keys", get(operator::signing_keys).post(operator::rotate_signing_key))
        .route("/v1/operator/signing-keys/{kid}", delete(operator::retire_signing_key))
}

fn agent_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/agents", post(agents::register).get(agents::list))
        .route("/v1/agents/presence", get(agents::presence))
        .route("/v1/agents/heartbeat", post(agents::heartbeat))
        .route("/v1/agents/disconnect", post(agents::disconnect))
        .route("/v1/agents/spawn", post(spawn::spawn))
        .route("/v1/agents/release", post(spawn::release))
        .route("/v1/agents/release-exact", post(spawn::release_exact))
        // Clients probe for siblings of this path: they must get 404 `not_found`, not 405.
        .route(
            "/v1/agents/{name}",
            get(agents::get).patch(agents::update).delete(agents::delete).post(middleware::fallback),
        )
        .route("/v1/agents/{name}/rotate-token", post(agents::rotate_token))
        .route("/v1/agents/{name}/events", post(session_events::report).get(session_events::list))
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
        .route("/v1/channels/{name}/read-status", get(reading::read_status))
}

fn node_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/nodes", post(nodes::enrol).get(nodes::list))
        .route("/v1/nodes/{name}", get(nodes::get).patch(nodes::change).delete(nodes::delete))
        .route("/v1/nodes/{name}/agents", get(nodes::agents).post(nodes::bind))
        .route("/v1/nodes/{name}/agents/{agent}", delete(nodes::unbind))
        .route("/v1/nodes/{name}/providers/{provider}", delete(nodes::forget_provider))
        .route("/v1/agent/node-token", post(nodes::mint_direct_token))
}

fn delivery_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/deliveries", get(deliveries::list))
        .route("/v1/observe/mailboxes", get(mailboxes::list))
        .route("/v1/dead-letters", get(dead_letters::list))
        .route("/v1/dead-letters/summary", get(dead_letters::summary))
        .route("/v1/dead-letters/redrive", post(dead_letters::redrive))
        .route("/v1/dead-letters/redrives/{id}", get(dead_letters::progress))
        .route("/v1/dead-letters/purge", post(dead_letters::purge))
        .route("/v1/dead-letters/{id}", get(dead_letters::get).delete(dead_letters::purge_one))
        .route("/v1/deliveries/claim", post(deliveries::claim))
        .route("/v1/deliveries/{id}/attempts", get(deliveries::attempts))
        .route("/v1/deliveries/{id}/ack", post(deliveries::ack))
        .route("/v1/deliveries/{id}/fail", post(deliveries::fail))
        .route("/v1/deliveries/{id}/defer", post(deliveries::defer))
}

fn message_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/channels/{name}/messages", get(messages::of_channel).post(posting::to_channel))
        .route("/v1/agents/{name}/subscription-channel", post(channels::subscription))
        .route("/v1/to/{address}", post(posting::to_address))
        .route("/v1/sessions/{session_ref}/messages", get(messages::of_session))
        .route("/v1/messages/batch", post(batch::post))
        .route("/v1/messages/{id}", get(messages::get).patch(messages::update))
        .route("/v1/messages/{id}/replies", get(messages::replies).post(posting::reply))
        .route("/v1/messages/{id}/read", post(messages::read))
        .route("/v1/messages/{id}/readers", get(reading::readers))
        .route("/v1/messages/{id}/reactions", get(reactions::reactions).post(reactions::react))
        .route("/v1/messages/{id}/reactions/{emoji}", delete(reactions::unreact))
        .route("/v1/inbox", get(inbox::get))
        .route("/v1/search", get(search::search))
}

fn activity_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/activity", get(activity::activity))
        .route("/v1/workspace/metrics", get(insight::metrics))
        .route("/v1/workspace/usage", get(usage::usage))
        .route("/v1/messages/{id}/trace", get(insight::trace))
        .route("/v1/console/messages", get(activity::console_messages))
        .route("/v1/console/stats", get(activity::stats))
        .route("/v1/console/agents", get(activity::console_agents))
        .route("/v1/console/costs", get(activity::costs))
        .route("/v1/workspace/system-prompt", get(activity::system_prompt).put(activity::set_system_prompt))
}

fn dm_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/dm", post(posting::dm))
        .route("/v1/dm/conversations", get(conversations::conversations))
        .route("/v1/dm/conversations/all", get(conversations::all))
        .route("/v1/dm/conversations/{id}/messages", get(conversations::any_messages))
        .route("/v1/dm/group", post(conversations::create_group))
        .route("/v1/dm/{id}/messages", get(conversations::messages).post(posting::to_conversation))
        .route("/v1/dm/{id}/participants", post(conversations::add_participant))
        .route("/v1/dm/{id}/participants/{name}", delete(conversations::remove_participant))
}

fn file_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/files/upload", post(files::upload))
        .route("/v1/files", get(files::list))
        .route("/v1/files/{id}", get(files::get).delete(files::delete))
        .route("/v1/files/{id}/complete", post(files::complete))
        .route("/_relayfiles", put(files::receive).get(files::send))
}

fn webhook_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/webhooks", post(webhooks::create).get(webhooks::list))
        .route("/v1/webhooks/{id}", delete(webhooks::delete))
        .route("/v1/hooks/{id}", post(webhooks::receive))
}

fn action_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/actions", post(actions::define).get(actions::list))
        .route("/v1/actions/{name}", get(actions::get).delete(actions::delete))
        .route("/v1/actions/{name}/invoke", post(actions::invoke))
        .route("/v1/actions/{name}/invocations/{id}", get(actions::invocation))
        .route("/v1/actions/{name}/invocations/{id}/complete", post(actions::complete))
        .route("/v1/nodes/{name}/actions/{action}/invoke", post(actions::invoke_on_node))
}

fn subscription_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/subscriptions", post(subscriptions::create).get(subscriptions::list))
        .route("/v1/subscriptions/{id}", get(subscriptions::get).delete(subscriptions::delete))
        .route("/v1/subscriptions/{id}/replay", post(subscriptions::replay_since))
        .route("/v1/subscriptions/{id}/deliveries", get(subscriptions::deliveries))
        .route("/v1/subscriptions/{id}/deliveries/{delivery}/replay", post(subscriptions::replay))
}

fn trigger_routes() -> Router<AppState> {
    Router::new()
        .route("/v1/triggers", post(triggers::create).get(triggers::list))
        .route("/v1/triggers/{id}", get(triggers::get).patch(triggers::update).delete(triggers::delete))
}
