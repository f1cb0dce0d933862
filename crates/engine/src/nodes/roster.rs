//! Roster: enrolment, listing and settings of nodes.

use std::{collections::HashMap, sync::Arc};

use relay_domain::{
    NodeId, ProviderName, WorkspaceScope,
    access::token::{TokenHash, TokenKind},
    names::strip_hash,
    nodes::{
        DIRECT_ID_PREFIX, DIRECT_NAME_PREFIX, LISTED_NODES, Node, NodeKind, NodeProvider, RosterNode,
        roster::{NodeFilter, NodeListPosition},
    },
    push::settings::EndpointSecrets,
    workspaces::plan::Quota,
};
use relay_store::{
    DirectTokenOutcome, EnrolOutcome, EnrolmentToken, NewDelivery, NodeEnrolment, Store, StoreResult,
    subscriptions::definitions::EncryptedSecret,
};
use relay_tasks::byte_budget::ByteLease;
use relay_wire::nodes::{ChangeNodeBody, EnrolNodeBody};
use serde_json::Value;

use super::{
    MAX_RACES, Nodes,
    settings::{
        check_broker_name, checked_capabilities, checked_machine, checked_max_agents, checked_node_id, checked_note,
        checked_tags, requested_adapter, requested_kind,
    },
};
use crate::push::delivery::FormerSettings;
use crate::{
    EngineError, EngineResult,
    access::callers::{AgentCaller, Credential},
    error::{BadCredential, Conflict, InvalidInput, Limit, Missing},
    parts::Parts,
};

/// Token of a node that enrols.
#[derive(Debug, Clone)]
pub enum NodeTokenRequest {
    /// A new token replaces the one before.
    Rotate,
    /// The node keeps this token, which must be its own.
    Keep(String),
}

/// Node, and the memory that its providers take until it is sent.
#[derive(Debug)]
pub struct HeldNode {
    pub node: RosterNode,
    pub memory: ByteLease,
}

/// Part of a list of nodes.
pub struct NodeList {
    pub nodes: Parts<RosterNode>,
    /// Position of the last node, if there are as many as may be listed.
    pub next: Option<NodeListPosition>,
}

/// Node with its token, which is shown to the presenter of the old one, or once.
#[derive(Debug)]
pub struct EnrolledNode {
    pub node: HeldNode,
    /// The only valid token.
    pub token: String,
}

/// Agent's own node with its new token.
#[derive(Debug)]
pub struct DirectNode {
    pub node_id: NodeId,
    pub name: String,
    /// Replaces all earlier tokens.
    pub token: String,
}

impl Nodes {
    /// Creates or updates a node, and gives it a new token unless it keeps its own. The old token can open no socket
    /// any more, and its sockets close.
    ///
    /// # Errors
    /// When a field is out of bounds, the kind is not supported, another active node has the name, or the token to keep
    /// is not that of the node.
    pub async fn enrol(
        &self,
        scope: WorkspaceScope,
        request: EnrolNodeBody,
        token: NodeTokenRequest,
    ) -> EngineResult<EnrolledNode> {
        for _ in 0..MAX_RACES {
            if let Some(enrolled) = self.try_enrol(scope, request.clone(), token.clone()).await? {
                return Ok(enrolled);
            }
        }
        Err(EngineError::Overloaded)
    }

    /// Enrols a node. `None` when the delivery settings were read for a node that was created or deleted meanwhile.
    async fn try_enrol(
        &self,
        scope: WorkspaceScope,
        request: EnrolNodeBody,
        token: NodeTokenRequest,
    ) -> EngineResult<Option<EnrolledNode>> {
        let name = check_broker_name(&request.name)?;
        let node_id = request.node_id.clone().map(checked_node_id).transpose()?;
        let fresh_id = NodeId::new(format!("node_{}", self.core.next_id()));
        let stored = self.core.store.node_with_secrets(scope, node_id.as_ref(), name).await?;
        let (kind, role) = requested_kind(&request, stored.as_ref().map(|(node, _)| node))?;
        // The id is part of the context that secrets are encrypted with, so it is chosen before the transaction, which
        // compares it.
        let own_id = match &stored {
            Some((node, _)) => node.node_id.clone(),
            None => node_id.clone().unwrap_or_else(|| fresh_id.clone()),
        };
        let adapter = requested_adapter(kind, request.delivery_adapter.as_deref())?;
        let (delivery_adapter, delivery) = match kind {
            // An enrolment replaces these settings as a whole. A change keeps the fields that it leaves out.
            NodeKind::HttpPush => self.read_delivery(scope, &own_id, request.delivery, stored.as_ref(), false)?.unzip(),
            // Nothing is called: the settings are kept for the node, with their secrets encrypted like those of others.
            NodeKind::Poll if request.delivery.as_ref().is_some_and(|delivery| !delivery.is_null()) => {
                let read = self.read_delivery(scope, &own_id, request.delivery, stored.as_ref(), false)?;
                (Some(adapter), read.map(|(_, delivery)| delivery))
            }
            NodeKind::Ws | NodeKind::Poll => (Some(adapter), None),
        };
        let (token_text, token) = match token {
            NodeTokenRequest::Rotate => {
                let fresh = self.tokens.fresh(TokenKind::Node)?;
                (fresh.text, EnrolmentToken::New(fresh.hash))
            }
            NodeTokenRequest::Keep(text) => {
                let hash = TokenHash::from_token(&text);
                // Compared in the transaction: another enrolment may replace the token at the same time.
                (text, EnrolmentToken::Kept(hash))
            }
        };
        let enrolment = NodeEnrolment {
            node_id,
            fresh_id,
            name: name.to_owned(),
            kind,
            delivery_adapter,
            delivery,
            machine_id: checked_machine(request.machine_id)?,
            role,
            capabilities: request.capabilities.map(checked_capabilities).transpose()?,
            max_agents: checked_max_agents(request.max_agents, role)?,
            tags: checked_tags(request.tags)?,
            version: checked_note("version", request.version)?,
            token,
            quota: self.quotas.limit(scope, Quota::Nodes).await?,
        };
        let node = self.store_enrolment(scope, enrolment).await?;
        Ok(node.map(|node| EnrolledNode { node, token: token_text }))
    }

    /// Changes a node. Its token and its sockets stay.
    ///
    /// # Errors
    /// When there is no such node, a field is out of bounds or does not fit the node's kind, or another node has the
    /// name.
    pub async fn change(
        &self,
        scope: WorkspaceScope,
        name_or_id: &str,
        change: ChangeNodeBody,
    ) -> EngineResult<HeldNode> {
        let Node { node_id: id, name, .. } = self.core.stored_node(scope, name_or_id).await?;
        let stored = self.core.store.node_with_secrets(scope, Some(&id), &name).await?;
        let stored = stored.ok_or_else(|| EngineError::NotFound(Missing::Node(name.clone())))?;
        let (kind, role) = (stored.0.kind, stored.0.role);
        let name = match change.name.as_deref() {
            Some(_) if id.as_str().starts_with(DIRECT_ID_PREFIX) => {
                return Err(EngineError::Invalid(InvalidInput::NodeName));
            }
            Some(wanted) => check_broker_name(wanted)?.to_owned(),
            None => name,
        };
        let delivery = change.delivery.filter(|delivery| !delivery.is_null());
        let (delivery_adapter, delivery) = match (kind, delivery) {
            (_, None) => (None, None),
            (NodeKind::HttpPush, delivery) => self.read_delivery(scope, &id, delivery, Some(&stored), true)?.unzip(),
            (NodeKind::Poll, delivery) => {
                let read = self.read_delivery(scope, &id, delivery, Some(&stored), true)?;
                (None, read.map(|(_, delivery)| delivery))
            }
            (NodeKind::Ws, Some(_)) => {
                return Err(EngineError::Invalid(InvalidInput::NodeKindIsFixed { node: name, kind }));
            }
        };
        let enrolment = NodeEnrolment {
            node_id: Some(id.clone()),
            fresh_id: id,
            name,
            kind,
            delivery_adapter,
            delivery,
            machine_id: checked_machine(change.machine_id)?,
            role: None,
            capabilities: change.capabilities.map(checked_capabilities).transpose()?,
            max_agents: match change.max_agents {
                None => None,
                requested => checked_max_agents(requested, Some(role))?,
            },
            tags: checked_tags(change.tags)?,
            version: checked_note("version", change.version)?,
            token: EnrolmentToken::Unchanged,
            // The node exists, so no node is added that a quota could refuse.
            quota: None,
        };
        // The settings were read for the id by which the node is found.
        self.store_enrolment(scope, enrolment).await?.ok_or(EngineError::Overloaded)
    }

    /// Stores an enrolment, and returns the node. `None` when the delivery settings belong to another node.
    async fn store_enrolment(&self, scope: WorkspaceScope, enrolment: NodeEnrolment) -> EngineResult<Option<HeldNode>> {
        let (outcome, recorded) = match self.core.store.enrol_node(scope, &enrolment, self.core.now()).await {
            // A node that renamed itself over its socket committed first.
            Err(error) if error.violates("nodes_name_is_unique") => (EnrolOutcome::NameTaken, None),
            other => other?,
        };
        recorded.into_iter().for_each(|recorded| self.core.announce(recorded));
        match outcome {
            EnrolOutcome::NameTaken => Err(EngineError::Conflict(Conflict::NodeName(enrolment.name))),
            EnrolOutcome::QuotaReached => Err(EngineError::LimitExceeded(Limit::Quota(Quota::Nodes))),
            EnrolOutcome::NoNode => Err(EngineError::NotFound(Missing::Node(enrolment.name))),
            EnrolOutcome::TokenMismatch => {
                Err(EngineError::Unauthenticated(BadCredential::UnknownToken { kind: TokenKind::Node }))
            }
            EnrolOutcome::Enrolled { node, replaced_token } => {
                // After the commit: before it, another request could read the old token into the cache again.
                replaced_token.into_iter().for_each(|old| self.tokens.revoke(old));
                self.core.hints.node_changed(scope, node.clone());
                self.by_name(scope, node.as_str()).await.map(Some)
            }
            EnrolOutcome::Raced => Ok(None),
        }
    }

    /// Deletes a node. Its token is revoked when this returns, its sockets close, its agents return to their own nodes.
    ///
    /// # Errors
    /// When there is no such node.
    pub async fn delete(&self, scope: WorkspaceScope, name_or_id: &str) -> EngineResult<()> {
        let node = self.core.stored_node(scope, name_or_id).await?;
        let deleted = self.core.store.delete_node(scope, &node.node_id, self.core.now()).await?;
        let deleted = deleted.ok_or_else(|| EngineError::NotFound(Missing::Node(node.name)))?;
        // After the commit: before it, another request could read the token into the cache again.
        deleted.token.into_iter().for_each(|token| self.tokens.revoke(token));
        let mut nodes = vec![node.node_id];
        // Its agents are on their own nodes now, whose connections begin to serve them.
        nodes.extend(deleted.agents.into_iter().map(NodeId::direct));
        // Keeps a hint far below NATS' payload limit.
        nodes.chunks(1000).for_each(|some| self.core.hints.agents_moved(scope, some.to_vec()));
        self.core.announce(deleted.recorded);
        Ok(())
    }

    /// Reads the call settings of a request, with their adapter; `None` to keep the stored ones.
    fn read_delivery(
        &self,
        scope: WorkspaceScope,
        id: &NodeId,
        requested: Option<Value>,
        stored: Option<&(Node, Option<EncryptedSecret>)>,
        keeps_the_rest: bool,
    ) -> EngineResult<Option<(&'static str, NewDelivery)>> {
        let Some(requested) = requested.filter(|requested| !requested.is_null()) else {
            return match stored {
                Some(_) => Ok(None),
                None => Err(EngineError::Invalid(InvalidInput::NodeDelivery(
                    "delivery is required for kind http_push".into(),
                ))),
            };
        };
        let secrets = &self.secrets;
        let known = match stored {
            Some((_, sealed)) => secrets.open_node_delivery(scope, id, sealed.as_ref())?,
            // A new node has nothing to keep, so a redacted secret is refused.
            None => EndpointSecrets::default(),
        };
        let base = stored.and_then(|(node, _)| node.delivery.as_ref()).filter(|_| keeps_the_rest);
        let former = FormerSettings { base, secrets: known };
        let (delivery, new) = secrets.seal_node_delivery(self.egress.policy(), scope, id, requested, former)?;
        Ok(Some((delivery.adapter(), new)))
    }

    /// Finds a node by name or id. The memory of its providers is not waited for: a registration or an enrolment that
    /// has been committed must be answered.
    pub async fn by_name(&self, scope: WorkspaceScope, name_or_id: &str) -> EngineResult<HeldNode> {
        let (node, bytes) = self.sized(scope, name_or_id).await?;
        let memory = self.try_reserve_answer(scope, bytes).await.ok_or(EngineError::Overloaded)?;
        self.hold(scope, node, memory).await
    }

    /// Takes the memory of a node's providers, or none if there is none left.
    pub(super) async fn try_reserve_answer(&self, scope: WorkspaceScope, bytes: usize) -> Option<ByteLease> {
        let family = self.core.family(scope).await;
        let answers = &self.core.answers;
        answers.try_reserve(family, bytes).or_else(|| answers.try_reserve(family, 0))
    }

    async fn sized(&self, scope: WorkspaceScope, name_or_id: &str) -> EngineResult<(Node, usize)> {
        let wanted = strip_hash(name_or_id);
        let found = self.core.store.node_with_size(scope, wanted).await?;
        found.ok_or_else(|| EngineError::NotFound(Missing::Node(wanted.to_owned())))
    }

    async fn hold(&self, scope: WorkspaceScope, node: Node, memory: ByteLease) -> EngineResult<HeldNode> {
        let providers = self.core.store.providers_of_nodes(scope, std::slice::from_ref(&node.node_id)).await?;
        Ok(HeldNode { node: RosterNode { node, providers }, memory })
    }

    /// Finds a node by name or id if the caller may see it.
    ///
    /// # Errors
    /// When the name is unknown or not visible to this caller.
    pub async fn visible(&self, caller: &Credential, name_or_id: &str) -> EngineResult<HeldNode> {
        let scope = caller.scope();
        let (node, bytes) = self.sized(scope, name_or_id).await?;
        let memory = self.core.reserve_answer(scope, bytes).await?;
        let HeldNode { mut node, memory } = self.hold(scope, node, memory).await?;
        if let Some(agents) = &caller.view().filters.agent_ids {
            let locations = self.core.store.locations_of_agents(caller.scope(), agents).await?;
            if !locations.iter().any(|(location, _)| *location == node.node.node_id) {
                return Err(EngineError::NotFound(Missing::Node(node.node.name)));
            }
            count_visible_agents(&mut node, &locations);
        }
        Ok(HeldNode { node, memory })
    }

    /// Lists the nodes that match a filter and that the caller may see, brokers first, then by name. An observer of
    /// certain agents sees their nodes, and only those agents in the counts.
    pub async fn list(&self, caller: &Credential, mut filter: NodeFilter) -> EngineResult<NodeList> {
        let scope = caller.scope();
        filter.limit = filter.limit.clamp(1, LISTED_NODES.1);
        filter.name = filter.name.map(|name| strip_hash(&name).to_owned());
        filter.hosts.clone_from(&caller.view().filters.agent_ids);
        let listed = self.core.store.node_sizes(scope, &filter).await?;
        // A full page may be the last one. The next page is then empty.
        let is_full = i64::try_from(listed.len()).is_ok_and(|found| found == filter.limit);
        let next = listed.last().filter(|_| is_full).map(|(last, _)| last.position.clone());
        let locations = match &filter.hosts {
            Some(agents) => Some(Arc::new(self.core.store.locations_of_agents(scope, agents).await?)),
            None => None,
        };
        let ids = listed.into_iter().map(|(node, bytes)| (node.node_id, bytes)).collect();
        let store = self.core.store.clone();
        let read = move |ids: Vec<NodeId>| {
            // Cloned, because this closure is called for each part of the answer.
            let (store, locations) = (store.clone(), locations.clone());
            async move {
                let mut nodes = read_nodes(&store, scope, &ids).await?;
                if let Some(locations) = locations {
                    nodes.iter_mut().for_each(|node| count_visible_agents(node, &locations));
                }
                Ok(nodes)
            }
        };
        Ok(NodeList { nodes: self.core.read_in_parts(scope, ids, read).await?, next })
    }

    /// Removes a provider of a node; idempotent.
    ///
    /// # Errors
    /// When there is no such node.
    pub async fn forget_provider(&self, scope: WorkspaceScope, node: &str, provider: &str) -> EngineResult<()> {
        let node = self.core.stored_node(scope, node).await?.node_id;
        let provider = ProviderName::new(provider);
        let (held, recorded) = self.core.store.remove_provider(scope, &node, &provider, self.core.now()).await?;
        self.core.announce(recorded);
        if let Some(epoch) = held {
            // Closes its socket, wherever it is: no connection may act for the provider any more.
            self.core.hints.provider_taken(scope, node.clone(), &provider, epoch + 1);
            self.core.hints.node_changed(scope, node);
        }
        Ok(())
    }

    /// Gives the caller's own node a new token; creates the node on the first call.
    ///
    /// # Errors
    /// When the agent is located on another node.
    pub async fn mint_direct_token(&self, caller: &AgentCaller) -> EngineResult<DirectNode> {
        caller.refuse_former_token()?;
        let token = self.tokens.fresh(TokenKind::Node)?;
        let (scope, agent, generation) = (caller.scope, caller.agent_id, caller.token_generation);
        match self.core.store.mint_direct_token(scope, agent, generation, token.hash).await? {
            DirectTokenOutcome::TokenRotated => {
                // The transaction saw a newer token than the cache of this process.
                Err(EngineError::Unauthenticated(BadCredential::UnknownToken { kind: TokenKind::Agent }))
            }
            DirectTokenOutcome::NoAgent => Err(EngineError::NotFound(Missing::Agent(caller.name.to_string()))),
            DirectTokenOutcome::BoundElsewhere(node) => Err(EngineError::Conflict(Conflict::AgentBoundToNode(node))),
            DirectTokenOutcome::Minted { replaced_token } => {
                if let Some(old) = replaced_token {
                    self.tokens.revoke(old);
                }
                Ok(DirectNode {
                    node_id: NodeId::direct(caller.agent_id),
                    name: format!("{DIRECT_NAME_PREFIX}{}", caller.agent_id),
                    token: token.text,
                })
            }
        }
    }
}

/// Reads the nodes that match a filter, with their providers.
pub async fn list_nodes(store: &Store, scope: WorkspaceScope, filter: &NodeFilter) -> StoreResult<Vec<RosterNode>> {
    let listed = store.node_sizes(scope, filter).await?;
    let ids: Vec<NodeId> = listed.into_iter().map(|(node, _)| node.node_id).collect();
    read_nodes(store, scope, &ids).await
}

/// Reads these nodes with their providers, brokers first, then by name.
async fn read_nodes(store: &Store, scope: WorkspaceScope, ids: &[NodeId]) -> StoreResult<Vec<RosterNode>> {
    let nodes = store.nodes(scope, ids).await?;
    let mut by_node: HashMap<NodeId, Vec<NodeProvider>> = HashMap::new();
    for provider in store.providers_of_nodes(scope, ids).await? {
        by_node.entry(provider.node_id.clone()).or_default().push(provider);
    }
    let entries = nodes.into_iter().map(|node| {
        // A node without a row above has no provider.
        let providers = by_node.remove(&node.node_id).unwrap_or_default();
        RosterNode { node, providers }
    });
    Ok(entries.collect())
}

/// Replaces the counts of a node and its providers by those of the agents at these locations.
fn count_visible_agents(node: &mut RosterNode, locations: &[(NodeId, Option<ProviderName>)]) {
    let here = locations.iter().filter(|(location, _)| *location == node.node.node_id);
    node.node.bound_agents = i64::try_from(here.count()).unwrap_or(i64::MAX);
    for provider in &mut node.providers {
        let is_here = |(node, name): &&(NodeId, Option<ProviderName>)| {
            *node == provider.node_id && name.as_ref() == Some(&provider.name)
        };
        provider.active_agents = i32::try_from(locations.iter().filter(is_here).count()).unwrap_or(i32::MAX);
        // The agents of open spawns do not exist yet.
        provider.reserved_agents = 0;
    }
}
