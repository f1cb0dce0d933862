//! `node.register`: a connection takes its provider.
//!
//! A refusal is told by an `error` frame, which stops providers for good, and which direct clients do not read. So what
//! is no refusal is never told so: what passes is tried again while the peer waits, and a connection that cannot
//! register is closed, because every client comes back from that.

use std::time::Duration;

use relay_domain::ProviderName;
use relay_engine::{
    EngineError, EngineResult,
    mailbox::{Fence, Registration},
    serve::Registrant,
};
use relay_wire::frame::Register;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    control::{Bound, Connection, Effect, MAX_WORD_BYTES, check_capabilities, stored_capabilities},
    held::LOOKS_UP_VERSION,
    pacing::BROKER_VERSION,
};
use crate::routes::nodes;

/// Capability by which a broker asks for its agents' cursors.
const CURSOR: &str = "relay:delivery-cursor-v1";
/// How long a registration may take. Brokers wait 10 s for its answer.
const REGISTERS_WITHIN: Duration = Duration::from_secs(8);
/// Pause before a storage that is away is asked again.
const RETRY: Duration = Duration::from_millis(500);
/// Clients come back after these codes, later each time.
const TRY_AGAIN_LATER: (u16, &str) = (1013, "storage unavailable");
pub(super) const INTERNAL: (u16, &str) = (1011, "internal error");

impl Connection {
    pub(super) async fn register(self, frame: Register) -> Result<(Option<Value>, Effect), EngineError> {
        let registrant = self.registrant(&frame)?;
        let until = Instant::now() + REGISTERS_WITHIN;
        let epoch = match self.in_time(until, || self.engine.register_provider(&registrant)).await {
            Some(taken) => taken?,
            None => return Ok((None, self.unregistered(None, TRY_AGAIN_LATER))),
        };
        let Registration { provider, instance_id, cursor_granted, version, .. } = registrant.registration;
        let bound = Bound {
            fence: Fence { scope: self.scope, node_id: self.node_id.clone(), provider: provider.clone(), epoch },
            cursor_granted,
            is_broker: !self.direct && version.starts_with(BROKER_VERSION),
            looks_up: self.direct && version.starts_with(LOOKS_UP_VERSION),
            capabilities: frame.capabilities.len(),
        };
        // The provider is this connection's by now: from here on it registers, or gives the provider back.
        let node = match self.in_time(until, || self.engine.node(self.scope, self.node_id.as_str())).await {
            Some(Ok(node)) => node,
            Some(Err(error)) => {
                tracing::error!(error = &error as &dyn std::error::Error, "a registered node could not be described");
                return Ok((None, self.unregistered(Some(bound), INTERNAL)));
            }
            None => return Ok((None, self.unregistered(Some(bound), TRY_AGAIN_LATER))),
        };
        let mut data = serde_json::to_value(nodes::descriptor(node)).unwrap_or_default();
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
        Ok((Some(data), Effect::Registered(bound)))
    }

    /// Who asks, if the frame is one that may be taken.
    fn registrant(&self, frame: &Register) -> Result<Registrant, EngineError> {
        use relay_domain::names::{MAX_NOTE_BYTES, MAX_TAGS, check_length, check_name};
        if frame.node_id != self.node_id.as_str() {
            return Err(EngineError::NodeIdMismatch);
        }
        let (provider, instance_id) = match &frame.provider {
            Some(provider) => (ProviderName::new(&provider.name), provider.instance_id.clone()),
            None => (ProviderName::default_provider(), self.connection.clone()),
        };
        check_name("provider.name", provider.as_str(), 128)?;
        check_name("provider.instance_id", &instance_id, 256)?;
        let mut tags = frame.tags.clone();
        if let Some(keys) = &frame.repo_keys {
            tags.retain(|tag| !tag.starts_with("repo:"));
            tags.extend(keys.iter().map(|key| format!("repo:{key}")));
        }
        check_capabilities(&frame.capabilities)?;
        check_length("version", &frame.version, MAX_NOTE_BYTES)?;
        if tags.len() > MAX_TAGS {
            return Err(EngineError::InvalidRequest(format!("at most {MAX_TAGS} tags")));
        }
        for tag in &tags {
            check_length("tag", tag, MAX_WORD_BYTES)?;
        }
        Ok(Registrant {
            scope: self.scope,
            node_id: self.node_id.clone(),
            gateway_id: self.gateway_id,
            registration: Registration {
                node_name: frame.name.trim_start_matches('#').to_owned(),
                provider,
                instance_id,
                capabilities: stored_capabilities(&frame.capabilities),
                cursor_granted: !self.direct && frame.capabilities.iter().any(|c| c.name == CURSOR),
                tags,
                version: frame.version.clone(),
                max_agents: i32::try_from(frame.max_agents).unwrap_or(i32::MAX),
            },
        })
    }

    /// Tries until it is done or refused. `None` when it is given up: at `until`, or because the peer has gone.
    async fn in_time<T, F>(&self, until: Instant, attempt: impl Fn() -> F) -> Option<EngineResult<T>>
    where
        F: Future<Output = EngineResult<T>>,
    {
        loop {
            match tokio::time::timeout_at(until, attempt()).await.ok()? {
                Err(error) if error.is_passing() => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "a registration waits for storage");
                }
                done => return Some(done),
            }
            self.gone.run_until_cancelled(tokio::time::sleep(RETRY)).await?;
        }
    }

    fn unregistered(&self, held: Option<Bound>, close: (u16, &'static str)) -> Effect {
        if !self.gone.is_cancelled() {
            tracing::warn!(node.id = %self.node_id, close.reason = close.1, "a connection that could not register is closed");
        }
        Effect::Unregistered { held, close }
    }
}
