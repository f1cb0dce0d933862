//! Nodes: enrolment, roster, bindings, and the token of an agent's own node. Answers are [`wire::Node`].

use axum::{extract::State, http::HeaderMap};
use relay_domain::{
    access::token::TokenKind,
    nodes::{
        LISTED_NODES, Liveness, NodeProvider, NodeRole, RosterNode,
        roster::{NodeFilter, NodeListPosition},
    },
};
use relay_engine::{
    Engine,
    agents::bindings,
    nodes::roster::{HeldNode, NodeList, NodeTokenRequest},
};
use relay_wire::{envelope::Success, nodes as wire};

use crate::{
    caller::{Agent, ReaderOrAgent, WorkspaceKey, reads},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path, Query},
    list_reply::ListReply,
    routes::page,
};

/// Header that proves possession of a node's token; a published client sends it.
const NODE_TOKEN_HEADER: &str = "x-relaycast-node-token";

/// Creates or updates a node and creates a new token for it.
///
/// The previous token is revoked and its sockets close, unless `rotate` is false and the header
/// `X-Relaycast-Node-Token` has the node's present token, which then stays. Omitted fields keep their stored values.
#[utoipa::path(
    post, path = "/v1/nodes", tag = "nodes",
    security(("workspace_key" = [])), request_body(content = wire::EnrolNodeBody, example = json!({ "name": "build-box", "capabilities": ["spawn:claude"], "max_agents": 8 })),
    responses(
        (status = 201, body = wire::EnrolledNode),
        (status = 400, description = "invalid_node_name, invalid_node_delivery, unsafe_node_delivery_url, direct_node_capacity_exceeded"),
        (status = 401, description = "node_token_invalid"),
        (status = 404, description = "node_not_found"),
        (status = 409, description = "node_name_conflict"),
        (status = 429, description = "plan_limit_exceeded"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.enrol", skip_all)]
pub async fn enrol(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    headers: HeaderMap,
    Body(body): Body<wire::EnrolNodeBody>,
) -> Result<Reply<wire::EnrolledNode>, ApiError> {
    let token = match body.rotate {
        Some(false) => NodeTokenRequest::Keep(presented_node_token(&headers)?),
        Some(true) | None => NodeTokenRequest::Rotate,
    };
    let enrolled = engine.nodes().enrol(caller.scope, body, token).await?;
    let HeldNode { node, memory } = enrolled.node;
    Ok(Reply::created(wire::EnrolledNode { node: to_node(node), token: enrolled.token }).holding(memory))
}

/// Returns the node token of the header that proves its possession.
fn presented_node_token(headers: &HeaderMap) -> Result<String, ApiError> {
    let token = headers.get(NODE_TOKEN_HEADER).and_then(|value| value.to_str().ok()).map(str::trim);
    token
        .filter(|token| TokenKind::from_prefix(token) == Some(TokenKind::Node))
        .map(ToOwned::to_owned)
        .ok_or_else(|| ApiError::invalid_request("rotate: false needs the node's token in X-Relaycast-Node-Token"))
}

/// Lists the nodes.
///
/// With `history=true` the response is a page with the cursor of the next one.
#[utoipa::path(
    get, path = "/v1/nodes", tag = "nodes",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])), params(wire::NodesQuery),
    responses((status = 200, body = wire::Nodes), (status = 403, description = "insufficient_scope")),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::NODES }>,
    Query(query): Query<wire::NodesQuery>,
) -> Result<ListReply<wire::Node>, ApiError> {
    let liveness = match query.status.as_deref() {
        None | Some("all" | "") => None,
        Some("online") => Some(Liveness::Online),
        Some("offline") => Some(Liveness::Offline),
        Some(_) => {
            return Err(ApiError::invalid_request("status must be online or offline"));
        }
    };
    let limit = page::parse_limit(query.limit.as_deref(), LISTED_NODES)?;
    let after = query.cursor.as_deref().filter(|text| !text.is_empty()).map(parse_cursor).transpose()?;
    let filter = NodeFilter { name: query.name, capability: query.capability, liveness, hosts: None, after, limit };
    let NodeList { nodes, next } = engine.nodes().list(&caller, filter).await?;
    let nodes = nodes.map(to_node);
    match query.history.as_deref() {
        Some("true" | "1") => {
            let next_cursor = next.map(|last| format!("{}/{}", last.role.as_str(), last.name));
            ListReply::framed(&Success::new(wire::NodesPage { nodes: Vec::new(), next_cursor }), nodes)
        }
        _ => ListReply::list(nodes),
    }
}

/// Parses the cursor of the previous page.
fn parse_cursor(cursor: &str) -> Result<NodeListPosition, ApiError> {
    let position = cursor
        .split_once('/')
        .and_then(|(role, name)| Some(NodeListPosition { role: NodeRole::parse(role)?, name: name.to_owned() }));
    position.ok_or_else(|| ApiError::invalid_request("Invalid pagination query"))
}

/// Shows a node.
#[utoipa::path(
    get, path = "/v1/nodes/{name}", tag = "nodes",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])),
    responses((status = 200, body = wire::Node), (status = 403, description = "insufficient_scope"), (status = 404, description = "node_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::NODES }>,
    Path(name): Path<String>,
) -> Result<Reply<wire::Node>, ApiError> {
    let HeldNode { node, memory } = engine.nodes().visible(&caller, &name).await?;
    Ok(Reply::ok(to_node(node)).holding(memory))
}

/// Changes a node. Its token and its open sockets stay.
#[utoipa::path(
    patch, path = "/v1/nodes/{name}", tag = "nodes",
    security(("workspace_key" = [])), request_body(content = wire::ChangeNodeBody, example = json!({ "max_agents": 4, "tags": ["gpu"] })),
    responses(
        (status = 200, body = wire::Node),
        (status = 400, description = "invalid_node_name, invalid_node_delivery, unsafe_node_delivery_url, direct_node_capacity_exceeded"),
        (status = 404, description = "node_not_found"),
        (status = 409, description = "node_name_conflict"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.change", skip_all)]
pub async fn change(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(name): Path<String>,
    Body(body): Body<wire::ChangeNodeBody>,
) -> Result<Reply<wire::Node>, ApiError> {
    let HeldNode { node, memory } = engine.nodes().change(caller.scope, &name, body).await?;
    Ok(Reply::ok(to_node(node)).holding(memory))
}

/// Deletes a node.
///
/// Its token is revoked and its sockets close. Its agents go offline and return to their own nodes; actions that it
/// handles are deleted; open invocations that name it fail, others go to another node.
#[utoipa::path(
    delete, path = "/v1/nodes/{name}", tag = "nodes",
    security(("workspace_key" = [])),
    responses((status = 204), (status = 404, description = "node_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.delete", skip_all)]
pub async fn delete(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(name): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.nodes().delete(caller.scope, &name).await?;
    Ok(NoContent)
}

/// Lists the agents that are located on a node.
#[utoipa::path(
    get, path = "/v1/nodes/{name}/agents", tag = "nodes",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])),
    responses((status = 200, body = Vec<wire::Binding>), (status = 403, description = "insufficient_scope"), (status = 404, description = "node_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.agents", skip_all)]
pub async fn agents(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::NODES }>,
    Path(name): Path<String>,
) -> Result<Reply<Vec<wire::Binding>>, ApiError> {
    let listed = engine.agents().bindings(&caller, &name).await?;
    Ok(Reply::ok(listed.into_iter().map(to_binding).collect()))
}

/// Moves an agent to a node.
#[utoipa::path(
    post, path = "/v1/nodes/{name}/agents", tag = "nodes",
    security(("workspace_key" = [])), request_body = wire::BindAgentBody,
    responses(
        (status = 201, body = wire::Binding),
        (status = 400, description = "direct_node_capacity_exceeded"),
        (status = 404, description = "node_not_found, agent_not_found"),
        (status = 409, description = "node_capacity_exceeded"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.bind", skip_all)]
pub async fn bind(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(name): Path<String>,
    Body(body): Body<wire::BindAgentBody>,
) -> Result<Reply<wire::Binding>, ApiError> {
    Ok(Reply::created(to_binding(engine.agents().bind(caller.scope, &name, &body).await?)))
}

/// Removes an agent from a node. It returns to its own node.
#[utoipa::path(
    delete, path = "/v1/nodes/{name}/agents/{agent}", tag = "nodes",
    security(("workspace_key" = [])),
    responses(
        (status = 204),
        (status = 404, description = "node_not_found, agent_not_found, node_agent_binding_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.unbind", skip_all)]
pub async fn unbind(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path((name, agent)): Path<(String, String)>,
) -> Result<NoContent, ApiError> {
    engine.agents().unbind(caller.scope, &name, &agent).await?;
    Ok(NoContent)
}

/// Removes a provider that served a node.
#[utoipa::path(
    delete, path = "/v1/nodes/{name}/providers/{provider}", tag = "nodes",
    security(("workspace_key" = [])),
    responses((status = 204), (status = 404, description = "node_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.forget_provider", skip_all)]
pub async fn forget_provider(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path((name, provider)): Path<(String, String)>,
) -> Result<NoContent, ApiError> {
    engine.nodes().forget_provider(caller.scope, &name, &provider).await?;
    Ok(NoContent)
}

/// Creates a token for the caller's own node.
///
/// The previous token is revoked.
#[utoipa::path(
    post, path = "/v1/agent/node-token", tag = "nodes",
    security(("agent_token" = [])),
    responses(
        (status = 200, body = wire::NodeToken),
        (status = 409, description = "agent_bound_to_node"),
        (status = 404, description = "agent_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.mint_direct_token", skip_all)]
pub async fn mint_direct_token(
    State(engine): State<Engine>,
    Agent(caller): Agent,
) -> Result<Reply<wire::NodeToken>, ApiError> {
    let minted = engine.nodes().mint_direct_token(&caller).await?;
    Ok(Reply::ok(wire::NodeToken { node_id: minted.node_id.to_string(), node_name: minted.name, token: minted.token }))
}

/// Converts a node to the form that REST and the registration reply use.
pub(crate) fn to_node(entry: RosterNode) -> wire::Node {
    let liveness = entry.liveness();
    wire::Node {
        kind: entry.node.kind.as_str(),
        role: entry.node.role.as_str(),
        capabilities: entry.capabilities().into_iter().cloned().collect(),
        tags: entry.tags().into_iter().map(str::to_owned).collect(),
        version: entry.version().unwrap_or_default().to_owned(),
        status: liveness.as_str(),
        live: liveness.is_online(),
        handlers_live: entry.runs_handlers(),
        load: entry.load(),
        active_agents: entry.node.bound_agents,
        active_agents_stale: entry.is_count_stale(),
        reserved_agents: entry.reserved_agents(),
        max_agents: entry.max_agents(),
        last_heartbeat_at: entry.last_heartbeat_at().map(Into::into),
        providers: entry.providers.into_iter().map(to_provider).collect(),
        id: entry.node.node_id.to_string(),
        name: entry.node.name,
        machine_id: entry.node.machine_id,
        delivery_adapter: entry.node.delivery_adapter,
        delivery: entry.node.delivery,
        created_at: entry.node.created_at.into(),
    }
}

fn to_provider(provider: NodeProvider) -> wire::NodeProvider {
    wire::NodeProvider {
        live: provider.liveness.is_online(),
        handlers_live: provider.runs_handlers(),
        name: provider.name.to_string(),
        load: provider.load,
        active_agents: provider.active_agents,
        reserved_agents: provider.reserved_agents,
        max_agents: provider.max_agents,
        version: provider.version.unwrap_or_default(),
        last_heartbeat_at: provider.last_heartbeat_at.into(),
    }
}

fn to_binding(bound: bindings::NodeBinding) -> wire::Binding {
    let bindings::NodeBinding { binding, node } = bound;
    wire::Binding {
        id: binding.id(),
        agent_id: binding.agent_id.to_string(),
        agent_name: binding.agent_name,
        node_id: node.node_id.to_string(),
        node_name: node.name,
        node_kind: node.kind.as_str(),
        node_role: node.role.as_str(),
        status: if binding.is_disabled { "disabled" } else { "active" },
        session_ref: binding.session_ref,
        priority: binding.priority,
        created_at: binding.bound_at.into(),
        updated_at: binding.rebound_at.map(Into::into),
        delivery_ack_seq: binding.settled_floor,
    }
}
