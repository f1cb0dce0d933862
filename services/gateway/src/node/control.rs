//! Frames that need the engine: registration, hosting, inventories. One at a time per connection, in
//! arrival order; the connection goes on delivering meanwhile.

use std::time::Duration;

use relay_domain::{AgentId, GatewayId, NodeId, WorkspaceScope};
use relay_engine::{
    Engine, EngineError,
    actions::Completed,
    mailbox::{Fence, Listed, Position},
};
use relay_wire::frame::{
    ActionResult, AgentRecover, AgentRegister, Capability, Inbound, Inventory, InventoryEntry, Spawn,
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::registering::INTERNAL;
use crate::{error::ApiError, routes::actions};

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
    /// The connection could not register, which was not its peer's fault: close. What it holds all the same is given
    /// back.
    Unregistered {
        held: Option<Bound>,
        close: (u16, &'static str),
    },
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
    /// Cancelled when the connection ends.
    pub(super) gone: CancellationToken,
}

impl Connection {
    /// Handles one frame.
    pub(super) async fn handle(self, request: Request) -> Outcome {
        let Request { id, frame } = request;
        let registers = matches!(frame, Inbound::Register(_));
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
                if registers && error.is_fault() {
                    // An error frame is final for some clients, and others do not read it.
                    return Outcome { reply: None, effect: Effect::Unregistered { held: None, close: INTERNAL } };
                }
                let (code, message) = error.on_socket();
                let reply = Some(relay_wire::frame::error(id.as_deref(), code, message));
                Outcome { reply, effect: Effect::None }
            }
        }
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
        let mut refusal = None;
        for entry in frame.agents {
            match listed_entry(entry) {
                Ok(entry) => listed.push(entry),
                // Left alone: an error would cost the broker its socket, with all its agents.
                Err(error) => {
                    tracing::info!(error = &error as &dyn std::error::Error, "an inventory entry was left alone");
                    refusal.get_or_insert(error);
                }
            }
        }
        // Nothing that can be read is not an empty inventory: that would end all its agents.
        if let (Some(refusal), true) = (refusal, listed.is_empty()) {
            return Err(refusal);
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
pub(super) const MAX_WORD_BYTES: usize = 256;
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

/// An entry of an inventory, if it can be one of an agent of ours.
fn listed_entry(entry: InventoryEntry) -> Result<Listed, EngineError> {
    let Ok(agent_id) = entry.agent_id.parse() else { return Err(EngineError::AgentIdentityMismatch(entry.name)) };
    // The agent runs, whatever its session is called.
    let session_ref = entry.session_ref.filter(|session_ref| check_session_ref(Some(session_ref)).is_ok());
    // An id that is none of ours says nothing.
    let invocation = entry.invocation_id.as_deref().and_then(|id| id.parse().ok());
    Ok(Listed { agent_id, name: entry.name, session_ref, invocation })
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
