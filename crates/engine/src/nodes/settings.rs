//! Checks of the settings of nodes in requests: names, kinds and roles, capabilities, tags. Called by the roster's use
//! cases.

use relay_domain::{
    NodeId,
    agents::{DIRECT_MACHINE, check_machine},
    encoded_length,
    names::{
        MAX_AGENT_NAME_BYTES, MAX_CAPABILITIES, MAX_NODE_ID_BYTES, MAX_NOTE_BYTES, MAX_TAGS, check_json_length,
        check_length, check_name, parse_node_name,
    },
    nodes::{
        CapabilityKind, DIRECT_ID_PREFIX, DIRECT_NAME_PREFIX, Node, NodeKind, NodeRole, WS_ADAPTER,
        tags::check_repo_tag,
    },
    push::{HTTP_ADAPTERS, POLL_ADAPTER},
};
use relay_wire::{
    field::ToValue as _,
    nodes::{CapabilityInput, EnrolNodeBody},
};
use serde::Serialize;
use serde_json::Value;

use crate::{
    EngineError, EngineResult,
    error::{Conflict, InvalidInput},
};

/// Checks the requested name of a broker node.
pub(crate) fn check_broker_name(requested: &str) -> EngineResult<&str> {
    let name = parse_node_name(requested).map_err(|_| EngineError::Invalid(InvalidInput::NodeName))?;
    // Reserved for agents' own nodes, which are not enrolled.
    if name == DIRECT_MACHINE {
        return Err(EngineError::Invalid(InvalidInput::NodeName));
    }
    if name.strip_prefix(DIRECT_NAME_PREFIX).is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit())) {
        return Err(EngineError::Invalid(InvalidInput::NodeName));
    }
    Ok(name)
}

pub(super) fn checked_node_id(id: String) -> EngineResult<NodeId> {
    check_name("node_id", &id, MAX_NODE_ID_BYTES)?;
    if id.starts_with(DIRECT_ID_PREFIX) {
        return Err(EngineError::invalid_request("node_id is reserved for an agent's own node"));
    }
    Ok(NodeId::new(id))
}

/// Determines the requested kind of node, and its role if one follows.
pub(super) fn requested_kind(
    request: &EnrolNodeBody,
    stored: Option<&Node>,
) -> EngineResult<(NodeKind, Option<NodeRole>)> {
    let wanted = match request.kind.as_deref() {
        None => None,
        Some(word) => Some(
            NodeKind::parse_requested(word)
                .ok_or_else(|| EngineError::invalid_request("kind must be ws, http_push or poll"))?,
        ),
    };
    let kind = wanted.map(|(kind, _)| kind).or(stored.map(|node| node.kind)).unwrap_or(NodeKind::Ws);
    let role = match request.role.as_deref() {
        Some(word) => {
            Some(NodeRole::parse(word).ok_or_else(|| EngineError::invalid_request("role must be direct or broker"))?)
        }
        None => wanted.and_then(|(_, role)| role),
    };
    if let Some(node) = stored {
        check_fixed(request, node, kind, role)?;
    }
    // A new node without a socket belongs to one agent unless it takes several.
    let takes_several = request.max_agents.is_some_and(|n| n != 1);
    let role = role.or_else(|| {
        let derives = stored.is_none() && !kind.has_socket();
        derives.then_some(if takes_several { NodeRole::Broker } else { NodeRole::Direct })
    });
    Ok((kind, role))
}

/// Refuses another kind or role for a stored node. One of another id is another node, which wants this one's name.
fn check_fixed(request: &EnrolNodeBody, node: &Node, kind: NodeKind, role: Option<NodeRole>) -> EngineResult<()> {
    // A request without a role keeps that of the stored node.
    let has_other_role = role.is_some_and(|role| role != node.role);
    if node.kind == kind && !has_other_role {
        return Ok(());
    }
    if request.node_id.as_deref().is_some_and(|id| id != node.node_id.as_str()) {
        return Err(EngineError::Conflict(Conflict::NodeName(node.name.clone())));
    }
    if node.kind != kind {
        return Err(EngineError::Invalid(InvalidInput::NodeKindIsFixed { node: node.name.clone(), kind: node.kind }));
    }
    let (name, role) = (&node.name, node.role.as_str());
    Err(EngineError::invalid_request(format!(
        "node {name} has the role {role}, which cannot change: enrol another one"
    )))
}

/// Determines the adapter of a node; that of an http_push node follows from its authentication.
pub(super) fn requested_adapter(kind: NodeKind, requested: Option<&str>) -> EngineResult<&'static str> {
    let (own, known): (_, &[&str]) = match kind {
        NodeKind::Ws => (WS_ADAPTER, &[WS_ADAPTER]),
        NodeKind::Poll => (POLL_ADAPTER, &[POLL_ADAPTER]),
        NodeKind::HttpPush => (HTTP_ADAPTERS[0], &HTTP_ADAPTERS),
    };
    match requested {
        Some(adapter) if !known.contains(&adapter) => Err(EngineError::Invalid(InvalidInput::NodeDelivery(format!(
            "nodes of kind {} are reached by {}",
            kind.as_str(),
            known.join(", ")
        )))),
        _ => Ok(own),
    }
}

pub(super) fn checked_max_agents(requested: Option<i64>, role: Option<NodeRole>) -> EngineResult<Option<i32>> {
    if role == Some(NodeRole::Direct) {
        return match requested {
            None | Some(1) => Ok(Some(1)),
            Some(_) => Err(EngineError::Invalid(InvalidInput::DirectNodeCapacity)),
        };
    }
    requested
        .map(|n| i32::try_from(n).ok().filter(|n| *n >= 0))
        .map(|n| n.ok_or_else(|| EngineError::invalid_request("max_agents must be a number from 0 on")))
        .transpose()
}

/// Capability as it is stored and shown.
#[derive(Serialize)]
struct StoredCapability<'a> {
    name: &'a str,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Value>,
}

pub(super) fn checked_capabilities(capabilities: Vec<CapabilityInput>) -> EngineResult<Value> {
    if capabilities.len() > MAX_CAPABILITIES {
        return Err(EngineError::invalid_request(format!("at most {MAX_CAPABILITIES} capabilities")));
    }
    let mut stored = Vec::with_capacity(capabilities.len());
    for capability in capabilities {
        let (name, kind, metadata) = match capability {
            CapabilityInput::Name(name) => (name, None, None),
            CapabilityInput::Object { name, kind, metadata } => (name, kind, metadata),
        };
        check_name("capabilities", &name, MAX_AGENT_NAME_BYTES)?;
        let kind = CapabilityKind::classify(&name, kind.as_deref()).as_str();
        stored.push(StoredCapability { name: &name, kind, metadata: metadata.filter(Value::is_object) }.to_value());
    }
    let stored = Value::Array(stored);
    check_json_length("capabilities", encoded_length(&stored))?;
    Ok(stored)
}

pub(super) fn checked_tags(tags: Option<Vec<String>>) -> EngineResult<Option<Vec<String>>> {
    let Some(tags) = tags else { return Ok(None) };
    if tags.len() > MAX_TAGS {
        return Err(EngineError::invalid_request(format!("at most {MAX_TAGS} tags")));
    }
    for tag in &tags {
        check_length("tags", tag, MAX_AGENT_NAME_BYTES)?;
        check_repo_tag(tag)?;
    }
    Ok(Some(tags))
}

pub(super) fn checked_machine(machine: Option<String>) -> EngineResult<Option<String>> {
    check_machine("machine_id", machine.as_deref().unwrap_or_default())?;
    checked_note("machine_id", machine)
}

pub(super) fn checked_note(field: &'static str, note: Option<String>) -> EngineResult<Option<String>> {
    if let Some(note) = &note {
        check_length(field, note, MAX_NOTE_BYTES)?;
    }
    Ok(note)
}
