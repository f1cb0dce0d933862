//! Registration of agents at the engine: on the node socket, or by the binding of one that exists, which may come after
//! the start of its program ([`AgentBinding`]).

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use relay_wire::nodes::frame::AgentRegister;
use serde_json::json;
use tokio::time::sleep;

use super::{AgentError, AgentHandle, AgentSpec, SpawnSource, Spawner, spawner::join_channels};
use crate::{
    api::types::Event,
    engine::{EngineError, Request},
    engine_link::{HostedAgent, LinkError},
    mailbox::{Mailbox, SharedMailbox},
};

/// Pause before the next attempt to bind an agent whose program runs already.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// Identity of an agent that is being started, and its mailbox.
pub(super) struct IdentifiedAgent {
    pub(super) token: String,
    pub(super) mailbox: Arc<SharedMailbox>,
    pub(super) binding: Arc<AgentBinding>,
}

/// State of an agent's binding to this node. It ends with the agent, so that a late binding does not host one that has
/// ended.
#[derive(Debug)]
pub(crate) struct AgentBinding(Mutex<BindingState>);

#[derive(Debug)]
enum BindingState {
    /// Not bound yet.
    Unbound,
    Bound {
        agent_id: String,
    },
    Ended,
}

impl AgentBinding {
    fn new(state: BindingState) -> Arc<Self> {
        Arc::new(Self(Mutex::new(state)))
    }

    /// Id of the agent, once it is bound and as long as it runs.
    pub(crate) fn agent_id(&self) -> Option<String> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            BindingState::Bound { agent_id } => Some(agent_id.clone()),
            BindingState::Unbound | BindingState::Ended => None,
        }
    }

    pub(super) fn is_unbound(&self) -> bool {
        matches!(*self.0.lock().unwrap_or_else(PoisonError::into_inner), BindingState::Unbound)
    }

    /// Hosts the agent, unless it has ended. Returns whether it is hosted.
    fn complete(&self, agent_id: &str, host: impl FnOnce()) -> bool {
        // Held until it is hosted: an end that comes meanwhile ends that as well.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_unbound = matches!(*state, BindingState::Unbound);
        if is_unbound {
            *state = BindingState::Bound { agent_id: agent_id.to_owned() };
            host();
        }
        is_unbound
    }

    /// Ends it. Returns the id under which the agent is hosted.
    pub(super) fn end(&self) -> Option<String> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, BindingState::Ended) {
            BindingState::Bound { agent_id } => Some(agent_id),
            BindingState::Unbound | BindingState::Ended => None,
        }
    }
}

impl From<HostedAgent> for IdentifiedAgent {
    fn from(agent: HostedAgent) -> Self {
        let binding = AgentBinding::new(BindingState::Bound { agent_id: agent.agent_id });
        Self { token: agent.token, mailbox: agent.mailbox, binding }
    }
}

impl Spawner {
    /// Makes the agent known to the engine as one of this node. One that has a token can start without the engine. An
    /// agent of an earlier broker cannot: the engine tells which messages its session has.
    pub(super) async fn identify(
        &self,
        spec: &AgentSpec,
        source: SpawnSource,
        had: Vec<String>,
    ) -> Result<IdentifiedAgent, AgentError> {
        let Some(token) = &spec.agent_token else {
            return Ok(self.register(spec, had).await?.into());
        };
        match self.bind_and_host(spec, token, had).await {
            Err(error) if error.is_transient() && source != SpawnSource::Restart => {
                tracing::warn!(agent.name = spec.name, %error, "an agent starts unbound, retrying to bind it");
                Ok(IdentifiedAgent {
                    token: token.clone(),
                    mailbox: Arc::default(),
                    binding: AgentBinding::new(BindingState::Unbound),
                })
            }
            outcome => Ok(outcome?.into()),
        }
    }

    /// Registers the agent on the node socket, or over REST where the name belongs to an agent that runs nowhere.
    async fn register(&self, spec: &AgentSpec, had: Vec<String>) -> Result<HostedAgent, AgentError> {
        let services = self.services();
        let frame = AgentRegister {
            name: spec.name.clone(),
            invocation_id: spec.invocation_id.clone(),
            session_ref: spec.session_id.clone(),
            resumable: spec.is_resumable.then_some(true),
            // The spawn joins the channels that were asked for, and no other.
            auto_join_general: Some(false),
        };
        match services.link.host(frame, had.clone()).await {
            Err(LinkError::Refused(refused)) if refused.code == "agent_already_exists" => {
                let body = json!({ "name": spec.name, "type": "agent", "auto_join_general": false });
                let request = Request::post(&["agents"], &services.identity.workspace_key, body);
                // With a key of this form the engine gives a new token for an agent that exists and runs nowhere.
                let request = request.keyed(format!("relay-spawn:{}", uuid::Uuid::new_v4()));
                let registered = services.engine.call(request).await.map_err(|error| match error.refusal() {
                    Some((409, _)) => AgentError::AlreadyExists { name: spec.name.clone() },
                    Some(_) | None => AgentError::Engine(error),
                })?;
                // The engine refuses the next call if it has given no token.
                let token = registered["token"].as_str().unwrap_or_default();
                self.bind_and_host(spec, token, had).await
            }
            answer => Ok(answer?),
        }
    }

    async fn bind_and_host(&self, spec: &AgentSpec, token: &str, had: Vec<String>) -> Result<HostedAgent, AgentError> {
        let agent = self.bind(spec, token, had, Arc::default()).await?;
        self.services().link.adopt(&spec.name, agent.clone());
        Ok(agent)
    }

    /// Binds an agent that exists to this node, and continues its mailbox behind the engine's cursor. It is not hosted
    /// yet.
    async fn bind(
        &self,
        spec: &AgentSpec,
        token: &str,
        had: Vec<String>,
        mailbox: Arc<SharedMailbox>,
    ) -> Result<HostedAgent, AgentError> {
        let services = self.services();
        let own = services.engine.call(Request::get(&["agent"], token)).await?;
        let (Some(agent_id), Some(name)) = (own["id"].as_str(), own["name"].as_str()) else {
            return Err(EngineError::Unreadable("an agent without id or name".to_owned()).into());
        };
        if name != spec.name {
            // Its messages come under its own name and would find no agent here.
            let problem = format!("agentToken belongs to the agent {name:?}, spawn it under that name");
            return Err(AgentError::Invalid(problem));
        }
        let agent_id = agent_id.to_owned();
        let body = json!({ "agent_name": name, "session_ref": spec.session_id });
        let path = ["nodes", services.identity.node_id.as_str(), "agents"];
        let bound = services.engine.call(Request::post(&path, &services.identity.workspace_key, body)).await?;
        // An engine that gives no cursor here probes for the position, finds 0, and sends everything from seq 1
        // (ADR 0002).
        let cursor = bound["delivery_ack_seq"].as_u64().unwrap_or(0);
        mailbox.begin(Mailbox::new(&agent_id, &services.identity.agent_id, cursor, had));
        Ok(HostedAgent {
            agent_id,
            token: token.to_owned(),
            invocation_id: spec.invocation_id.clone(),
            session_ref: spec.session_id.clone(),
            mailbox,
        })
    }

    /// Binds an agent whose program runs already, as soon as the engine is available, until the agent ends.
    pub(super) async fn bind_later(self, handle: AgentHandle, mailbox: Arc<SharedMailbox>) {
        tokio::select! {
            // The receiver is dropped with the agent's task: there is no agent to bind any more.
            () = handle.commands.closed() => {}
            () = self.bind_when_available(&handle, mailbox) => {}
        }
        // The engine may have bound an agent that has ended meanwhile: the inventory takes that back.
        self.services().link.announce();
    }

    async fn bind_when_available(&self, handle: &AgentHandle, mailbox: Arc<SharedMailbox>) {
        let (services, name) = (self.services(), handle.spec.name.as_str());
        let bound = loop {
            sleep(RETRY_PAUSE).await;
            match self.bind(&handle.spec, &handle.token, Vec::new(), mailbox.clone()).await {
                Err(error) if error.is_transient() => {}
                outcome => break outcome,
            }
        };
        let agent = match bound {
            Ok(agent) => agent,
            Err(error) => {
                tracing::error!(agent.name = name, %error, "an agent that runs cannot be bound, it gets no messages");
                let message = format!("the agent gets no messages: {error}");
                // The program is left running: a person may work in it.
                return services.hub.publish(name, &Event::worker_error("not_bound", message, false));
            }
        };
        // Stored before the first message: after a crash the id says what the agent's session has.
        let agent_id = agent.agent_id.clone();
        let (roster, stored, id) = (services.roster.clone(), name.to_owned(), agent_id.clone());
        let stored = tokio::task::spawn_blocking(move || roster.set_agent_id(&stored, id)).await;
        if let Ok(Err(error)) = stored {
            tracing::error!(
                agent.name = name,
                error = format!("{error:#}"),
                "failed to store an agent's id, retrying; a crash before that repeats what its session has"
            );
        }
        if !handle.binding.complete(&agent_id, || services.link.adopt(name, agent)) {
            return;
        }
        tracing::info!(agent.name = name, agent.id = agent_id, "an agent that was started without the engine is bound");
        let joined = loop {
            match join_channels(&services.engine, &handle.token, &handle.channels()).await {
                Err(error) if error.is_transient() => sleep(RETRY_PAUSE).await,
                outcome => break outcome,
            }
        };
        if let Err(error) = joined {
            tracing::warn!(agent.name = name, %error, "an agent could not join its channels");
            services.hub.publish(name, &Event::worker_error("channels_not_joined", error.to_string(), false));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_hosted_only_until_its_end() {
        let binding = AgentBinding::new(BindingState::Unbound);
        assert!(binding.is_unbound() && binding.agent_id().is_none());
        let mut is_hosted = false;
        assert!(binding.complete("7", || is_hosted = true) && is_hosted);
        assert!(!binding.complete("8", || panic!("it is bound")));
        assert_eq!(binding.agent_id().as_deref(), Some("7"));
        assert_eq!((binding.end().as_deref(), binding.end()), (Some("7"), None));
        assert_eq!(binding.agent_id(), None);

        let ended = AgentBinding::new(BindingState::Unbound);
        assert_eq!(ended.end(), None);
        assert!(!ended.complete("7", || panic!("it has ended")));
        assert!(!ended.is_unbound() && ended.agent_id().is_none());
    }
}
