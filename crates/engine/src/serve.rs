//! A node's provider on its socket: registration and take-over, heartbeats, hosting agents, leaving.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use relay_domain::{
    AgentId, GatewayId, NodeId, ProviderName, WorkspaceScope,
    agent::AgentKind,
    names::{MAX_NODE_NAME_BYTES, check_name},
    takeover::{Decision, Proof, decide},
};
use relay_store::{
    events::Recorded,
    heartbeats::Heartbeat,
    hosting::{Conflict, Fence, Inventory, Listed},
    providers::{Claim, Holder, NodeIdentity, Registered, Registration},
    spawned::Reconciled,
};
use relay_stream::{ProbeRequest, Probes};

use crate::{Engine, EngineError, EngineResult, Inner, agents::RegisterAgent, auth::Credential};

/// How long a registration may wait for the verdict over its incumbent.
const HELD_AT_MOST: Duration = Duration::from_secs(5);
/// Heartbeats gather this long and are written set-wise.
const HEARTBEATS_EVERY: Duration = Duration::from_secs(1);
/// Registers that lose a race look again this often before they give up.
const RACES: usize = 10;

/// Heartbeats that wait to be written: the newest of each provider.
#[derive(Debug, Default)]
pub(crate) struct Heartbeats {
    waiting: Mutex<HashMap<(WorkspaceScope, NodeId, ProviderName), Heartbeat>>,
}

/// Writes heartbeats until the engine is gone.
pub(crate) async fn write_heartbeats(engine: std::sync::Weak<Inner>) {
    loop {
        tokio::time::sleep(HEARTBEATS_EVERY).await;
        let Some(inner) = engine.upgrade() else { return };
        let beats: Vec<Heartbeat> = {
            let mut waiting = inner.heartbeats.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.drain().map(|(_, beat)| beat).collect()
        };
        // The next heartbeat makes up for one that was lost with Postgres away.
        for some in beats.chunks(1000) {
            let changed = match inner.store.record_heartbeats(some).await {
                Ok(changed) => changed,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "heartbeats were not recorded");
                    continue;
                }
            };
            for beat in changed {
                refresh_capabilities(&inner, beat).await;
            }
        }
    }
}

/// What a heartbeat says that its provider can do is what placement goes by from now on.
async fn refresh_capabilities(inner: &Inner, beat: &Heartbeat) {
    let count = beat.capabilities.as_ref().and_then(serde_json::Value::as_array).map_or(0, Vec::len);
    let ids: Vec<i64> = (0..count).map(|_| inner.ids.next_id()).collect();
    let at = chrono::DateTime::from_timestamp_millis(inner.ids.now_ms()).unwrap_or_default();
    match inner.store.refresh_capabilities(beat, &ids, at).await {
        Ok(true) => {}
        Ok(false) => tracing::info!(node.id = %beat.node_id, "a heartbeat claims an action that is another's"),
        Err(error) => tracing::debug!(error = &error as &dyn std::error::Error, "capabilities were not refreshed"),
    }
}

/// Who asks to serve a node.
#[derive(Debug, Clone)]
pub struct Registrant {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The node of the token.
    pub node_id: NodeId,
    /// The gateway with the socket.
    pub gateway_id: GatewayId,
    /// What it says of itself.
    pub registration: Registration,
}

impl Engine {
    /// What a socket must know of its node; `None` when there is no such node.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn node_identity(&self, scope: WorkspaceScope, node: &NodeId) -> EngineResult<Option<NodeIdentity>> {
        Ok(self.store().node_identity(scope, node).await?)
    }

    /// Whether a node is one agent's own connection; `None` when there is no such node.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn is_direct_node(&self, scope: WorkspaceScope, node: &NodeId) -> EngineResult<Option<bool>> {
        Ok(self.node_identity(scope, node).await?.map(|node| node.direct))
    }

    /// Registers a provider's connection; returns its epoch.
    ///
    /// An incumbent is asked for a proof of life through its gateway; only one that gives it makes this
    /// registration fail with a conflict. Who is superseded hears of it by a hint, and notices by its
    /// epoch at the latest.
    ///
    /// # Errors
    /// [`EngineError::ProviderInstanceConflict`], [`EngineError::NodeNameConflict`],
    /// [`EngineError::ActionNameConflict`], [`EngineError::NodeNotFound`], an invalid name, or storage that is away.
    pub async fn register_provider(&self, registrant: &Registrant) -> EngineResult<i64> {
        let Registrant { scope, node_id, gateway_id, registration } = registrant;
        check_name("name", &registration.node_name, MAX_NODE_NAME_BYTES)?;
        let until = tokio::time::Instant::now() + HELD_AT_MOST;
        let mut silent_epoch = None;
        for _ in 0..RACES {
            let direct = self
                .is_direct_node(*scope, node_id)
                .await?
                .ok_or_else(|| EngineError::NodeNotFound(node_id.to_string()))?;
            if !direct {
                crate::nodes::node_name(&registration.node_name)?;
            }
            let holder = self.store().provider_holder(*scope, node_id, &registration.provider).await?;
            let incumbent = Holder::incumbent(holder.as_ref(), &registration.instance_id);
            let epoch = holder.as_ref().map(|h| h.epoch);
            let proof = (silent_epoch.is_some() && silent_epoch == epoch).then_some(Proof::Silent);
            match decide(direct, incumbent, proof) {
                Decision::TakeOver => {}
                Decision::Refuse => return Err(EngineError::ProviderInstanceConflict),
                Decision::Probe => {
                    match self.probe(*scope, node_id, &registration.provider, holder.as_ref()).await {
                        Proof::Alive => return Err(EngineError::ProviderInstanceConflict),
                        Proof::Silent => silent_epoch = epoch,
                    }
                    if tokio::time::Instant::now() < until {
                        continue;
                    }
                }
            }
            let at = self.now();
            let capabilities = registration.capabilities.as_array().map_or(0, Vec::len);
            let ids: Vec<i64> = (0..capabilities).map(|_| self.next_id()).collect();
            let claim = Claim { expected_epoch: epoch, gateway: *gateway_id, action_ids: &ids };
            match self.store().register_provider(*scope, node_id, claim, registration, at).await? {
                Registered::Taken { epoch, recorded } => {
                    self.announce(recorded);
                    self.hints().provider_taken(*scope, node_id.clone(), &registration.provider, epoch);
                    return Ok(epoch);
                }
                Registered::NameConflict => {
                    return Err(EngineError::NodeNameConflict(registration.node_name.clone()));
                }
                Registered::ActionConflict(name) => return Err(EngineError::ActionNameConflict(name)),
                Registered::NoNode => return Err(EngineError::NodeNotFound(node_id.to_string())),
                Registered::Raced => {}
            }
        }
        Err(EngineError::Overloaded)
    }

    async fn probe(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
        holder: Option<&Holder>,
    ) -> Proof {
        let Some((gateway, epoch)) = holder.and_then(|h| Some((h.gateway_id?, h.epoch))) else {
            return Proof::Silent;
        };
        let request =
            ProbeRequest { workspace: scope.workspace_id(), node: node.clone(), provider: provider.clone(), epoch };
        self.inner.stream.probe(gateway, &request).await
    }

    /// Probes addressed to a gateway.
    ///
    /// # Errors
    /// When the NATS client has been closed.
    pub async fn probes(&self, gateway: GatewayId) -> EngineResult<Probes> {
        Ok(self.inner.stream.probes(gateway).await?)
    }

    /// Answers a probe.
    pub async fn answer_probe(&self, reply: String, proof: Proof) {
        self.inner.stream.answer_probe(reply, proof).await;
    }

    /// A heartbeat: written within a second, newest first.
    pub fn heartbeat(&self, beat: Heartbeat) {
        let mut waiting = self.inner.heartbeats.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (beat.scope, beat.node_id.clone(), beat.provider.clone());
        let capabilities = waiting.get(&key).and_then(|earlier| earlier.capabilities.clone());
        let beat = Heartbeat { capabilities: beat.capabilities.or(capabilities), ..beat };
        waiting.insert(key, beat);
    }

    /// A connection ended. Its agents are offline unless another connection has taken over.
    ///
    /// # Errors
    /// When storage is away; the worker finds out by the gateway's lease or the liveness sweep.
    pub async fn disconnect_provider(&self, fence: &Fence) -> EngineResult<bool> {
        let Fence { scope, node_id, provider, epoch } = fence;
        let ended = self.store().disconnect_provider(*scope, node_id, provider, *epoch, self.now()).await?;
        Ok(self.announced(ended))
    }

    /// A provider leaves for good, with its capabilities.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn deregister_provider(&self, fence: &Fence) -> EngineResult<bool> {
        let Fence { scope, node_id, provider, epoch } = fence;
        let gone = self.store().deregister_provider(*scope, node_id, provider, *epoch, self.now()).await?;
        Ok(self.announced(gone))
    }

    /// Announces what was recorded of a change, and tells whether there was one.
    fn announced(&self, changed: Option<Recorded>) -> bool {
        let done = changed.is_some();
        changed.into_iter().for_each(|recorded| self.announce(recorded));
        done
    }

    /// A direct node's agent is there: its own connection has registered.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn agents_online(&self, scope: WorkspaceScope, agents: &[AgentId]) -> EngineResult<()> {
        self.announce(self.store().agents_online(scope, agents, self.now()).await?);
        Ok(())
    }

    /// A provider's complete live set of agents.
    ///
    /// Entries in conflict are left alone and the others taken over; it is an error only when nothing in
    /// it can be accepted, because brokers drop their socket on an error (ADR 0002).
    ///
    /// # Errors
    /// The conflict of the first entry, when there are entries and none is acceptable; superseded; or
    /// storage that is away.
    pub async fn sync_inventory(&self, fence: &Fence, mut listed: Vec<Listed>) -> EngineResult<Synced> {
        let asked = listed.len();
        let mut first_conflict = None;
        // Others may take agents between two rounds, but each round leaves at least one entry out.
        loop {
            let conflicts = match self.store().sync_inventory(fence, &listed, self.now()).await? {
                Inventory::Synced { rebound, left, recorded, reconciled, .. } => {
                    self.announce(recorded);
                    if let (Some(conflict), true) = (first_conflict.take(), asked > 0 && listed.is_empty()) {
                        return Err(conflict);
                    }
                    if !left.is_empty() {
                        self.hints().agents_moved(fence.scope, left);
                    }
                    let agents = listed.into_iter().map(|entry| entry.agent_id).collect();
                    return Ok(Synced { rebound, agents, reconciled });
                }
                Inventory::Superseded => return Err(EngineError::Superseded),
                Inventory::Conflicts(conflicts) => conflicts.into_iter().collect::<HashMap<_, _>>(),
            };
            listed.retain(|entry| {
                let Some(conflict) = conflicts.get(&entry.agent_id) else { return true };
                tracing::info!(agent.name = %entry.name, reason = ?conflict, "an inventory entry was left alone");
                let name = entry.name.clone();
                first_conflict.get_or_insert_with(|| match conflict {
                    Conflict::Identity => EngineError::AgentIdentityMismatch(name),
                    Conflict::Location => EngineError::AgentLocationConflict(name),
                    Conflict::Provider => EngineError::AgentProviderConflict(name),
                });
                false
            });
        }
    }

    /// `agent.register`: creates the agent on this node, or binds an existing one that is offline or
    /// already here, with a fresh token.
    ///
    /// # Errors
    /// [`EngineError::AgentAlreadyExists`] when the name is in use elsewhere; superseded; an invalid
    /// name; or storage that is away.
    pub async fn register_on_node(
        &self,
        fence: &Fence,
        name: &str,
        session_ref: Option<&str>,
        resumable: Option<bool>,
        joins_general: bool,
    ) -> EngineResult<Hosted> {
        relay_domain::names::check_agent_name(name)?;
        for _ in 0..RACES {
            let Some(taken) = self.store().agent_taken(fence.scope, name).await? else {
                let request = RegisterAgent {
                    name: name.to_owned(),
                    kind: AgentKind::Agent,
                    persona: None,
                    metadata: None,
                    capabilities: None,
                    skills: None,
                    joins_general,
                };
                match self.register_agent(fence.scope, &request).await {
                    Ok(registered) => {
                        let token = registered.token;
                        let agent_id = registered.agent_id;
                        return self.host(fence, agent_id, name, token, session_ref, resumable).await;
                    }
                    Err(EngineError::AgentAlreadyExists(_)) => continue,
                    Err(other) => return Err(other),
                }
            };
            let here = taken.node_id == fence.node_id
                && taken.provider.as_ref().is_none_or(|provider| *provider == fence.provider);
            if !taken.offline && !here {
                return Err(EngineError::AgentAlreadyExists(name.to_owned()));
            }
            let token = self.rotate_agent_token(&Credential::Workspace { scope: fence.scope }, name).await?;
            return self.host(fence, taken.agent_id, name, token, session_ref, resumable).await;
        }
        Err(EngineError::Overloaded)
    }

    /// `agent.recover`: rebinds an existing identity whose last place is this node, or that is offline.
    ///
    /// # Errors
    /// [`EngineError::AgentNotFound`], [`EngineError::AgentIdentityConflict`],
    /// [`EngineError::AgentRecoveryNotAuthorized`]; superseded; or storage that is away.
    pub async fn recover_on_node(
        &self,
        fence: &Fence,
        name: &str,
        expected: AgentId,
        session_ref: Option<&str>,
        resumable: Option<bool>,
    ) -> EngineResult<Hosted> {
        let taken = self
            .store()
            .agent_taken(fence.scope, name)
            .await?
            .ok_or_else(|| EngineError::AgentNotFound(name.to_owned()))?;
        if taken.agent_id != expected {
            return Err(EngineError::AgentIdentityConflict);
        }
        if !taken.offline && taken.node_id != fence.node_id {
            return Err(EngineError::AgentRecoveryNotAuthorized);
        }
        let token = self.rotate_agent_token(&Credential::Workspace { scope: fence.scope }, name).await?;
        self.host(fence, taken.agent_id, name, token, session_ref, resumable).await
    }

    async fn host(
        &self,
        fence: &Fence,
        agent_id: AgentId,
        name: &str,
        token: String,
        session_ref: Option<&str>,
        resumable: Option<bool>,
    ) -> EngineResult<Hosted> {
        let binding = format!("anb_{}", self.next_id());
        let (left, recorded) = self
            .store()
            .host_agent(fence, agent_id, &binding, session_ref, resumable, self.now())
            .await?
            .ok_or(EngineError::Superseded)?;
        self.announce(recorded);
        if left != fence.node_id {
            self.hints().agents_moved(fence.scope, vec![left]);
        }
        let position = self
            .store()
            .positions(&[(fence.scope, agent_id)])
            .await?
            .pop()
            .ok_or_else(|| EngineError::AgentNotFound(name.to_owned()))?;
        Ok(Hosted { agent_id, name: name.to_owned(), token, position })
    }

    /// `agent.deregister`: the agent leaves this provider.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn leave_node(&self, fence: &Fence, agent: AgentId) -> EngineResult<bool> {
        let Some(recorded) = self.store().unhost_agent(fence, agent, self.now()).await? else { return Ok(false) };
        self.announce(recorded);
        // Its mail goes on over its own node's connection, if it has one.
        self.hints().agents_moved(fence.scope, vec![fence.node_id.clone(), NodeId::direct(agent)]);
        Ok(true)
    }
}

/// An inventory that was taken over.
#[derive(Debug)]
pub struct Synced {
    /// How many agents were bound or brought online by it.
    pub rebound: usize,
    /// The agents that it lists, without those in conflict.
    pub agents: Vec<AgentId>,
    /// What it means for what the provider was told to do.
    pub reconciled: Reconciled,
}

/// An agent that a provider now hosts.
#[derive(Debug, Clone)]
pub struct Hosted {
    /// Its id.
    pub agent_id: AgentId,
    /// Its name.
    pub name: String,
    /// Its fresh token.
    pub token: String,
    /// Where its mailbox stands.
    pub position: relay_store::cursors::Position,
}
