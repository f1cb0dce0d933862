//! `node.register`: a connection takes its provider.
//!
//! A refusal is an `error` frame, which providers treat as final and direct clients ignore. So a transient failure is
//! never reported as an error: it is retried while the peer waits, and a connection that still cannot register is
//! closed, after which every client reconnects.

use std::time::Duration;

use axum::extract::ws::Utf8Bytes;
use relay_domain::{JsonText, ProviderName, nodes::tags};
use relay_engine::{
    EngineError, EngineResult,
    error::{Denial, InvalidInput},
    mailboxes::serving::{Fence, ProviderRegistration},
    nodes::{
        providers::{RegisteredProvider, Registrant},
        roster::HeldNode,
    },
};
use relay_tasks::spawn_isolated;
use relay_wire::{
    field::ToValue as _,
    nodes::{
        deliver_frame::FRAME_LIMIT,
        frame::{Provider, Register, encode_reply},
        replies::{AcceptedCapability, NodeRegistered},
    },
};
use tokio::time::Instant;

use super::{
    control::{
        ControlContext, MAX_WORD_BYTES, MESSAGE_SEND, Outcome, ProviderBinding, RequestEffect, check_capabilities,
        stored_capabilities,
    },
    delayed_acks::REREADING_CLIENT_VERSION,
    effects::Close,
    pacing::BROKER_VERSION,
};
use crate::{list_reply::held_bytes, routes::nodes};

/// Capability by which a broker requests its agents' cursors.
const CURSOR: &str = "relay:delivery-cursor-v1";
/// Timeout of a registration. Brokers wait 10 s for the reply.
pub(super) const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(8);
/// Delay between attempts while storage is unavailable.
const RETRY: Duration = Duration::from_millis(500);
/// Clients reconnect after these codes, with increasing delays.
pub(super) const TRY_AGAIN_LATER: Close = (1013, "storage unavailable");
pub(super) const INTERNAL: Close = (1011, "internal error");

impl ControlContext {
    /// Registers the provider; gives up at `until`. The reply holds the memory of the node's capabilities until it was
    /// written.
    pub(super) async fn register(
        self,
        id: Option<&str>,
        frame: Register,
        until: Instant,
    ) -> Result<Outcome, EngineError> {
        let registrant = self.build_registrant(&frame)?;
        let RegisteredProvider { epoch, node } =
            match self.retry_until(until, || self.engine.nodes().register_provider(&registrant)).await {
                Some(taken) => taken?,
                None => {
                    // The last attempt may have been committed. A task of its own, because it looks for that longer
                    // than the socket lives.
                    let engine = self.engine.clone();
                    spawn_isolated("connection", async move { engine.nodes().release_unconfirmed(&registrant).await });
                    return Ok(Outcome { reply: None, effect: self.registration_failed(None, TRY_AGAIN_LATER) });
                }
            };
        let ProviderRegistration { provider, instance_id, cursor_granted, version, .. } = registrant.registration;
        let binding = ProviderBinding {
            fence: Fence {
                scope: self.node.scope,
                node_id: self.node.node_id.clone(),
                provider: provider.clone(),
                epoch,
            },
            cursor_granted,
            posts_granted: frame.capabilities.iter().any(|c| c.name == MESSAGE_SEND),
            is_broker: !self.node.is_direct() && version.starts_with(BROKER_VERSION),
            rereads_after_ack: self.node.is_direct() && version.starts_with(REREADING_CLIENT_VERSION),
            capabilities: frame.capabilities.len(),
            // That of a direct node is ignored, however long it is.
            declared_name: if self.node.is_direct() { String::new() } else { frame.name.clone() },
        };
        // The provider is taken by now: from here on the connection registers, or releases it.
        let by_name = || self.engine.nodes().by_name(self.node.scope, self.node.node_id.as_str());
        let read = match node {
            Some(node) => Some(Ok(node)),
            None => self.retry_until(until, by_name).await,
        };
        let HeldNode { node, memory } = match read {
            Some(Ok(node)) => node,
            Some(Err(error)) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "registered node could not be described, closing the connection"
                );
                return Ok(Outcome { reply: None, effect: self.registration_failed(Some(binding), INTERNAL) });
            }
            None => {
                let effect = self.registration_failed(Some(binding), TRY_AGAIN_LATER);
                return Ok(Outcome { reply: None, effect });
            }
        };
        let accepted = frame.capabilities.iter().map(|capability| AcceptedCapability {
            name: &capability.name,
            kind: capability.canonical_kind(),
            accepted: true,
        });
        let data = NodeRegistered::new(
            nodes::to_node(node),
            Provider { name: provider.to_string(), instance_id },
            accepted.collect(),
        );
        let text = held_bytes(encode_within_limit(id, data, &frame).into_bytes(), memory);
        // Text that was encoded is UTF-8.
        let reply = Utf8Bytes::try_from(text).unwrap_or_default();
        Ok(Outcome { reply: Some(reply), effect: RequestEffect::Registered(binding) })
    }

    /// Converts the frame, and refuses invalid ones.
    fn build_registrant(&self, frame: &Register) -> Result<Registrant, EngineError> {
        use relay_domain::{
            agents::check_machine,
            names::{MAX_NODE_NAME_BYTES, MAX_NOTE_BYTES, MAX_TAGS, check_length, check_name},
        };
        if frame.node_id != self.node.node_id.as_str() {
            return Err(EngineError::Forbidden(Denial::NodeIdMismatch));
        }
        let (provider, instance_id) = match &frame.provider {
            Some(provider) => (ProviderName::new(&provider.name), provider.instance_id.clone()),
            None => (ProviderName::default_provider(), self.connection.clone()),
        };
        check_name("provider.name", provider.as_str(), 128)?;
        check_name("provider.instance_id", &instance_id, 256)?;
        let tags = declared_tags(frame);
        check_capabilities(&frame.capabilities)?;
        check_length("version", &frame.version, MAX_NOTE_BYTES)?;
        if let Some(machine) = frame.machine_id.as_deref().filter(|_| self.node.is_direct()) {
            check_name("machine_id", machine, MAX_NODE_NAME_BYTES)?;
            check_machine("machine_id", machine)?;
        }
        if tags.len() > MAX_TAGS {
            return Err(EngineError::invalid_request(format!("at most {MAX_TAGS} tags")));
        }
        for tag in &tags {
            check_length("tag", tag, MAX_WORD_BYTES)?;
        }
        Ok(Registrant {
            scope: self.node.scope,
            node_id: self.node.node_id.clone(),
            gateway_id: self.gateway_id,
            is_direct: self.node.is_direct(),
            // One time for all attempts: a late one yields to a registration that was requested after it.
            requested_at: self.engine.now(),
            registration: ProviderRegistration {
                node_name: self.declared_name(frame)?,
                provider,
                instance_id,
                capabilities: stored_capabilities(&frame.capabilities).to_value(),
                cursor_granted: !self.node.is_direct() && frame.capabilities.iter().any(|c| c.name == CURSOR),
                tags,
                version: frame.version.clone(),
                // That of a broker's node comes from its enrolment.
                machine_id: frame.machine_id.clone().filter(|_| self.node.is_direct()),
                max_agents: i32::try_from(frame.max_agents).unwrap_or(i32::MAX),
            },
        })
    }

    /// Returns the name that the node takes. That of a direct node follows from its agent, whatever its client sends.
    fn declared_name(&self, frame: &Register) -> Result<String, EngineError> {
        if self.node.is_direct() {
            return Ok(frame.name.clone());
        }
        let name = relay_domain::names::parse_node_name(&frame.name);
        Ok(name.map_err(|_| EngineError::Invalid(InvalidInput::NodeName))?.to_owned())
    }

    /// Retries transient errors. `None` at the deadline, or once the peer has disconnected.
    pub(super) async fn retry_until<T, F>(&self, until: Instant, attempt: impl Fn() -> F) -> Option<EngineResult<T>>
    where
        F: Future<Output = EngineResult<T>>,
    {
        loop {
            // An attempt that is cut off may have been committed: the caller of a write expects that.
            match tokio::time::timeout_at(until, attempt()).await.ok()? {
                Err(error) if error.is_transient() => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "registration failed, retrying");
                }
                done => return Some(done),
            }
            self.closed.run_until_cancelled(tokio::time::sleep(RETRY)).await?;
        }
    }

    pub(super) fn registration_failed(&self, held: Option<ProviderBinding>, close: Close) -> RequestEffect {
        if !self.closed.is_cancelled() {
            tracing::warn!(node.id = %self.node.node_id, close.reason = close.1, "registration failed, closing the connection");
        }
        RequestEffect::RegistrationFailed { held, close }
    }
}

/// Encodes the reply. All providers of a node together can advertise more than published clients accept in a frame.
/// These read only the identity and the capabilities that they registered, so that a reply that would be too large
/// shows what this provider declared in place of what the node shows. That fits: it came in a frame, within bounds of
/// its own.
fn encode_within_limit(id: Option<&str>, mut data: NodeRegistered<'_>, frame: &Register) -> String {
    let text = encode_reply(id, &data);
    if text.len() <= FRAME_LIMIT {
        return text;
    }
    let own = stored_capabilities(&frame.capabilities).iter().map(JsonText::encode).collect();
    data.narrow_to_provider(own, declared_tags(frame));
    encode_reply(id, &data)
}

/// Returns the tags that a node declares. Repository keys replace its tags that name repositories; tags about its cloud
/// come from its enrolment only.
pub(super) fn declared_tags(frame: &Register) -> Vec<String> {
    let keys = frame.repo_keys.as_deref();
    let own = frame.tags.iter().filter(|tag| tags::is_declarable(tag));
    let own = own.filter(|tag| keys.is_none() || !tag.starts_with(tags::REPO_PREFIX)).cloned();
    let repositories = keys.unwrap_or_default().iter().map(|key| format!("{}{key}", tags::REPO_PREFIX));
    own.chain(repositories).collect()
}
