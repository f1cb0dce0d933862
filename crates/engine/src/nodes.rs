//! Nodes: enrolment and the roster.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use relay_domain::{
    NodeId, ProviderName, WorkspaceScope,
    names::{
        MAX_AGENT_NAME_BYTES, MAX_CAPABILITIES, MAX_NODE_ID_BYTES, MAX_NODE_NAME_BYTES, MAX_NOTE_BYTES, MAX_TAGS,
        check_json_length, check_length, check_name, strip_hash,
    },
    node::{
        DIRECT_ID_PREFIX, DIRECT_NAME_PREFIX, LISTED_NODES, NodeKind, NodeRole, WS_ADAPTER, capability_kind, max_agents,
    },
    plan::Ceiling,
    push::{HTTP_ADAPTERS, POLL_ADAPTER},
    token::TokenKind,
};
use relay_store::{DirectTokenOutcome, EnrolOutcome, NewDelivery, NodeEnrolment, subscriptions::Sealed};
pub use relay_store::{NodeFilter, NodePlace, NodeProviderRow, NodeRow};
use serde_json::{Value, json};

use crate::push::delivery::DeliverySecrets;
use crate::{Engine, EngineError, EngineResult, agents::encoded_length, auth::AgentCaller};

/// A request to enrol a node. What is left out keeps its stored value.
#[derive(Debug, Default)]
pub struct EnrolNode {
    /// Chosen by the caller.
    pub node_id: Option<String>,
    /// Its name; a leading `#` is dropped.
    pub name: String,
    /// What it is recognised by when it keeps no id.
    pub machine_id: Option<String>,
    /// A kind word, legacy ones included.
    pub kind: Option<String>,
    /// `direct` or `broker`.
    pub role: Option<String>,
    /// How deliveries reach it.
    pub delivery_adapter: Option<String>,
    /// How it is called, if it is: an object.
    pub delivery: Option<Value>,
    /// Names with their declared kind and metadata.
    pub capabilities: Option<Vec<Capability>>,
    /// 0 for unlimited.
    pub max_agents: Option<i64>,
    /// Its tags.
    pub tags: Option<Vec<String>>,
    /// Free text.
    pub version: Option<String>,
}

/// A capability as a client gives it.
#[derive(Debug)]
pub struct Capability {
    /// Its name.
    pub name: String,
    /// `action`, `capacity` or a legacy word.
    pub kind: Option<String>,
    /// Passed through.
    pub metadata: Option<Value>,
}

/// A node as the roster shows it: what is stored of it and what its providers add.
#[derive(Debug, Clone)]
pub struct Node {
    /// As stored.
    pub row: NodeRow,
    /// The union over its providers, offline ones included; the first of a name counts.
    pub capabilities: Vec<Value>,
    /// Its own and its providers'.
    pub tags: Vec<String>,
    /// Of the provider heard of last, else its own.
    pub version: Option<String>,
    /// Whether a provider is connected and was heard of lately.
    pub live: bool,
    /// Whether a live provider's handlers run.
    pub handlers_live: bool,
    /// The highest of its providers'.
    pub load: f64,
    /// Over all providers.
    pub active_agents: i32,
    /// Places promised to what is on its way there, over all providers.
    pub reserved_agents: i64,
    /// Over all providers; 0 for unlimited.
    pub max_agents: i32,
    /// Its providers, in the order of their registration.
    pub providers: Vec<NodeProviderRow>,
    /// Of a live provider, else of any.
    pub last_heartbeat_at: Option<DateTime<Utc>>,
}

/// A node with its new token, shown this once.
#[derive(Debug)]
pub struct EnrolledNode {
    /// The node.
    pub node: Node,
    /// Its only valid token.
    pub token: String,
}

/// An agent's own node with its new token.
#[derive(Debug)]
pub struct DirectNode {
    /// The node.
    pub node_id: NodeId,
    /// Its name.
    pub name: String,
    /// Its only valid token.
    pub token: String,
}

impl Engine {
    /// Creates or updates a node and gives it a new token. The old token opens no socket any more.
    ///
    /// # Errors
    /// When a field is out of bounds, the kind is not served, or another live node has the name.
    pub async fn enrol_node(&self, scope: WorkspaceScope, request: EnrolNode) -> EngineResult<EnrolledNode> {
        let name = node_name(&request.name)?;
        let node_id = request.node_id.clone().map(checked_node_id).transpose()?;
        let fresh_id = NodeId::new(format!("node_{}", self.next_id()));
        let stored = self.store().node_to_change(scope, node_id.as_ref(), name).await?;
        let (kind, role) = requested_kind(&request, stored.as_ref().map(|(row, _)| row))?;
        let own_id = match &stored {
            Some((row, _)) => NodeId::new(row.node_id.clone()),
            None => node_id.clone().unwrap_or_else(|| fresh_id.clone()),
        };
        let adapter = requested_adapter(kind, request.delivery_adapter.as_deref())?;
        let (delivery_adapter, delivery) = match kind {
            NodeKind::HttpPush => self.read_delivery(scope, &own_id, request.delivery, stored.as_ref(), false)?.unzip(),
            NodeKind::Ws | NodeKind::Poll => (Some(adapter), None),
        };
        let token = self.fresh_token(TokenKind::Node)?;
        let enrolment = NodeEnrolment {
            node_id,
            fresh_id,
            name: name.to_owned(),
            kind: kind.as_str(),
            delivery_adapter,
            delivery,
            machine_id: checked_note("machine_id", request.machine_id)?,
            role: role.map(NodeRole::as_str),
            capabilities: request.capabilities.map(checked_capabilities).transpose()?,
            max_agents: checked_max_agents(request.max_agents, role)?,
            tags: checked_tags(request.tags)?,
            version: checked_note("version", request.version)?,
            token_hash: token.hash,
            ceiling: self.ceiling(scope, Ceiling::Nodes).await?,
        };
        let (outcome, recorded) = match self.store().enrol_node(scope, &enrolment, self.now()).await {
            // A node that renamed itself over its socket was faster.
            Err(error) if error.violates("nodes_name_is_unique") => (EnrolOutcome::NameTaken, None),
            other => other?,
        };
        recorded.into_iter().for_each(|recorded| self.announce(recorded));
        match outcome {
            EnrolOutcome::NameTaken => Err(EngineError::NodeNameConflict(enrolment.name)),
            EnrolOutcome::NoRoom => Err(EngineError::PlanLimitExceeded(Ceiling::Nodes)),
            EnrolOutcome::Enrolled { node, replaced_token } => {
                if let Some(old) = replaced_token {
                    self.revoke_token(old);
                }
                self.hints().node_changed(scope, node.clone());
                let node = self.node(scope, node.as_str()).await?;
                Ok(EnrolledNode { node, token: token.text })
            }
        }
    }

    /// Changes how a node is called. What is left out of `delivery` stays.
    ///
    /// # Errors
    /// When there is no such node, it is of another kind, or a field is out of bounds.
    pub async fn change_delivery(
        &self,
        scope: WorkspaceScope,
        name_or_id: &str,
        delivery: Value,
    ) -> EngineResult<Node> {
        let row = self.node_row(scope, name_or_id).await?;
        let id = NodeId::new(row.node_id);
        let stored = self.store().node_to_change(scope, Some(&id), &row.name).await?;
        let stored = stored.ok_or_else(|| EngineError::NodeNotFound(row.name.clone()))?;
        if stored.0.kind != NodeKind::HttpPush.as_str() {
            return Err(EngineError::NodeKindIsFixed { node: row.name, kind: stored.0.kind });
        }
        if let Some((adapter, delivery)) = self.read_delivery(scope, &id, Some(delivery), Some(&stored), true)? {
            self.store().change_delivery(scope, &id, adapter, &delivery).await?;
            self.hints().node_changed(scope, id);
        }
        self.node(scope, &row.name).await
    }

    /// The settings that a request makes, with their adapter; `None` to keep the stored ones.
    fn read_delivery(
        &self,
        scope: WorkspaceScope,
        id: &NodeId,
        given: Option<Value>,
        stored: Option<&(NodeRow, Option<Sealed>)>,
        keeps_the_rest: bool,
    ) -> EngineResult<Option<(&'static str, NewDelivery)>> {
        let Some(given) = given.filter(|given| !given.is_null()) else {
            return match stored {
                Some(_) => Ok(None),
                None => Err(EngineError::InvalidNodeDelivery("delivery is required for kind http_push".into())),
            };
        };
        let secrets = &self.inner.secrets;
        let known = match stored {
            Some((_, sealed)) => secrets.open_node_delivery(scope, id, sealed.as_ref())?,
            None => DeliverySecrets::default(),
        };
        let shown = stored.and_then(|(row, _)| row.delivery.as_ref()).filter(|_| keeps_the_rest);
        let (delivery, new) = secrets.node_delivery(self.egress().policy(), scope, id, given, shown, known)?;
        Ok(Some((delivery.adapter(), new)))
    }

    /// The node of a name or id.
    ///
    /// # Errors
    /// When there is none.
    pub async fn node(&self, scope: WorkspaceScope, name_or_id: &str) -> EngineResult<Node> {
        let row = self.node_row(scope, name_or_id).await?;
        let providers = self.store().providers_of_nodes(scope, std::slice::from_ref(&row.node_id)).await?;
        Ok(whole(row, &providers.iter().collect::<Vec<_>>()))
    }

    /// The nodes that a filter names, brokers first, then by name.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn nodes(&self, scope: WorkspaceScope, mut filter: NodeFilter) -> EngineResult<Vec<Node>> {
        filter.limit = filter.limit.clamp(1, LISTED_NODES.1);
        filter.name = filter.name.map(|name| strip_hash(&name).to_owned());
        let rows = self.store().nodes(scope, &filter).await?;
        let ids: Vec<String> = rows.iter().map(|row| row.node_id.clone()).collect();
        let providers = self.store().providers_of_nodes(scope, &ids).await?;
        let mut by_node: HashMap<&str, Vec<&NodeProviderRow>> = HashMap::new();
        for provider in &providers {
            by_node.entry(&provider.node_id).or_default().push(provider);
        }
        Ok(rows
            .into_iter()
            .map(|row| {
                let own = by_node.remove(row.node_id.as_str()).unwrap_or_default();
                whole(row, &own)
            })
            .collect())
    }

    /// Forgets a provider of a node; one that is not there is fine.
    ///
    /// # Errors
    /// When there is no such node.
    pub async fn forget_provider(&self, scope: WorkspaceScope, node: &str, provider: &str) -> EngineResult<()> {
        let node = NodeId::new(self.node_row(scope, node).await?.node_id);
        let provider = ProviderName::new(provider);
        let (held, recorded) = self.store().forget_provider(scope, &node, &provider, self.now()).await?;
        self.announce(recorded);
        if let Some(epoch) = held {
            // Its socket, wherever it is, is closed: nobody may act for it any more.
            self.hints().provider_taken(scope, node.clone(), &provider, epoch + 1);
            self.hints().node_changed(scope, node);
        }
        Ok(())
    }

    /// Gives the caller's own node a new token; the node is made on the first call.
    ///
    /// # Errors
    /// When the agent is located on another node.
    pub async fn mint_direct_token(&self, caller: &AgentCaller) -> EngineResult<DirectNode> {
        let token = self.fresh_token(TokenKind::Node)?;
        match self.store().mint_direct_token(caller.scope, caller.agent_id, token.hash).await? {
            DirectTokenOutcome::NoAgent => Err(EngineError::AgentNotFound(caller.name.to_string())),
            DirectTokenOutcome::BoundElsewhere(node) => Err(EngineError::AgentBoundToNode(node)),
            DirectTokenOutcome::Minted { replaced_token } => {
                if let Some(old) = replaced_token {
                    self.revoke_token(old);
                }
                Ok(DirectNode {
                    node_id: NodeId::direct(caller.agent_id),
                    name: format!("{DIRECT_NAME_PREFIX}{}", caller.agent_id),
                    token: token.text,
                })
            }
        }
    }

    pub(crate) async fn node_row(&self, scope: WorkspaceScope, name_or_id: &str) -> EngineResult<NodeRow> {
        let wanted = strip_hash(name_or_id);
        self.store().node(scope, wanted).await?.ok_or_else(|| EngineError::NodeNotFound(wanted.to_owned()))
    }
}

/// What a node looks like with its providers, which come in the order of their registration.
fn whole(row: NodeRow, providers: &[&NodeProviderRow]) -> Node {
    let own = row.capabilities.as_array().map(Vec::as_slice).unwrap_or_default();
    let theirs = providers.iter().filter_map(|p| p.capabilities.as_array()).flatten();
    let mut names = HashSet::new();
    let capabilities = theirs
        .chain(own)
        .filter(|c| c["name"].as_str().is_some_and(|name| names.insert(name.to_owned())))
        .cloned()
        .collect();
    let mut tags = row.tags.clone();
    for tag in providers.iter().flat_map(|p| &p.tags) {
        if !tags.contains(tag) {
            tags.push(tag.clone());
        }
    }
    let limits: Vec<i32> = providers.iter().map(|p| p.max_agents).collect();
    let newest = providers.iter().max_by_key(|p| (p.live, p.last_heartbeat_at));
    Node {
        capabilities,
        tags,
        version: newest.and_then(|p| p.version.clone()).or_else(|| row.version.clone()),
        // What is called, or asks, has no connection that could be lost.
        live: row.kind != NodeKind::Ws.as_str() || providers.iter().any(|p| p.live),
        handlers_live: providers.iter().any(|p| p.live && p.handlers_live),
        load: providers.iter().map(|p| p.load).fold(0.0, f64::max),
        active_agents: providers.iter().fold(0, |sum, p| sum.saturating_add(p.active_agents)),
        reserved_agents: providers.iter().map(|p| p.reserved_agents).sum(),
        max_agents: max_agents(row.max_agents, &limits),
        providers: providers.iter().map(|&provider| provider.clone()).collect(),
        last_heartbeat_at: newest.map(|p| p.last_heartbeat_at),
        row,
    }
}

/// A broker node's name as given, checked.
pub(crate) fn node_name(given: &str) -> EngineResult<&str> {
    let name = strip_hash(given);
    check_name("name", name, MAX_NODE_NAME_BYTES).map_err(|_| EngineError::InvalidNodeName)?;
    // Those belong to agents' own nodes, which are not enrolled.
    if name.strip_prefix(DIRECT_NAME_PREFIX).is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit())) {
        return Err(EngineError::InvalidNodeName);
    }
    Ok(name)
}

fn checked_node_id(id: String) -> EngineResult<NodeId> {
    check_name("node_id", &id, MAX_NODE_ID_BYTES)?;
    if id.starts_with(DIRECT_ID_PREFIX) {
        return Err(EngineError::InvalidRequest("node_id is reserved for an agent's own node".into()));
    }
    Ok(NodeId::new(id))
}

/// What kind of node is meant, and its role if one follows.
fn requested_kind(request: &EnrolNode, stored: Option<&NodeRow>) -> EngineResult<(NodeKind, Option<NodeRole>)> {
    let wanted = match request.kind.as_deref() {
        None => None,
        Some(word) => Some(
            NodeKind::requested(word)
                .ok_or_else(|| EngineError::InvalidRequest("kind must be ws, http_push or poll".into()))?,
        ),
    };
    let known = stored.and_then(|row| NodeKind::parse(&row.kind));
    let kind = wanted.map(|(kind, _)| kind).or(known).unwrap_or(NodeKind::Ws);
    if let Some(row) = stored
        && known != Some(kind)
    {
        return Err(EngineError::NodeKindIsFixed { node: row.name.clone(), kind: row.kind.clone() });
    }
    let role = match request.role.as_deref() {
        Some(word) => Some(
            NodeRole::parse(word).ok_or_else(|| EngineError::InvalidRequest("role must be direct or broker".into()))?,
        ),
        None => wanted.and_then(|(_, role)| role),
    };
    // A new node that is called, or asks, is one agent's unless it takes several.
    let takes_several = request.max_agents.is_some_and(|n| n != 1);
    let role = role.or_else(|| match kind {
        NodeKind::HttpPush | NodeKind::Poll if stored.is_none() => {
            Some(if takes_several { NodeRole::Broker } else { NodeRole::Direct })
        }
        _ => None,
    });
    Ok((kind, role))
}

/// The adapter of a node that is not called; that of one that is follows from how calls are authenticated.
fn requested_adapter(kind: NodeKind, given: Option<&str>) -> EngineResult<&'static str> {
    let (own, known): (_, &[&str]) = match kind {
        NodeKind::Ws => (WS_ADAPTER, &[WS_ADAPTER]),
        NodeKind::Poll => (POLL_ADAPTER, &[POLL_ADAPTER]),
        NodeKind::HttpPush => (HTTP_ADAPTERS[0], &HTTP_ADAPTERS),
    };
    match given {
        Some(adapter) if !known.contains(&adapter) => Err(EngineError::InvalidNodeDelivery(format!(
            "nodes of kind {} are reached by {}",
            kind.as_str(),
            known.join(", ")
        ))),
        _ => Ok(own),
    }
}

fn checked_max_agents(given: Option<i64>, role: Option<NodeRole>) -> EngineResult<Option<i32>> {
    if role == Some(NodeRole::Direct) {
        return match given {
            None | Some(1) => Ok(Some(1)),
            Some(_) => Err(EngineError::DirectNodeCapacity),
        };
    }
    given
        .map(|n| i32::try_from(n).ok().filter(|n| *n >= 0))
        .map(|n| n.ok_or_else(|| EngineError::InvalidRequest("max_agents must be a number from 0 on".into())))
        .transpose()
}

fn checked_capabilities(capabilities: Vec<Capability>) -> EngineResult<Value> {
    if capabilities.len() > MAX_CAPABILITIES {
        return Err(EngineError::InvalidRequest(format!("at most {MAX_CAPABILITIES} capabilities")));
    }
    let mut stored = Vec::with_capacity(capabilities.len());
    for capability in capabilities {
        check_name("capabilities", &capability.name, MAX_AGENT_NAME_BYTES)?;
        let kind = capability_kind(&capability.name, capability.kind.as_deref());
        let mut object = json!({ "name": capability.name, "kind": kind });
        if let Some(metadata) = capability.metadata.filter(Value::is_object) {
            object["metadata"] = metadata;
        }
        stored.push(object);
    }
    let stored = Value::Array(stored);
    check_json_length("capabilities", encoded_length(&stored))?;
    Ok(stored)
}

fn checked_tags(tags: Option<Vec<String>>) -> EngineResult<Option<Vec<String>>> {
    let Some(tags) = tags else { return Ok(None) };
    if tags.len() > MAX_TAGS {
        return Err(EngineError::InvalidRequest(format!("at most {MAX_TAGS} tags")));
    }
    for tag in &tags {
        check_length("tags", tag, MAX_AGENT_NAME_BYTES)?;
    }
    Ok(Some(tags))
}

fn checked_note(field: &'static str, note: Option<String>) -> EngineResult<Option<String>> {
    if let Some(note) = &note {
        check_length(field, note, MAX_NOTE_BYTES)?;
    }
    Ok(note)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(name: &str, live: bool, capabilities: Value, max: i32) -> NodeProviderRow {
        NodeProviderRow {
            node_id: "n".into(),
            provider: name.into(),
            capabilities,
            tags: vec!["gpu".into()],
            version: Some(name.into()),
            max_agents: max,
            active_agents: 2,
            reserved_agents: 1,
            load: if live { 0.25 } else { 0.5 },
            handlers_live: !live,
            last_heartbeat_at: Utc::now(),
            live,
        }
    }

    #[test]
    fn a_node_is_the_sum_of_its_providers() {
        let row = NodeRow {
            node_id: "n".into(),
            name: "box".into(),
            kind: "ws".into(),
            role: "broker".into(),
            machine_id: None,
            delivery_adapter: WS_ADAPTER.into(),
            capabilities: json!([{ "name": "build", "kind": "action" }, { "name": "test", "kind": "action" }]),
            tags: vec!["gpu".into(), "own".into()],
            version: None,
            max_agents: 3,
            delivery: None,
            created_at: Utc::now(),
        };
        let live = provider("a", true, json!([{ "name": "build", "kind": "capacity" }]), 8);
        let away = provider("b", false, json!([{ "name": "spawn:x", "kind": "capacity" }]), 2);
        let node = whole(row, &[&live, &away]);
        let kind = |c: &Value| format!("{} {}", c["name"], c["kind"]).replace('"', "");
        let kinds: Vec<_> = node.capabilities.iter().map(kind).collect();
        assert_eq!(kinds, ["build capacity", "spawn:x capacity", "test action"]);
        assert_eq!((node.live, node.handlers_live), (true, false), "only live providers' handlers count");
        assert_eq!((node.max_agents, node.active_agents, node.reserved_agents), (10, 4, 2));
        assert_eq!(node.providers.len(), 2);
        assert_eq!(node.version.as_deref(), Some("a"));
        assert_eq!(node.tags, ["gpu", "own"]);
    }
}
