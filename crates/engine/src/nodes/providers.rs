//! Providers of nodes on their sockets: registration and takeover, heartbeats, hosting of agents, leaving.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};
use relay_domain::{
    ActionId, AgentId, GatewayId, NodeId, ProviderName, WorkspaceScope,
    access::token::TokenKind,
    agents::{AgentKind, AgentStatus},
    names::{MAX_NODE_NAME_BYTES, check_name},
    nodes::{
        MAX_PROVIDERS,
        takeover::{ProbeOutcome, TakeoverDecision, decide_takeover},
    },
};
use relay_store::{
    agents::spawn::InventoryReconciliation,
    events::RecordedEvents,
    nodes::{
        fence::Fence,
        hosting::{HostRequest, InventoryConflict, InventoryOutcome, ListedAgent, SessionHandle},
        providers::{ProviderClaim, ProviderHolder, ProviderRegistration, RegisterOutcome},
    },
};
use relay_stream::{ProbeRequest, Probes};

use tokio::time::Instant;

use super::{MAX_RACES, Nodes, roster::HeldNode};
use crate::{
    EngineError, EngineResult,
    agents::lifecycle::RegisterAgent,
    error::{Conflict, Denial, Missing},
};

/// Time that a registration waits for the probe of its incumbent.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to find out whether a registration was committed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(60);
const RELEASE_POLL: Duration = Duration::from_secs(2);
/// Postgres ends a transaction that waits for its COMMIT after 3 s, so that the last look is final.
const RELEASE_LOOKS: u32 = 3;

/// Registration request of a provider's connection.
#[derive(Debug, Clone)]
pub struct Registrant {
    pub scope: WorkspaceScope,
    pub node_id: NodeId,
    pub gateway_id: GatewayId,
    /// The node is one agent's own connection.
    pub is_direct: bool,
    /// Time when the connection asked for the provider.
    pub requested_at: DateTime<Utc>,
    pub registration: ProviderRegistration,
}

/// Provider that a connection holds.
#[derive(Debug)]
pub struct RegisteredProvider {
    /// Fences all changes by the connection.
    pub epoch: i64,
    /// The node as the reply shows it, if it was read with the registration.
    pub node: Option<HeldNode>,
}

impl Nodes {
    /// Registers a provider's connection.
    ///
    /// An incumbent is probed through its gateway; only one that answers makes this registration fail with a conflict.
    /// A superseded connection gets a hint, and notices its old epoch at the latest.
    ///
    /// # Errors
    /// [`Conflict::ProviderInstance`], [`Conflict::NodeName`],
    /// [`Conflict::ActionName`], [`Conflict::Superseded`], [`Missing::Node`], an invalid name, or too many providers.
    pub async fn register_provider(&self, registrant: &Registrant) -> EngineResult<RegisteredProvider> {
        let Registrant { scope, node_id, gateway_id, requested_at, registration, .. } = registrant;
        check_name("name", &registration.node_name, MAX_NODE_NAME_BYTES)?;
        if registrant.is_direct {
            return self.register_direct(registrant).await;
        }
        crate::nodes::settings::check_broker_name(&registration.node_name)?;
        let until = Instant::now() + REGISTRATION_TIMEOUT;
        let mut silent_epoch = None;
        for _ in 0..MAX_RACES {
            let holder = self.core.store.provider_holder(*scope, node_id, &registration.provider).await?;
            let incumbent = ProviderHolder::incumbent(holder.as_ref(), &registration.instance_id);
            let epoch = holder.as_ref().map(|h| h.epoch);
            // Silence was proved for one epoch. A connection that took over since must be probed itself.
            let proof = (silent_epoch.is_some() && silent_epoch == epoch).then_some(ProbeOutcome::Silent);
            match decide_takeover(incumbent, proof) {
                TakeoverDecision::TakeOver => {}
                TakeoverDecision::Refuse => return Err(EngineError::Conflict(Conflict::ProviderInstance)),
                TakeoverDecision::Probe => {
                    match self.probe_incumbent(*scope, node_id, &registration.provider, holder.as_ref()).await {
                        ProbeOutcome::Alive => return Err(EngineError::Conflict(Conflict::ProviderInstance)),
                        ProbeOutcome::Silent => silent_epoch = epoch,
                    }
                    // After the deadline the provider is claimed without another read: the expected epoch still refuses
                    // the claim if another connection took over.
                    if Instant::now() < until {
                        continue;
                    }
                }
            }
            let at = self.core.now();
            let capabilities = registration.capabilities.as_array().map_or(0, Vec::len);
            let ids: Vec<ActionId> = (0..capabilities).map(|_| ActionId::new(self.core.next_id())).collect();
            let claim = ProviderClaim {
                expected_epoch: epoch,
                gateway: *gateway_id,
                action_ids: &ids,
                requested_at: *requested_at,
            };
            let outcome = self.core.store.register_provider(*scope, node_id, claim, registration, at).await?;
            if !matches!(outcome, RegisterOutcome::Raced) {
                return self.complete_registration(registrant, outcome);
            }
        }
        Err(EngineError::Overloaded)
    }

    /// Announces a registration.
    pub(super) fn complete_registration(
        &self,
        registrant: &Registrant,
        outcome: RegisterOutcome,
    ) -> EngineResult<RegisteredProvider> {
        let Registrant { scope, node_id, registration, .. } = registrant;
        match outcome {
            RegisterOutcome::Registered { epoch, recorded } => {
                self.core.announce(recorded);
                self.core.hints.provider_taken(*scope, node_id.clone(), &registration.provider, epoch);
                Ok(RegisteredProvider { epoch, node: None })
            }
            RegisterOutcome::NameConflict => {
                Err(EngineError::Conflict(Conflict::NodeName(registration.node_name.clone())))
            }
            RegisterOutcome::ActionConflict(name) => Err(EngineError::Conflict(Conflict::ActionName(name))),
            RegisterOutcome::TooManyProviders => {
                let remedy = "DELETE /v1/nodes/{name}/providers/{provider} removes one";
                Err(EngineError::invalid_request(format!("at most {MAX_PROVIDERS} providers of a node: {remedy}")))
            }
            RegisterOutcome::NoNode => Err(EngineError::NotFound(Missing::Node(node_id.to_string()))),
            RegisterOutcome::Superseded => Err(EngineError::Conflict(Conflict::Superseded)),
            RegisterOutcome::Raced => Err(EngineError::Overloaded),
        }
    }

    async fn probe_incumbent(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
        holder: Option<&ProviderHolder>,
    ) -> ProbeOutcome {
        // A provider without a gateway has no connection that could answer.
        let Some((gateway, epoch)) = holder.and_then(|h| Some((h.gateway_id?, h.epoch))) else {
            return ProbeOutcome::Silent;
        };
        let request =
            ProbeRequest { workspace: scope.workspace_id(), node: node.clone(), provider: provider.clone(), epoch };
        self.stream.probe(gateway, &request).await
    }

    /// Subscribes to the probes for a gateway.
    ///
    /// # Errors
    /// When the NATS client has been closed.
    pub async fn probes(&self, gateway: GatewayId) -> EngineResult<Probes> {
        Ok(self.stream.subscribe_probes(gateway).await?)
    }

    pub async fn answer_probe(&self, reply: String, proof: ProbeOutcome) {
        self.stream.answer_probe(reply, proof).await;
    }

    /// Frees the provider that a registration with an unknown commit outcome may have taken, after its connection has
    /// given up. Otherwise it would seem connected until its heartbeats are missed.
    pub async fn release_unconfirmed(&self, registrant: &Registrant) {
        let until = Instant::now() + RELEASE_TIMEOUT;
        let mut looks = 0;
        while looks < RELEASE_LOOKS && Instant::now() < until {
            tokio::time::sleep(RELEASE_POLL).await;
            match self.try_release(registrant).await {
                Ok(true) => return,
                // Only reads that were answered count: during an outage nothing was looked at.
                Ok(false) => looks += 1,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "failed to free a provider, will retry");
                }
            }
        }
    }

    async fn try_release(&self, registrant: &Registrant) -> EngineResult<bool> {
        // `requested_at` identifies this registration: a later one of the same instance must not be freed.
        let Registrant { scope, node_id, gateway_id, requested_at, registration, .. } = registrant;
        let claim =
            ProviderClaim { expected_epoch: None, gateway: *gateway_id, action_ids: &[], requested_at: *requested_at };
        let taken = self.core.store.committed_registration(*scope, node_id, &claim, registration).await?;
        let Some(epoch) = taken else { return Ok(false) };
        let provider = registration.provider.clone();
        self.disconnect_provider(&Fence { scope: *scope, node_id: node_id.clone(), provider, epoch }).await?;
        Ok(true)
    }

    /// Ends a connection. Its agents are offline unless another connection has taken over.
    pub async fn disconnect_provider(&self, fence: &Fence) -> EngineResult<bool> {
        let ended = self.core.store.disconnect_provider(fence, self.core.now()).await?;
        Ok(self.announce_change(ended))
    }

    /// Removes a provider with its capabilities.
    pub async fn deregister_provider(&self, fence: &Fence) -> EngineResult<bool> {
        let removed = self.core.store.deregister_provider(fence, self.core.now()).await?;
        Ok(self.announce_change(removed))
    }

    /// Announces a recorded change; returns true if there was one.
    fn announce_change(&self, changed: Option<RecordedEvents>) -> bool {
        let done = changed.is_some();
        changed.into_iter().for_each(|recorded| self.core.announce(recorded));
        done
    }

    /// Synchronizes a provider's complete set of running agents.
    ///
    /// Conflicting entries are skipped and the others adopted; it fails only when no entry is acceptable, because
    /// brokers drop their socket on an error (ADR 0002). An agent whose own node is unavailable for a moment is never a
    /// reason to fail.
    ///
    /// # Errors
    /// The first conflict, when there are entries and none is acceptable; or superseded.
    pub async fn sync_inventory(&self, fence: &Fence, mut listed: Vec<ListedAgent>) -> EngineResult<SyncedInventory> {
        let mut rejected = Vec::new();
        // Agents may be taken between two rounds, but each round drops at least one entry, so the loop ends.
        loop {
            let conflicts = match self.core.store.sync_inventory(fence, &listed, self.core.now()).await? {
                InventoryOutcome::Synced { rebound, left, recorded, reconciled, .. } => {
                    self.core.announce(recorded);
                    if listed.is_empty()
                        && let Some(first) = rejected.iter().find(|entry: &&RejectedEntry| entry.fails_alone())
                    {
                        // The empty inventory is stored all the same: the provider hosts none of these agents.
                        return Err(EngineError::Conflict(first.conflict()));
                    }
                    if !left.is_empty() {
                        // The connections that served these agents before must stop sending.
                        self.core.hints.agents_moved(fence.scope, left);
                    }
                    let agents = listed.into_iter().map(|entry| entry.agent_id).collect();
                    return Ok(SyncedInventory { rebound, rejected, agents, reconciled });
                }
                InventoryOutcome::Superseded => return Err(EngineError::Conflict(Conflict::Superseded)),
                InventoryOutcome::Conflicts(conflicts) => conflicts.into_iter().collect::<HashMap<_, _>>(),
            };
            listed.retain(|entry| {
                let Some(conflict) = conflicts.get(&entry.agent_id) else { return true };
                tracing::info!(agent.name = %entry.name, reason = ?conflict, "skipped a conflicting inventory entry");
                rejected.push(RejectedEntry { agent_id: entry.agent_id, name: entry.name.clone(), reason: *conflict });
                false
            });
        }
    }

    /// `agent.register`: creates the agent on this node, or binds an existing one that is offline or already here, with
    /// a new token.
    ///
    /// # Errors
    /// [`Conflict::AgentExists`] when the name is in use elsewhere; superseded; or an invalid name.
    pub async fn register_agent(
        &self,
        fence: &Fence,
        name: &str,
        session: SessionHandle<'_>,
        joins_general: bool,
    ) -> EngineResult<HostedAgent> {
        relay_domain::names::check_agent_name(name)?;
        for _ in 0..MAX_RACES {
            let Some(taken) = self.core.store.agent_holding_name(fence.scope, name).await? else {
                let request = RegisterAgent {
                    name: name.to_owned(),
                    kind: AgentKind::Agent,
                    persona: None,
                    metadata: None,
                    capabilities: None,
                    skills: None,
                    joins_general,
                    direct_machine_prefix: None,
                };
                match self.agents.register(fence.scope, &request).await {
                    Ok(registered) => {
                        let token = AgentTokenRequest::Keep(registered.token);
                        return self.host_agent(fence, registered.agent_id, name, token, session).await;
                    }
                    // Another request created the agent in between: look at it again.
                    Err(EngineError::Conflict(Conflict::AgentExists(_))) => continue,
                    Err(other) => return Err(other),
                }
            };
            let here = taken.node_id == fence.node_id
                && taken.provider.as_ref().is_none_or(|provider| *provider == fence.provider);
            if taken.status != AgentStatus::Offline && !here {
                return Err(EngineError::Conflict(Conflict::AgentExists(name.to_owned())));
            }
            match self.host_agent(fence, taken.agent_id, name, AgentTokenRequest::Rotate, session).await {
                // Deleted in between: its name is free again.
                Err(EngineError::NotFound(Missing::Agent(_))) => {}
                hosted => return hosted,
            }
        }
        Err(EngineError::Overloaded)
    }

    /// `agent.recover`: rebinds an existing identity whose last location is this node, or that is offline.
    ///
    /// # Errors
    /// [`Missing::Agent`]; [`Denial::AgentRecovery`] if the name has another id, or its agent is connected on another
    /// node; or superseded.
    pub async fn recover_agent(
        &self,
        fence: &Fence,
        name: &str,
        expected: AgentId,
        session: SessionHandle<'_>,
    ) -> EngineResult<HostedAgent> {
        let taken = self
            .core
            .store
            .agent_holding_name(fence.scope, name)
            .await?
            .ok_or_else(|| EngineError::NotFound(Missing::Agent(name.to_owned())))?;
        let is_elsewhere = taken.status != AgentStatus::Offline && taken.node_id != fence.node_id;
        if taken.agent_id != expected || is_elsewhere {
            return Err(EngineError::Forbidden(Denial::AgentRecovery));
        }
        self.host_agent(fence, taken.agent_id, name, AgentTokenRequest::Rotate, session).await
    }

    async fn host_agent(
        &self,
        fence: &Fence,
        agent_id: AgentId,
        name: &str,
        token: AgentTokenRequest,
        session: SessionHandle<'_>,
    ) -> EngineResult<HostedAgent> {
        let binding = format!("anb_{}", self.core.next_id());
        let (token, new_token) = match token {
            AgentTokenRequest::Rotate => {
                let fresh = self.tokens.fresh(TokenKind::Agent)?;
                (fresh.text, Some(fresh.hash))
            }
            AgentTokenRequest::Keep(text) => (text, None),
        };
        let request = HostRequest { agent: agent_id, binding_id: &binding, session, new_token, at: self.core.now() };
        let hosted = self.core.store.host_agent(fence, request).await?;
        let Some(moved) = hosted else {
            let holder = self.core.store.agent_holding_name(fence.scope, name).await?;
            return Err(match holder.filter(|holder| holder.agent_id == agent_id) {
                Some(_) => EngineError::Conflict(Conflict::Superseded),
                None => EngineError::NotFound(Missing::Agent(name.to_owned())),
            });
        };
        // After the commit: a lookup that is cached from now on reads the new rows.
        moved.ended_tokens.into_iter().for_each(|hash| self.tokens.revoke(hash));
        self.core.announce(moved.recorded);
        if moved.left != fence.node_id {
            // The connection that served the agent before must stop sending.
            self.core.hints.agents_moved(fence.scope, vec![moved.left]);
        }
        // After the commit, so that no delivery falls between the position and the new location.
        let position = self
            .core
            .store
            .positions(&[(fence.scope, agent_id)])
            .await?
            .pop()
            .ok_or_else(|| EngineError::NotFound(Missing::Agent(name.to_owned())))?;
        Ok(HostedAgent { agent_id, name: name.to_owned(), token, position })
    }

    /// `agent.deregister`: unbinds the agent from this provider.
    pub async fn deregister_agent(&self, fence: &Fence, agent: AgentId) -> EngineResult<bool> {
        let Some(recorded) = self.core.store.unbind_hosted_agent(fence, agent, self.core.now()).await? else {
            return Ok(false);
        };
        self.core.announce(recorded);
        // Its deliveries continue over its own node's connection, if it has one.
        self.core.hints.agents_moved(fence.scope, vec![fence.node_id.clone(), NodeId::direct(agent)]);
        Ok(true)
    }
}

/// Token of an agent that a provider begins to host.
enum AgentTokenRequest {
    /// A new token replaces the one before.
    Rotate,
    /// The agent was just registered with this token.
    Keep(String),
}

/// Result of an adopted inventory.
#[derive(Debug)]
pub struct SyncedInventory {
    /// Number of agents that it bound or brought online.
    pub rebound: usize,
    /// Conflicting entries.
    pub rejected: Vec<RejectedEntry>,
    /// Listed agents without conflicting ones.
    pub agents: Vec<AgentId>,
    /// Effect on the provider's open invocations.
    pub reconciled: InventoryReconciliation,
}

/// Entry of an inventory that was skipped.
#[derive(Debug, Clone)]
pub struct RejectedEntry {
    pub agent_id: AgentId,
    pub name: String,
    reason: InventoryConflict,
}

impl RejectedEntry {
    /// Returns the error that names the reason.
    #[must_use]
    pub fn conflict(&self) -> Conflict {
        let name = self.name.clone();
        match self.reason {
            InventoryConflict::Identity => Conflict::AgentIdentityMismatch(name),
            InventoryConflict::Location | InventoryConflict::AwaitedLocation => Conflict::AgentLocation(name),
            InventoryConflict::Provider => Conflict::AgentProvider(name),
        }
    }

    const fn fails_alone(&self) -> bool {
        match self.reason {
            InventoryConflict::Identity | InventoryConflict::Location | InventoryConflict::Provider => true,
            InventoryConflict::AwaitedLocation => false,
        }
    }
}

/// Agent that a provider hosts from now on.
#[derive(Debug, Clone)]
pub struct HostedAgent {
    pub agent_id: AgentId,
    pub name: String,
    pub token: String,
    pub position: relay_store::mailboxes::cursors::MailboxPosition,
}
