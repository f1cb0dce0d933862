//! Frames that need the engine: registration, hosting, inventories. One at a time per connection, in
//! arrival order; the connection goes on delivering meanwhile.

use std::time::Duration;

use relay_domain::{AgentId, GatewayId, NodeId, ProviderName, WorkspaceScope};
use relay_engine::{
    Engine, EngineError,
    actions::Completed,
    mailbox::{Fence, Listed, Position, Registration},
    serve::Registrant,
};
use relay_wire::frame::{ActionResult, AgentRecover, AgentRegister, Capability, Inbound, Inventory, Register, Spawn};
use serde_json::{Value, json};

use super::{held::LOOKS_UP_VERSION, pacing::BROKER_VERSION};
use crate::{
    error::ApiError,
    routes::{actions, nodes},
};

/// Capability by which a broker asks for its agents' cursors.
pub(super) const CURSOR: &str = "relay:delivery-cursor-v1";
/// Capability with which brokers list their live agents: information, not an ability.
const LIVE_AGENTS: &str = "relay:live-agents:v1";

/// What the connection has become by registering.
#[derive(Debug, Clone)]
pub(super) struct Bound {
    pub(super) fence: Fence,
    /// Agents flow only once a reply or an inventory of this connection has named them.
    pub(super) cursor_granted: bool,
    /// One of the published brokers: paced, and asked for positions.
    pub(super) is_broker: bool,
    /// A client whose acks are stored a little later.
    pub(super) looks_up: bool,
    pub(super) capabilities: usize,
}

/// A frame for the engine, with the connection as it stands.
pub(super) struct Request {
    pub(super) id: Option<String>,
    pub(super) frame: Inbound,
}

/// What a frame led to. The reply, if any, is written before the effect is applied.
pub(super) struct Outcome {
    pub(super) reply: Option<String>,
    pub(super) effect: Effect,
}

/// What the connection does next.
pub(super) enum Effect {
    None,
    /// The provider is this connection's; its agents are to be served.
    Registered(Bound),
    /// An agent is hosted here, its floor told in the reply or not.
    Hosted {
        position: Box<Position>,
        told: bool,
    },
    /// The inventory names these agents as running, and no others.
    Listed(Vec<AgentId>),
    /// The agent is no longer hosted here.
    Left(AgentId),
    /// The provider has left: close.
    Gone,
}

/// What a request needs to know of its connection.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) engine: Engine,
    pub(super) scope: WorkspaceScope,
    pub(super) node_id: NodeId,
    pub(super) direct: bool,
    pub(super) gateway_id: GatewayId,
    /// Names the connection: the instance of a provider that names none.
    pub(super) connection: String,
    pub(super) bound: Option<Bound>,
}

impl Connection {
    /// Handles one frame.
    pub(super) async fn handle(self, request: Request) -> Outcome {
        let Request { id, frame } = request;
        let done = match frame {
            Inbound::Register(register) => self.register(*register).await,
            Inbound::AgentRegister(register) => self.agent_register(register).await,
            Inbound::AgentRecover(recover) => self.agent_recover(recover).await,
            Inbound::AgentDeregister(frame) => self.agent_deregister(&frame.agent_id).await,
            Inbound::Inventory(inventory) => self.inventory(inventory).await,
            Inbound::Deregister => self.deregister().await,
            // What comes of a result is told only where it has an id to be told by.
            Inbound::ActionResult(result) if id.is_none() => {
                self.untold_result(result).await;
                return Outcome { reply: None, effect: Effect::None };
            }
            Inbound::ActionResult(result) => self.action_result(result).await,
            Inbound::ActionAccept(accept) => self.action_accept(&accept.invocation_id).await,
            Inbound::Spawn(spawn) => self.spawn(spawn).await,
            Inbound::Heartbeat(_) | Inbound::Ack(_) | Inbound::Ignored => Ok((None, Effect::None)),
        };
        match done {
            Ok((data, effect)) => {
                let reply = data.map(|data| relay_wire::frame::reply(id.as_deref(), &data));
                Outcome { reply, effect }
            }
            Err(error) => {
                let error = ApiError::from(error);
                let (code, message) = error.on_socket();
                let reply = Some(relay_wire::frame::error(id.as_deref(), code, message));
                Outcome { reply, effect: Effect::None }
            }
        }
    }

    async fn register(self, frame: Register) -> Result<(Option<Value>, Effect), EngineError> {
        if frame.node_id != self.node_id.as_str() {
            return Err(EngineError::NodeIdMismatch);
        }
        let (provider, instance_id) = match frame.provider {
            Some(provider) => (ProviderName::new(provider.name), provider.instance_id),
            None => (ProviderName::default_provider(), self.connection.clone()),
        };
        relay_domain::names::check_name("provider.name", provider.as_str(), 128)?;
        relay_domain::names::check_name("provider.instance_id", &instance_id, 256)?;
        let cursor_granted = !self.direct && frame.capabilities.iter().any(|c| c.name == CURSOR);
        let stored = stored_capabilities(&frame.capabilities);
        let mut tags = frame.tags;
        if let Some(keys) = frame.repo_keys {
            tags.retain(|tag| !tag.starts_with("repo:"));
            tags.extend(keys.into_iter().map(|key| format!("repo:{key}")));
        }
        check_capabilities(&frame.capabilities)?;
        relay_domain::names::check_length("version", &frame.version, relay_domain::names::MAX_NOTE_BYTES)?;
        if tags.len() > relay_domain::names::MAX_TAGS {
            return Err(EngineError::InvalidRequest(format!("at most {} tags", relay_domain::names::MAX_TAGS)));
        }
        for tag in &tags {
            relay_domain::names::check_length("tag", tag, MAX_WORD_BYTES)?;
        }
        let is_broker = !self.direct && frame.version.starts_with(BROKER_VERSION);
        let looks_up = self.direct && frame.version.starts_with(LOOKS_UP_VERSION);
        let registrant = Registrant {
            scope: self.scope,
            node_id: self.node_id.clone(),
            gateway_id: self.gateway_id,
            registration: Registration {
                node_name: frame.name.trim_start_matches('#').to_owned(),
                provider: provider.clone(),
                instance_id: instance_id.clone(),
                capabilities: stored,
                cursor_granted,
                tags,
                version: frame.version,
                max_agents: i32::try_from(frame.max_agents).unwrap_or(i32::MAX),
            },
        };
        let epoch = self.engine.register_provider(&registrant).await?;
        let descriptor = nodes::descriptor(self.engine.node(self.scope, self.node_id.as_str()).await?);
        let mut data = serde_json::to_value(descriptor).unwrap_or_default();
        if let Some(data) = data.as_object_mut() {
            // What only the roster shows: the reply is what published clients know.
            data.remove("providers");
            data.remove("reserved_agents");
            data.insert("provider".to_owned(), json!({ "name": provider, "instance_id": instance_id }));
            let accepted = frame
                .capabilities
                .iter()
                .map(|c| json!({ "name": c.name, "kind": c.canonical_kind(), "accepted": true }));
            data.insert("accepted_capabilities".to_owned(), accepted.collect());
        }
        let fence = Fence { scope: self.scope, node_id: self.node_id, provider, epoch };
        let bound = Bound { fence, cursor_granted, is_broker, looks_up, capabilities: frame.capabilities.len() };
        Ok((Some(data), Effect::Registered(bound)))
    }

    fn bound(&self) -> Result<&Bound, EngineError> {
        self.bound.as_ref().ok_or_else(|| EngineError::InvalidRequest("node.register comes first".to_owned()))
    }

    async fn agent_register(self, frame: AgentRegister) -> Result<(Option<Value>, Effect), EngineError> {
        let bound = self.broker_bound()?;
        check_session_ref(frame.session_ref.as_deref())?;
        let hosted = self
            .engine
            .register_on_node(
                &bound.fence,
                &frame.name,
                frame.session_ref.as_deref(),
                frame.resumable,
                frame.auto_join_general.unwrap_or(true),
            )
            .await?;
        if let Some(invocation) = frame.invocation_id.as_deref().and_then(|id| id.parse().ok()) {
            self.engine.born(&bound.fence, invocation, hosted.agent_id, &hosted.name).await?;
        }
        Ok(hosted_reply(hosted, bound.cursor_granted))
    }

    async fn agent_recover(self, frame: AgentRecover) -> Result<(Option<Value>, Effect), EngineError> {
        let bound = self.broker_bound()?;
        check_session_ref(frame.session_ref.as_deref())?;
        let expected: AgentId = frame.expected_agent_id.parse().map_err(|_| EngineError::AgentIdentityConflict)?;
        let hosted = self
            .engine
            .recover_on_node(&bound.fence, &frame.name, expected, frame.session_ref.as_deref(), frame.resumable)
            .await?;
        Ok(hosted_reply(hosted, bound.cursor_granted))
    }

    /// Agents are hosted by brokers; a direct node has its own agent and no other.
    fn broker_bound(&self) -> Result<&Bound, EngineError> {
        if self.direct { Err(EngineError::DirectNodeCapacity) } else { self.bound() }
    }

    async fn agent_deregister(self, agent: &str) -> Result<(Option<Value>, Effect), EngineError> {
        let bound = self.bound()?;
        // An agent that is not here has nothing to leave: the answer is the same.
        let Ok(agent) = agent.parse::<AgentId>() else { return Ok((Some(Value::Null), Effect::None)) };
        let left = self.engine.leave_node(&bound.fence, agent).await?;
        Ok((Some(Value::Null), if left { Effect::Left(agent) } else { Effect::None }))
    }

    async fn inventory(self, frame: Inventory) -> Result<(Option<Value>, Effect), EngineError> {
        let bound = self.broker_bound()?;
        if frame.agents.len() > MAX_INVENTORY {
            return Err(EngineError::InvalidRequest(format!("at most {MAX_INVENTORY} agents")));
        }
        let mut listed = Vec::with_capacity(frame.agents.len());
        for entry in frame.agents {
            let agent_id =
                entry.agent_id.parse().map_err(|_| EngineError::AgentIdentityMismatch(entry.name.clone()))?;
            check_session_ref(entry.session_ref.as_deref())?;
            // An id that is none of ours says nothing.
            let invocation = entry.invocation_id.as_deref().and_then(|id| id.parse().ok());
            listed.push(Listed { agent_id, name: entry.name, session_ref: entry.session_ref, invocation });
        }
        let synced = self.engine.sync_inventory(&bound.fence, listed).await?;
        let invocations = synced.reconciled;
        let data = json!({
            "rebound_agents": synced.rebound, "open_invocations": invocations.open,
            "completed_invocations": invocations.completed, "rescheduled_invocations": invocations.rescheduled,
        });
        Ok((Some(data), Effect::Listed(synced.agents)))
    }

    async fn action_accept(self, invocation: &str) -> Result<(Option<Value>, Effect), EngineError> {
        let id = invocation.parse().map_err(|_| EngineError::InvocationNotFound)?;
        self.engine.provider_accepts(&self.bound()?.fence, id).await?;
        Ok((Some(Value::Null), Effect::None))
    }

    /// Nobody is told what became of this result, and nobody sends it again: it is tried until storage has taken it. The
    /// job ends with its connection, so it needs no other bound; whoever comes back is sent the invocation again.
    async fn untold_result(self, frame: ActionResult) {
        while let Err(error) = self.clone().action_result(frame.clone()).await {
            if !error.is_passing() {
                return;
            }
            tracing::debug!(error = &error as &dyn std::error::Error, "a result waits for storage");
            tokio::time::sleep(RESULT_RETRY).await;
        }
    }

    async fn action_result(self, frame: ActionResult) -> Result<(Option<Value>, Effect), EngineError> {
        // Only results of long tasks say whether they are final, and are answered.
        let answer = frame.is_final.map(|_| Value::Null);
        if frame.is_final == Some(false) {
            return self.action_accept(&frame.invocation_id).await;
        }
        let bound = self.bound()?;
        let result = match (frame.output, frame.error) {
            (Some(output), None) => Ok(output.unwrap_or_default()),
            (None, Some(error)) => Err(error),
            _ => return Err(EngineError::InvalidRequest("one of output and error".to_owned())),
        };
        let id = frame.invocation_id.parse().map_err(|_| EngineError::InvocationNotFound)?;
        let done = self.engine.provider_result(&bound.fence, id, result).await?;
        if done == Completed::Refused {
            tracing::debug!(node.id = %bound.fence.node_id, invocation.id = %id, "a late or foreign result was refused");
        }
        Ok((answer, Effect::None))
    }

    async fn spawn(self, frame: Spawn) -> Result<(Option<Value>, Effect), EngineError> {
        self.broker_bound()?;
        let made = self.engine.spawn_on_node(&self.bound()?.fence, frame.input).await?;
        let ack = actions::acknowledgement(made);
        Ok((Some(serde_json::to_value(ack).unwrap_or_default()), Effect::None))
    }

    async fn deregister(self) -> Result<(Option<Value>, Effect), EngineError> {
        self.engine.deregister_provider(&self.bound()?.fence).await?;
        Ok((None, Effect::Gone))
    }
}

/// Pause before a result is recorded again that storage was not there for.
const RESULT_RETRY: Duration = Duration::from_millis(500);
/// Agents in one inventory.
const MAX_INVENTORY: usize = 20_000;
/// Bytes of a capability's name, its kind or a tag.
const MAX_WORD_BYTES: usize = 256;
/// Bytes of the handle for resuming a session.
const MAX_SESSION_REF_BYTES: usize = 1024;

/// What a node advertises is stored: so many, so long, and no more.
pub(super) fn check_capabilities(capabilities: &[Capability]) -> Result<(), EngineError> {
    use relay_domain::names::{MAX_CAPABILITIES, check_json_length, check_length};
    if capabilities.len() > MAX_CAPABILITIES {
        return Err(EngineError::InvalidRequest(format!("at most {MAX_CAPABILITIES} capabilities")));
    }
    for capability in capabilities {
        check_length("capability", &capability.name, MAX_WORD_BYTES)?;
        check_length("kind", capability.kind.as_deref().unwrap_or_default(), MAX_WORD_BYTES)?;
        check_json_length("metadata", capability.metadata.as_ref().map_or(0, |m| m.to_string().len()))?;
    }
    Ok(())
}

fn check_session_ref(session_ref: Option<&str>) -> Result<(), EngineError> {
    let text = session_ref.unwrap_or_default();
    Ok(relay_domain::names::check_length("session_ref", text, MAX_SESSION_REF_BYTES)?)
}

/// Capabilities as the roster keeps them.
pub(super) fn stored_capabilities(capabilities: &[Capability]) -> Value {
    let kept = capabilities.iter().filter(|c| c.name != LIVE_AGENTS).map(|c| {
        let kind = Some(c.canonical_kind().to_owned());
        serde_json::to_value(Capability { kind, ..c.clone() }).unwrap_or_default()
    });
    kept.collect()
}

/// Exactly the keys that brokers take; the cursor only where it was negotiated.
fn hosted_reply(hosted: relay_engine::serve::Hosted, cursor: bool) -> (Option<Value>, Effect) {
    let mut data = json!({ "agent_id": hosted.agent_id, "token": hosted.token, "name": hosted.name });
    if let (true, Some(data)) = (cursor, data.as_object_mut()) {
        data.insert("delivery_ack_seq".to_owned(), json!(hosted.position.settled_floor));
    }
    (Some(data), Effect::Hosted { position: Box::new(hosted.position), told: cursor })
}
