//! Requests that need the engine: registration, hosting, inventories, action results.
//!
//! Requests run one at a time in arrival order, results of invocations concurrently; deliveries continue meanwhile.
//! [`ControlContext`] holds what a request may read of its connection; a [`RequestEffect`] says what the connection
//! does afterwards.

use std::time::Duration;

use axum::extract::ws::Utf8Bytes;
use relay_domain::{AgentId, GatewayId, access::token::TokenHash, names};
use relay_engine::{
    Engine, EngineError,
    access::callers::NodeCaller,
    actions::ProviderResultOutcome,
    error::{Conflict, Denial, InvalidInput, Missing},
    mailboxes::serving::{Fence, ListedAgent, MailboxPosition, SessionHandle},
    messages::posting::batch::BatchCaller,
    nodes::{FairPermit, providers::RejectedEntry},
};
use relay_wire::{
    field::ToValue as _,
    messages::batch::BatchBody,
    nodes::{
        frame::{
            ActionResult, AgentRecover, AgentRegister, Capability, Heartbeat, InboundFrame, Inventory, InventoryEntry,
            Spawn,
        },
        replies::{InventorySynced, RegisteredAgent, RejectedAgent},
    },
};
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    effects::Close,
    registration::{INTERNAL, REGISTRATION_TIMEOUT},
};
use crate::{
    connections::FrameMemory,
    error::ApiError,
    routes::{
        actions,
        messages::batch::{PostRules, post_all},
    },
};

/// Capability by which brokers announce that they list live agents. It is not an ability that can be invoked, so it is
/// not stored.
const LIVE_AGENTS: &str = "relay:live-agents:v1";

/// Capability by which a connection requests that it may post with `message.send`.
pub(super) const MESSAGE_SEND: &str = "relay:message-send-v1";

/// Provider that the connection registered as.
#[derive(Debug, Clone)]
pub(super) struct ProviderBinding {
    pub(super) fence: Fence,
    /// Deliveries to an agent start only after a reply or an inventory of this connection has named it.
    pub(super) cursor_granted: bool,
    /// The connection may send `message.send`.
    pub(super) posts_granted: bool,
    /// True if the peer is a published broker, which is paced and asked for positions.
    pub(super) is_broker: bool,
    /// True if the client lists a delivery after acking it, so that its acks are stored with a delay.
    pub(super) rereads_after_ack: bool,
    pub(super) capabilities: usize,
    /// Name of the node in the newest frame that contained one.
    pub(super) declared_name: String,
}

/// Request frame with its correlation id.
pub(super) struct Request {
    pub(super) id: Option<String>,
    pub(super) frame: InboundFrame,
    /// Held until the reply.
    pub(super) memory: Option<FrameMemory>,
}

/// Outcome of a request. The reply, if any, is written before the effect is applied.
pub(super) struct Outcome {
    /// May hold the memory of its contents.
    pub(super) reply: Option<Utf8Bytes>,
    pub(super) effect: RequestEffect,
}

/// Change to the connection after a request.
pub(super) enum RequestEffect {
    None,
    /// The connection holds the provider; its agents are to be served.
    Registered(ProviderBinding),
    /// An agent is hosted here; the reply contained its cursor or not.
    Hosted {
        position: Box<MailboxPosition>,
        cursor_in_reply: bool,
    },
    /// The inventory lists exactly these agents as running.
    Listed(Vec<AgentId>),
    /// The agent is no longer hosted here.
    AgentLeft(AgentId),
    /// The heartbeat declares a change, and the token is valid.
    ChangeChecked(Box<Heartbeat>),
    /// The heartbeat declares a change, and the token could not be checked.
    ChangeUnchecked(Box<Heartbeat>),
    /// The provider deregistered: close.
    Deregistered,
    /// The token of the connection is not accepted any more: close.
    Refused {
        close: Close,
    },
    /// Registration failed without a fault of the peer: close, and release the provider if it was already taken.
    RegistrationFailed {
        held: Option<ProviderBinding>,
        close: Close,
    },
}

/// Part of the connection state that a request may read.
#[derive(Clone)]
pub(super) struct ControlContext {
    pub(super) engine: Engine,
    pub(super) node: NodeCaller,
    /// Token that opened the socket.
    pub(super) token: TokenHash,
    pub(super) gateway_id: GatewayId,
    /// Id of the connection, used as the instance id of a provider that sends none.
    pub(super) connection: String,
    pub(super) binding: Option<ProviderBinding>,
    /// Cancelled when the connection ends.
    pub(super) closed: CancellationToken,
}

pub(super) fn error_reply(id: Option<&str>, error: &ApiError) -> Utf8Bytes {
    let (code, message) = error.code_and_message();
    relay_wire::nodes::frame::encode_error(id, code, message).into()
}

impl ControlContext {
    /// Handles one request.
    pub(super) async fn handle(self, request: Request) -> Outcome {
        // Held until the reply is made.
        let _permit = self.acquire_permit(&request.frame).await;
        let until = Instant::now() + REGISTRATION_TIMEOUT;
        if let Some(refused) = self.check_token(&request, until).await {
            return refused;
        }
        let Request { id, frame, memory: _memory } = request;
        let registers = matches!(frame, InboundFrame::Register(_));
        let done = match frame {
            InboundFrame::Register(register) => match self.register(id.as_deref(), *register, until).await {
                Ok(outcome) => return outcome,
                Err(error) => Err(error),
            },
            InboundFrame::AgentRegister(register) => self.register_agent(register).await,
            InboundFrame::AgentRecover(recover) => self.recover_agent(recover).await,
            InboundFrame::AgentDeregister(frame) => self.deregister_agent(&frame.agent_id).await,
            InboundFrame::Inventory(inventory) => self.sync_inventory(inventory).await,
            InboundFrame::Deregister => self.deregister_provider().await,
            // A result without an id cannot be answered.
            InboundFrame::ActionResult(result) if id.is_none() => {
                self.record_result_without_reply(result).await;
                return Outcome { reply: None, effect: RequestEffect::None };
            }
            InboundFrame::ActionResult(result) => self.record_action_result(result).await,
            InboundFrame::ActionAccept(accept) => self.accept_action(&accept.invocation_id).await,
            InboundFrame::Spawn(spawn) => self.spawn_agent(spawn).await,
            InboundFrame::MessageSend(batch) => match self.send_messages(batch).await {
                Ok(data) => Ok((Some(data), RequestEffect::None)),
                Err(error) => {
                    return Outcome { reply: Some(error_reply(id.as_deref(), &error)), effect: RequestEffect::None };
                }
            },
            // Queued only for its turn and the check of the token above; the connection records it.
            InboundFrame::Heartbeat(beat) => Ok((None, RequestEffect::ChangeChecked(beat))),
            InboundFrame::Ack(_) | InboundFrame::Ignored => Ok((None, RequestEffect::None)),
        };
        match done {
            Ok((data, effect)) => {
                let reply = data.map(|data| relay_wire::nodes::frame::encode_reply(id.as_deref(), &data).into());
                Outcome { reply, effect }
            }
            Err(error) => {
                let error = ApiError::from(error);
                if registers && error.is_fault() {
                    // Some clients treat an error frame as final, others ignore it. Closing makes all of them
                    // reconnect.
                    return Outcome {
                        reply: None,
                        effect: RequestEffect::RegistrationFailed { held: None, close: INTERNAL },
                    };
                }
                Outcome { reply: Some(error_reply(id.as_deref(), &error)), effect: RequestEffect::None }
            }
        }
    }

    /// Waits until the tenant has a permit for a request. Registrations are bounded by the connections, and batches
    /// gather results, messages and spawns. Nothing is refused: published brokers close the socket when an inventory
    /// is.
    async fn acquire_permit(&self, frame: &InboundFrame) -> Option<FairPermit> {
        match frame {
            InboundFrame::Register(_)
            | InboundFrame::ActionResult(_)
            | InboundFrame::MessageSend(_)
            | InboundFrame::Spawn(_)
            | InboundFrame::Ack(_)
            | InboundFrame::Ignored => None,
            InboundFrame::AgentRegister(_)
            | InboundFrame::AgentRecover(_)
            | InboundFrame::AgentDeregister(_)
            | InboundFrame::Inventory(_)
            | InboundFrame::Deregister
            | InboundFrame::ActionAccept(_)
            | InboundFrame::Heartbeat(_) => self.engine.nodes().acquire_frame_permit(self.node.scope).await,
        }
    }

    fn binding(&self) -> Result<&ProviderBinding, EngineError> {
        self.binding.as_ref().ok_or_else(|| EngineError::invalid_request("node.register comes first"))
    }

    async fn register_agent(self, frame: AgentRegister) -> Result<(Option<Value>, RequestEffect), EngineError> {
        let binding = self.broker_binding()?;
        check_session_ref(frame.session_ref.as_deref())?;
        let hosted = self
            .engine
            .nodes()
            .register_agent(
                &binding.fence,
                &frame.name,
                SessionHandle { session_ref: frame.session_ref.as_deref(), resumable: frame.resumable },
                frame.auto_join_general.unwrap_or(true),
            )
            .await?;
        // After the agent is hosted: the invocation is linked to it. A malformed id links none, and the agent runs all
        // the same.
        if let Some(invocation) = frame.invocation_id.as_deref().and_then(|id| id.parse().ok()) {
            self.engine.actions().finish_spawn(&binding.fence, invocation, hosted.agent_id, &hosted.name).await?;
        }
        Ok(hosted_reply(hosted, binding.cursor_granted))
    }

    async fn recover_agent(self, frame: AgentRecover) -> Result<(Option<Value>, RequestEffect), EngineError> {
        let binding = self.broker_binding()?;
        check_session_ref(frame.session_ref.as_deref())?;
        // A malformed id gets the refusal of a wrong one.
        let expected: AgentId =
            frame.expected_agent_id.parse().map_err(|_| EngineError::Forbidden(Denial::AgentRecovery))?;
        let session = SessionHandle { session_ref: frame.session_ref.as_deref(), resumable: frame.resumable };
        let hosted = self.engine.nodes().recover_agent(&binding.fence, &frame.name, expected, session).await?;
        Ok(hosted_reply(hosted, binding.cursor_granted))
    }

    /// Returns the binding of a broker. A direct node serves its own agent only.
    fn broker_binding(&self) -> Result<&ProviderBinding, EngineError> {
        if self.node.is_direct() { Err(EngineError::Invalid(InvalidInput::DirectNodeCapacity)) } else { self.binding() }
    }

    async fn deregister_agent(self, agent: &str) -> Result<(Option<Value>, RequestEffect), EngineError> {
        let binding = self.binding()?;
        // An unknown id gets the same answer as an agent that is not hosted here.
        let Ok(agent) = agent.parse::<AgentId>() else { return Ok((Some(Value::Null), RequestEffect::None)) };
        self.write_acks().await;
        let left = self.engine.nodes().deregister_agent(&binding.fence, agent).await?;
        Ok((Some(Value::Null), if left { RequestEffect::AgentLeft(agent) } else { RequestEffect::None }))
    }

    /// Writes acks that wait, before agents leave the node: an ack counts only while its agent is located there.
    async fn write_acks(&self) {
        if let Err(error) = self.engine.mailboxes().flush_cursors().await {
            let error = &error as &dyn std::error::Error;
            tracing::debug!(error, "acks not written before a deregistration, their messages may come again");
        }
    }

    async fn sync_inventory(self, frame: Inventory) -> Result<(Option<Value>, RequestEffect), EngineError> {
        let binding = self.broker_binding()?;
        if frame.agents.len() > MAX_INVENTORY {
            return Err(EngineError::invalid_request(format!("at most {MAX_INVENTORY} agents")));
        }
        let mut listed = Vec::with_capacity(frame.agents.len());
        let mut refusal = None;
        for entry in frame.agents {
            match parse_inventory_entry(entry) {
                Ok(entry) => listed.push(entry),
                // Skipped: an error would make the broker drop its socket with all its agents.
                Err(error) => {
                    tracing::info!(error = &error as &dyn std::error::Error, "inventory entry skipped");
                    refusal.get_or_insert(error);
                }
            }
        }
        // An inventory without any readable entry is refused: treating it as empty would end all agents of the broker.
        if let (Some(refusal), true) = (refusal, listed.is_empty()) {
            return Err(refusal);
        }
        let synced = self.engine.nodes().sync_inventory(&binding.fence, listed).await?;
        let invocations = synced.reconciled;
        let data = InventorySynced {
            rebound_agents: synced.rebound,
            rejected_agents: synced.rejected.len(),
            rejected: synced.rejected.into_iter().take(MAX_SHOWN_REJECTIONS).map(to_rejected_agent).collect(),
            open_invocations: invocations.open,
            completed_invocations: invocations.completed,
            rescheduled_invocations: invocations.rescheduled,
        };
        Ok((Some(data.to_value()), RequestEffect::Listed(synced.agents)))
    }

    async fn accept_action(self, invocation: &str) -> Result<(Option<Value>, RequestEffect), EngineError> {
        let id = invocation.parse().map_err(|_| EngineError::NotFound(Missing::Invocation))?;
        self.engine.actions().accept(&self.binding()?.fence, id).await?;
        Ok((Some(Value::Null), RequestEffect::None))
    }

    /// Records a result that gets no reply, and retries until storage accepts it. The client does not repeat it. The
    /// job ends with its connection, which bounds the retries; after a reconnect the invocation is sent again.
    async fn record_result_without_reply(self, frame: ActionResult) {
        while let Err(error) = self.clone().record_action_result(frame.clone()).await {
            if !error.is_transient() {
                // A permanent refusal: without a reply the node cannot learn of it.
                return;
            }
            tracing::debug!(error = &error as &dyn std::error::Error, "result not recorded, retrying");
            tokio::time::sleep(RESULT_RETRY).await;
        }
    }

    async fn record_action_result(self, frame: ActionResult) -> Result<(Option<Value>, RequestEffect), EngineError> {
        // Only results of long tasks carry `final`, and only they are answered.
        let answer = frame.is_final.map(|_| Value::Null);
        if frame.is_final == Some(false) {
            return self.accept_action(&frame.invocation_id).await;
        }
        let binding = self.binding()?;
        let result = match (frame.output, frame.error) {
            // `null` is an output, an absent field is none.
            (Some(output), None) => Ok(output.unwrap_or_default()),
            (None, Some(error)) => Err(error),
            _ => return Err(EngineError::invalid_request("one of output and error")),
        };
        let id = frame.invocation_id.parse().map_err(|_| EngineError::NotFound(Missing::Invocation))?;
        let done = self.engine.actions().record_provider_result(&binding.fence, id, result).await?;
        // No error for the node: the invocation has its outcome, or another node has it by now.
        if done == ProviderResultOutcome::Refused {
            tracing::debug!(node.id = %binding.fence.node_id, invocation.id = %id, "late or foreign action result refused");
        }
        Ok((answer, RequestEffect::None))
    }

    async fn spawn_agent(self, frame: Spawn) -> Result<(Option<Value>, RequestEffect), EngineError> {
        self.broker_binding()?;
        let made = self.engine.actions().spawn_on_node(&self.binding()?.fence, frame.input).await?;
        let ack = actions::to_invocation_ack(made);
        Ok((Some(ack.to_value()), RequestEffect::None))
    }

    /// Posts a batch for agents of the node.
    async fn send_messages(self, batch: BatchBody) -> Result<Value, ApiError> {
        if !self.binding()?.posts_granted {
            return Err(ApiError::invalid_request(format!("message.send needs the capability {MESSAGE_SEND}")));
        }
        // No HTTP answer reports the rate limit. The capability covers all kinds of messages, unlike the REST route of
        // nodes.
        let rules = PostRules { only_channels: false, extensions: None };
        let outcomes = post_all(&self.engine, BatchCaller::Node(&self.node), batch, rules).await?;
        Ok(outcomes.to_value())
    }

    async fn deregister_provider(self) -> Result<(Option<Value>, RequestEffect), EngineError> {
        let binding = self.binding()?;
        self.write_acks().await;
        self.engine.nodes().deregister_provider(&binding.fence).await?;
        Ok((None, RequestEffect::Deregistered))
    }
}

fn to_rejected_agent(entry: RejectedEntry) -> RejectedAgent {
    let error = ApiError::from(EngineError::Conflict(entry.conflict()));
    let code = error.code_and_message().0.to_owned();
    RejectedAgent { agent_id: entry.agent_id.to_string(), name: entry.name, code }
}

/// Skipped entries that a reply to an inventory shows.
const MAX_SHOWN_REJECTIONS: usize = 100;
/// Delay between attempts to record a result while storage is unavailable.
pub(super) const RESULT_RETRY: Duration = Duration::from_millis(500);
/// Agents in one inventory.
const MAX_INVENTORY: usize = 20_000;
/// Maximum bytes of a capability name, a capability kind or a tag.
pub(super) const MAX_WORD_BYTES: usize = 256;

/// Checks the bounds of advertised capabilities, which are stored.
pub(super) fn check_capabilities(capabilities: &[Capability]) -> Result<(), EngineError> {
    use relay_domain::{
        encoded_length,
        names::{MAX_CAPABILITIES, check_json_length, check_length},
    };
    if capabilities.len() > MAX_CAPABILITIES {
        return Err(EngineError::invalid_request(format!("at most {MAX_CAPABILITIES} capabilities")));
    }
    let mut bytes = 0;
    for capability in capabilities {
        let kind = capability.kind.as_deref().unwrap_or_default();
        check_length("capability", &capability.name, MAX_WORD_BYTES)?;
        check_length("kind", kind, MAX_WORD_BYTES)?;
        bytes += capability.name.len() + kind.len() + capability.metadata.as_ref().map_or(0, encoded_length);
    }
    // All together, as over REST.
    Ok(check_json_length("capabilities", bytes)?)
}

/// Converts an inventory entry. Refuses one whose agent id is malformed.
fn parse_inventory_entry(entry: InventoryEntry) -> Result<ListedAgent, EngineError> {
    let Ok(agent_id) = entry.agent_id.parse() else {
        return Err(EngineError::Conflict(Conflict::AgentIdentityMismatch(entry.name)));
    };
    // An invalid session handle does not change that the agent runs.
    let session_ref = entry.session_ref.filter(|session_ref| check_session_ref(Some(session_ref)).is_ok());
    // An id that does not parse is ignored.
    let invocation = entry.invocation_id.as_deref().and_then(|id| id.parse().ok());
    Ok(ListedAgent { agent_id, name: entry.name, session_ref, invocation })
}

fn check_session_ref(session_ref: Option<&str>) -> Result<(), EngineError> {
    let text = session_ref.unwrap_or_default();
    Ok(names::check_length("session_ref", text, names::MAX_SESSION_REF_BYTES)?)
}

/// Capabilities in the form that the roster stores.
pub(super) fn stored_capabilities(capabilities: &[Capability]) -> Vec<Capability> {
    let kept = capabilities.iter().filter(|c| c.name != LIVE_AGENTS);
    kept.map(|c| Capability { kind: Some(c.canonical_kind().to_owned()), ..c.clone() }).collect()
}

/// Builds the reply with exactly the keys that brokers accept; the cursor only if it was negotiated.
fn hosted_reply(hosted: relay_engine::nodes::providers::HostedAgent, cursor: bool) -> (Option<Value>, RequestEffect) {
    let data = RegisteredAgent {
        agent_id: hosted.agent_id.to_string(),
        token: hosted.token,
        name: hosted.name,
        delivery_ack_seq: cursor.then_some(hosted.position.settled_floor.unsigned_abs()),
    };
    (Some(data.to_value()), RequestEffect::Hosted { position: Box::new(hosted.position), cursor_in_reply: cursor })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Capability whose metadata take this many bytes as JSON.
    fn capability(name: usize, metadata_bytes: usize) -> Capability {
        let metadata = Value::String("x".repeat(metadata_bytes - 2));
        Capability { name: format!("c{name}"), kind: None, global: None, queue: None, metadata: Some(metadata) }
    }

    #[test]
    fn capabilities_have_a_bound_together() {
        let half = |nth| capability(nth, 32 * 1024 - 2);
        assert!(check_capabilities(&[half(1), half(2)]).is_ok());
        assert!(check_capabilities(&[half(1), half(2), capability(3, 3)]).is_err());
        assert!(check_capabilities(&[capability(1, 64 * 1024)]).is_err());
    }
}
