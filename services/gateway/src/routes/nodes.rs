//! Node routes: enrolment, roster, bindings, and an agent's own node.

use axum::extract::State;
use relay_domain::node::LISTED_NODES;
use relay_engine::{
    Engine,
    bindings::{self, BindAgent},
    nodes::{self, Capability, EnrolNode, NodeFilter, NodePlace},
};
use relay_wire::node as wire;

use crate::{
    caller::{Agent, ReaderOrAgent, WorkspaceKey, reads},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path, Query},
    routes::page,
};

/// Creates or updates a node and mints its token.
///
/// The token before it dies. What is left out of the body keeps its stored value.
#[utoipa::path(
    post, path = "/v1/nodes", tag = "nodes",
    security(("workspace_key" = [])), request_body(content = wire::EnrolNodeBody, example = json!({ "name": "build-box", "capabilities": ["spawn:claude"], "max_agents": 8 })),
    responses(
        (status = 201, body = wire::EnrolledNode),
        (status = 400, description = "invalid_node_name, invalid_node_delivery, unsafe_node_delivery_url, direct_node_capacity_exceeded"),
        (status = 409, description = "node_name_conflict"),
        (status = 429, description = "plan_limit_exceeded"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.enrol", skip_all)]
pub async fn enrol(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Body(body): Body<wire::EnrolNodeBody>,
) -> Result<Reply<wire::EnrolledNode>, ApiError> {
    let request = EnrolNode {
        node_id: body.node_id,
        name: body.name,
        machine_id: body.machine_id,
        kind: body.kind,
        role: body.role,
        delivery_adapter: body.delivery_adapter,
        delivery: body.delivery,
        capabilities: body.capabilities.map(|given| given.into_iter().map(capability).collect()),
        max_agents: body.max_agents,
        tags: body.tags,
        version: body.version,
    };
    let enrolled = engine.enrol_node(caller.scope, request).await?;
    Ok(Reply::created(wire::EnrolledNode { node: descriptor(enrolled.node), token: enrolled.token }))
}

/// Lists the nodes.
///
/// With `history=true` as a page, which says where the next begins.
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
) -> Result<Reply<wire::Nodes>, ApiError> {
    let live = match query.status.as_deref() {
        None | Some("all" | "") => None,
        Some("online") => Some(true),
        Some("offline") => Some(false),
        Some(_) => {
            return Err(ApiError::invalid_request("status must be online or offline"));
        }
    };
    let limit = page::limit(query.limit.as_deref(), LISTED_NODES)?;
    let after = query.cursor.as_deref().filter(|text| !text.is_empty()).map(place).transpose()?;
    let filter = NodeFilter { name: query.name, capability: query.capability, live, after, limit };
    let nodes: Vec<wire::Node> = engine.nodes(caller.scope(), filter).await?.into_iter().map(descriptor).collect();
    Ok(Reply::ok(match query.history.as_deref() {
        Some("true" | "1") => {
            let is_full = i64::try_from(nodes.len()).is_ok_and(|found| found == limit);
            let next_cursor = nodes.last().filter(|_| is_full).map(|last| format!("{}/{}", last.role, last.name));
            wire::Nodes::Page(wire::NodesPage { nodes, next_cursor })
        }
        _ => wire::Nodes::List(nodes),
    }))
}

/// Where a page begins, as the page before told it.
fn place(cursor: &str) -> Result<NodePlace, ApiError> {
    match cursor.split_once('/') {
        Some((role @ ("broker" | "direct"), name)) => Ok(NodePlace { role: role.to_owned(), name: name.to_owned() }),
        _ => Err(ApiError::invalid_request("Invalid pagination query")),
    }
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
    Ok(Reply::ok(descriptor(engine.node(caller.scope(), &name).await?)))
}

/// Changes how a node of kind http_push is called. Its token stays.
#[utoipa::path(
    patch, path = "/v1/nodes/{name}", tag = "nodes",
    security(("workspace_key" = [])), request_body = wire::ChangeNodeBody,
    responses(
        (status = 200, body = wire::Node),
        (status = 400, description = "invalid_node_delivery, unsafe_node_delivery_url"),
        (status = 404, description = "node_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.nodes.change", skip_all)]
pub async fn change(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(name): Path<String>,
    Body(body): Body<wire::ChangeNodeBody>,
) -> Result<Reply<wire::Node>, ApiError> {
    Ok(Reply::ok(descriptor(engine.change_delivery(caller.scope, &name, body.delivery).await?)))
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
    let listed = engine.bindings(&caller, &name).await?;
    Ok(Reply::ok(listed.into_iter().map(binding).collect()))
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
    let request = BindAgent { agent_name: body.agent_name, session_ref: body.session_ref, priority: body.priority };
    Ok(Reply::created(binding(engine.bind_agent(caller.scope, &name, &request).await?)))
}

/// Takes an agent off a node. It falls back to its own.
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
    engine.unbind_agent(caller.scope, &name, &agent).await?;
    Ok(NoContent)
}

/// Forgets a process that served a node.
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
    engine.forget_provider(caller.scope, &name, &provider).await?;
    Ok(NoContent)
}

/// Mints a token for the caller's own node.
///
/// The token before it dies.
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
    let minted = engine.mint_direct_token(&caller).await?;
    Ok(Reply::ok(wire::NodeToken { node_id: minted.node_id.to_string(), node_name: minted.name, token: minted.token }))
}

fn capability(given: wire::CapabilityGiven) -> Capability {
    match given {
        wire::CapabilityGiven::Name(name) => Capability { name, kind: None, metadata: None },
        wire::CapabilityGiven::Object { name, kind, metadata } => Capability { name, kind, metadata },
    }
}

/// A node as clients see it, on REST and in the answer to its registration.
pub(crate) fn descriptor(node: nodes::Node) -> wire::Node {
    let row = node.row;
    wire::Node {
        id: row.node_id,
        name: row.name,
        kind: row.kind,
        role: row.role,
        machine_id: row.machine_id,
        delivery_adapter: row.delivery_adapter,
        delivery: row.delivery,
        capabilities: node.capabilities,
        tags: node.tags,
        version: node.version.unwrap_or_default(),
        status: if node.live { "online" } else { "offline" },
        live: node.live,
        handlers_live: node.handlers_live,
        load: node.load,
        active_agents: node.active_agents,
        reserved_agents: node.reserved_agents,
        max_agents: node.max_agents,
        providers: node.providers.into_iter().map(provider).collect(),
        last_heartbeat_at: node.last_heartbeat_at.map(Into::into),
        created_at: row.created_at.into(),
    }
}

fn provider(row: nodes::NodeProviderRow) -> wire::NodeProvider {
    wire::NodeProvider {
        name: row.provider,
        live: row.live,
        handlers_live: row.live && row.handlers_live,
        load: row.load,
        active_agents: row.active_agents,
        reserved_agents: row.reserved_agents,
        max_agents: row.max_agents,
        version: row.version.unwrap_or_default(),
        last_heartbeat_at: row.last_heartbeat_at.into(),
    }
}

fn binding(binding: bindings::Binding) -> wire::Binding {
    let id = binding.id();
    let bindings::Binding { row, node } = binding;
    wire::Binding {
        id,
        agent_id: row.agent_id.to_string(),
        agent_name: row.agent_name,
        node_id: node.node_id,
        node_name: node.name,
        node_kind: node.kind,
        node_role: node.role,
        status: if row.disabled { "disabled" } else { "active" },
        session_ref: row.session_ref,
        priority: row.priority,
        created_at: row.bound_at.into(),
        updated_at: row.rebound_at.map(Into::into),
        delivery_ack_seq: row.settled_floor,
    }
}
