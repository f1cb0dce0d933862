//! The broker itself: health, session, lease, shutdown.

use axum::{Json, extract::State};
use serde_json::{Value, json};

use super::{Api, extract::Ready};
use crate::{agents::Members, clock, engine::Identity, linux, version::VERSION};

/// Version of this API.
const PROTOCOL_VERSION: u32 = 2;

/// `GET /health`: true figures, and no secret.
pub(super) async fn health(State(api): State<Api>) -> Json<Value> {
    let broker = api.broker();
    let services = broker.map(|broker| &broker.services);
    let identity = services.map(|services| &services.identity);
    let is_connected = broker.is_some_and(|broker| broker.members.are_connected());
    let agents = services.map(|services| services.agents.list()).unwrap_or_default();
    let pending: usize = agents.iter().map(|agent| agent.info.borrow().pending_count).sum();
    Json(json!({
        "status": if is_connected { "ok" } else { "degraded" },
        "service": "agent-relay-listen",
        "version": VERSION,
        "uptimeMs": clock::millis(clock::uptime()),
        "workspaceId": identity.map(|identity| &identity.workspace_id),
        "defaultWorkspaceId": identity.map(|identity| &identity.workspace_id),
        "memberships": broker.map_or_else(|| json!([]), |broker| memberships(&broker.members)),
        "agentCount": agents.len(),
        "pendingDeliveryCount": pending,
        "wsConnections": api.inner.hub.subscriber_count(),
        "memoryMb": linux::resident_bytes().await.map(|bytes| bytes >> 20),
        "relaycastConnected": is_connected,
    }))
}

/// `GET /api/session`
pub(super) async fn show(ready: Ready) -> Json<Value> {
    let services = &ready.services;
    Json(json!({
        "broker_version": VERSION,
        "protocol_version": PROTOCOL_VERSION,
        "workspace_key": services.identity.workspace_key,
        "relay_base_url": services.engine.base_url(),
        "default_workspace_id": services.identity.workspace_id,
        "mode": if ready.0.inner.lease.is_persistent() { "persist" } else { "ephemeral" },
        "uptime_secs": clock::uptime().as_secs(),
    }))
}

/// `POST /api/session/renew`
pub(super) async fn renew(ready: Ready) -> Json<Value> {
    let lease = &ready.0.inner.lease;
    Json(json!({ "renewed": true, "expires_in_secs": lease.renew(), "persist": lease.is_persistent() }))
}

/// `GET /api/config`
pub(super) async fn config(ready: Ready) -> Json<Value> {
    let identity = &ready.services.identity;
    Json(json!({
        "workspaceKey": identity.workspace_key,
        "defaultWorkspaceId": identity.workspace_id,
        "memberships": memberships(&ready.members),
    }))
}

/// `POST /api/shutdown`: answers first.
pub(super) async fn shutdown(ready: Ready) -> Json<Value> {
    // The API is served until the agents have ended, so the answer still goes out.
    ready.0.inner.stop.cancel();
    Json(json!({ "status": "shutting_down" }))
}

fn memberships(members: &Members) -> Value {
    let entry = |identity: &Identity| json!({ "workspace_id": identity.workspace_id, "workspace_alias": identity.workspace_alias });
    members.identities().map(entry).collect()
}
