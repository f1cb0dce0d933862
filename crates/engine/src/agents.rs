//! Agents: registration, reading, changing, deleting, tokens, presence.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, WorkspaceScope,
    agent::{AgentKind, AgentStatus},
    dead_letter::DeadReason,
    event,
    names::{self, InvalidText, MAX_METADATA_BYTES, MAX_PERSONA_BYTES, TextProblem, check_json_length, check_length},
    plan::Ceiling,
    token::TokenKind,
};
pub use relay_store::AgentRow;
use relay_store::{AgentChange, DeleteIf, NewAgent, Registration, Respawn, SpawnKey, events::NewEvent};
use serde_json::{Value, json};

use crate::{
    Engine, EngineError, EngineResult,
    auth::{AgentCaller, Credential},
    deliveries::Delivery,
    idempotency::ClientKey,
};

/// Begins the idempotency key with which a broker registers an agent that it is about to run.
pub const SPAWN_KEY_PREFIX: &str = "relay-spawn:";

/// Unsettled deliveries that an agent's record shows at most.
pub const MAX_PENDING: i64 = 100;

/// A request for an agent.
#[derive(Debug)]
pub struct RegisterAgent {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: AgentKind,
    /// Who it is.
    pub persona: Option<String>,
    /// What clients keep there; an object.
    pub metadata: Option<Value>,
    /// What it can do; an object.
    pub capabilities: Option<Value>,
    /// What it is good at; an array.
    pub skills: Option<Value>,
    /// Whether it joins `general`.
    pub joins_general: bool,
}

/// A registered agent.
#[derive(Debug)]
pub struct RegisteredAgent {
    /// Its id.
    pub agent_id: AgentId,
    /// Its token, shown this once.
    pub token: String,
    /// When it was registered.
    pub created_at: DateTime<Utc>,
    /// Whether the same key was answered with this agent before.
    pub replayed: bool,
}

/// What to change of an agent. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct ChangeAgent {
    /// What it is doing.
    pub status: Option<AgentStatus>,
    /// Who it is; `Some(None)` clears it.
    pub persona: Option<Option<String>>,
    /// Merged key by key.
    pub metadata: Option<Value>,
    /// What it can do; `Some(None)` clears it.
    pub capabilities: Option<Option<Value>>,
    /// What it is good at.
    pub skills: Option<Value>,
}

/// What an agent is doing as reported at `now`: long silence counts as being away.
#[must_use]
pub fn reported_status(agent: &AgentRow, now: DateTime<Utc>) -> AgentStatus {
    agent.status.after_silence((now - agent.last_seen_at).to_std().unwrap_or_default())
}

impl Engine {
    /// Registers an agent: with a token, a mailbox, its place on its own direct node, and membership of
    /// `general`.
    ///
    /// # Errors
    /// When a field is out of bounds or the name is taken.
    pub async fn register_agent(
        &self,
        scope: WorkspaceScope,
        request: &RegisterAgent,
    ) -> EngineResult<RegisteredAgent> {
        names::check_agent_name(&request.name)?;
        if let Some(persona) = &request.persona {
            check_length("persona", persona, MAX_PERSONA_BYTES)?;
        }
        let metadata = request.metadata.clone().unwrap_or_else(|| json!({}));
        check_json("metadata", Some(&metadata))?;
        check_json("capabilities", request.capabilities.as_ref())?;
        check_json("skills", request.skills.as_ref())?;
        let token = self.fresh_token(TokenKind::Agent)?;
        let agent_id = AgentId::new(self.next_id());
        let at = self.now();
        let new = NewAgent {
            agent_id,
            name: &request.name,
            kind: request.kind,
            persona: request.persona.as_deref(),
            metadata: &metadata,
            capabilities: request.capabilities.as_ref(),
            skills: request.skills.as_ref(),
            token: token.hash,
            at,
            joins: request.joins_general.then_some(names::GENERAL),
            ceiling: self.ceiling(scope, Ceiling::Agents).await?,
        };
        let joined = |channel| {
            let data = json!({
                "channel": names::GENERAL, "agent_name": request.name, "agent_id": agent_id.to_string(),
            });
            NewEvent::new(event::MEMBER_JOINED, data).in_channel(channel, names::GENERAL).by(agent_id)
        };
        match self.store().register_agent(scope, &new, joined).await? {
            Registration::NameTaken => Err(EngineError::AgentAlreadyExists(request.name.clone())),
            Registration::NoRoom => Err(EngineError::PlanLimitExceeded(Ceiling::Agents)),
            Registration::Registered(channel) => {
                if let Some((channel_id, recorded)) = channel {
                    self.inner.hints.members_changed(scope, channel_id);
                    self.announce(recorded);
                }
                Ok(RegisteredAgent { agent_id, token: token.text, created_at: at, replayed: false })
            }
        }
    }

    /// Registers an agent for the broker that is about to run it, under a key with [`SPAWN_KEY_PREFIX`]. A
    /// broker that was restarted does this for a name it used before, and gives the spawn up on a refusal:
    /// where nobody else runs the agent, it gets the same agent with a new token, mailbox and memberships
    /// as they are. A key answered before gets the same agent again, whoever runs it.
    ///
    /// # Errors
    /// When a field is out of bounds, the agent runs elsewhere, or the key was used with another body.
    pub async fn register_spawned_agent(
        &self,
        scope: WorkspaceScope,
        request: &RegisterAgent,
        key: &ClientKey,
    ) -> EngineResult<RegisteredAgent> {
        let spawn = SpawnKey { hash: key.hash("-", "agent.spawn", &request.name), fingerprint: key.fingerprint() };
        match self.register_agent(scope, request).await {
            Err(EngineError::AgentAlreadyExists(_)) => {}
            Err(other) => return Err(other),
            Ok(registered) => {
                // Not in the registration's transaction: without this row a replay still finds an agent
                // that nobody runs.
                self.store().remember_spawn(scope, &spawn, registered.agent_id, registered.created_at).await?;
                return Ok(registered);
            }
        }
        let token = self.fresh_token(TokenKind::Agent)?;
        match self.store().respawn_agent(scope, &request.name, &spawn, token.hash, self.now()).await? {
            Respawn::Adopted { agent_id, created_at, replaced_token, replayed, recorded } => {
                self.announce(recorded);
                if let Some(old) = replaced_token {
                    self.revoke_token(old);
                }
                self.inner.seen.forget(scope, agent_id);
                Ok(RegisteredAgent { agent_id, token: token.text, created_at, replayed })
            }
            Respawn::KeyReused => Err(EngineError::IdempotencyKeyReused),
            Respawn::Hosted | Respawn::Gone => Err(EngineError::AgentAlreadyExists(request.name.clone())),
        }
    }

    /// The agents of a workspace that the caller may see, oldest first, at most
    /// [`names::MAX_LISTED_AGENTS`]; with `status`, only those that are reported with it.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn agents(&self, caller: &Credential, status: Option<AgentStatus>) -> EngineResult<Vec<AgentRow>> {
        let mut agents = self.store().agents(caller.scope(), &caller.view().filters).await?;
        if let Some(wanted) = status {
            let now = self.now();
            agents.retain(|agent| reported_status(agent, now) == wanted);
        }
        Ok(agents)
    }

    /// The agent of that name.
    ///
    /// # Errors
    /// When there is none.
    pub async fn agent_by_name(&self, scope: WorkspaceScope, name: &str) -> EngineResult<AgentRow> {
        self.store().agent_by_name(scope, name).await?.ok_or_else(|| EngineError::AgentNotFound(name.to_owned()))
    }

    /// The agent of that name if the caller may see it.
    ///
    /// # Errors
    /// When there is none for this caller.
    pub async fn visible_agent(&self, caller: &Credential, name: &str) -> EngineResult<AgentRow> {
        let agent = self.agent_by_name(caller.scope(), name).await?;
        if caller.view().sees_author(Some(agent.agent_id)) {
            Ok(agent)
        } else {
            Err(EngineError::AgentNotFound(agent.name))
        }
    }

    /// The agent of that id.
    ///
    /// # Errors
    /// When there is none.
    pub async fn agent(&self, scope: WorkspaceScope, agent: AgentId) -> EngineResult<AgentRow> {
        self.store().agent(scope, agent).await?.ok_or_else(|| EngineError::AgentNotFound(agent.to_string()))
    }

    /// The agent's oldest unsettled deliveries, at most [`MAX_PENDING`].
    ///
    /// # Errors
    /// When storage is away.
    pub async fn pending_deliveries(&self, scope: WorkspaceScope, agent: AgentId) -> EngineResult<Vec<Delivery>> {
        let rows = self.store().deliveries(scope, agent, None, MAX_PENDING).await?;
        Ok(rows.into_iter().map(Delivery::from).collect())
    }

    /// Changes an agent.
    ///
    /// # Errors
    /// When there is none of that name or a field is out of bounds.
    pub async fn update_agent(
        &self,
        scope: WorkspaceScope,
        name: &str,
        change: &ChangeAgent,
    ) -> EngineResult<AgentRow> {
        if let Some(Some(persona)) = &change.persona {
            check_length("persona", persona, MAX_PERSONA_BYTES)?;
        }
        check_json("metadata", change.metadata.as_ref())?;
        check_json("capabilities", change.capabilities.as_ref().and_then(Option::as_ref))?;
        check_json("skills", change.skills.as_ref())?;
        let row_change = AgentChange {
            status: change.status,
            persona: change.persona.as_ref().map(Option::as_deref),
            metadata: change.metadata.as_ref(),
            capabilities: change.capabilities.as_ref().map(Option::as_ref),
            skills: change.skills.as_ref(),
        };
        let limit = i32::try_from(MAX_METADATA_BYTES).unwrap_or(i32::MAX);
        let Some((agent, recorded)) = self.store().update_agent(scope, name, &row_change, limit, self.now()).await?
        else {
            self.agent_by_name(scope, name).await?;
            // It is there, so what was refused is the size of the merged metadata.
            return Err(too_long("metadata"));
        };
        if change.status.is_some() {
            self.inner.seen.forget(scope, agent.agent_id);
        }
        if let Some(recorded) = recorded {
            self.announce(recorded);
        }
        Ok(agent)
    }

    /// Deletes an agent. Its tokens are dead and its memberships gone when this returns; its name is free.
    ///
    /// # Errors
    /// When there is none of that name.
    pub async fn delete_agent(&self, scope: WorkspaceScope, name: &str) -> EngineResult<()> {
        self.delete_agent_if(scope, name, &DeleteIf::default()).await
    }

    /// The same for an agent of which something must hold.
    ///
    /// # Errors
    /// When there is none of that name, or it is not as it must be.
    pub(crate) async fn delete_agent_if(&self, scope: WorkspaceScope, name: &str, only: &DeleteIf) -> EngineResult<()> {
        let gone = self
            .store()
            .delete_agent(scope, name, only, self.now())
            .await?
            .ok_or_else(|| EngineError::AgentNotFound(name.to_owned()))?;
        for hash in gone.tokens {
            self.revoke_token(hash);
        }
        for channel in gone.channels {
            self.inner.hints.members_changed(scope, channel);
        }
        self.inner.hints.agents_moved(scope, vec![gone.node_id]);
        self.announce(gone.recorded);
        // Nobody will take what is left. If this fails, the expiry loop does it.
        let mailbox = [(scope, gone.agent_id)];
        if let Err(error) = self.dead_letter_mailboxes(&mailbox, DeadReason::AgentDeleted).await {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "a deleted agent's mailbox is left to the worker"
            );
        }
        Ok(())
    }

    /// Gives an agent a new token; the old one is dead when this returns. The workspace's key may do this
    /// for every agent, an agent for itself.
    ///
    /// # Errors
    /// When there is no such agent, or the caller is another agent or a node.
    pub async fn rotate_agent_token(&self, caller: &Credential, name: &str) -> EngineResult<String> {
        let scope = caller.scope();
        let agent_id = match caller {
            Credential::Workspace { .. } => self.agent_by_name(scope, name).await?.agent_id,
            Credential::Agent(agent) if &*agent.name == name => agent.agent_id,
            Credential::Agent(_) | Credential::Node(_) | Credential::Observer(_) => {
                return Err(EngineError::AgentRecoveryNotAuthorized);
            }
        };
        let token = self.fresh_token(TokenKind::Agent)?;
        let old = self
            .store()
            .rotate_agent_token(scope, agent_id, token.hash, self.now())
            .await?
            .ok_or_else(|| EngineError::AgentNotFound(name.to_owned()))?;
        if let Some(old) = old {
            self.revoke_token(old);
        }
        Ok(token.text)
    }

    /// The agent says that it is there. What else it has said of itself, such as being blocked, stays.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn say_present(&self, caller: &AgentCaller) -> EngineResult<()> {
        self.set_own_status(caller, AgentStatus::Active, Some(AgentStatus::Offline)).await
    }

    /// The agent says that it goes.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn say_gone(&self, caller: &AgentCaller) -> EngineResult<()> {
        self.set_own_status(caller, AgentStatus::Offline, None).await
    }

    async fn set_own_status(
        &self,
        caller: &AgentCaller,
        status: AgentStatus,
        only_from: Option<AgentStatus>,
    ) -> EngineResult<()> {
        let (scope, agent) = (caller.scope, caller.agent_id);
        let recorded = self.store().set_agent_status(scope, agent, status, only_from, self.now()).await?;
        self.inner.seen.forget(scope, agent);
        if let Some(recorded) = recorded {
            self.announce(recorded);
        }
        Ok(())
    }
}

/// Length of a value as JSON text.
pub(crate) fn encoded_length(value: &Value) -> usize {
    value.to_string().len()
}

/// The refusal of a stored JSON value that is too long.
pub(crate) fn too_long(field: &'static str) -> EngineError {
    InvalidText { field, problem: TextProblem::TooLong(MAX_METADATA_BYTES) }.into()
}

fn check_json(field: &'static str, value: Option<&Value>) -> Result<(), InvalidText> {
    value.map_or(Ok(()), |value| check_json_length(field, encoded_length(value)))
}
