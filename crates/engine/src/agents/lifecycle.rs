//! Life cycle of agents: registration, reading, changes, deletion, tokens, presence.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, WorkspaceScope,
    access::{
        rights::{Operation, RightChanges},
        token::{ChangeOrigin, TokenKind},
    },
    agents::{
        Agent, AgentKind, AgentPresence, AgentStatus, DIRECT_MACHINE, address,
        details::{AgentDetails, AgentKey},
        direct_machine,
    },
    encoded_length,
    events::kind,
    mailboxes::dead_letter::DeadLetterReason,
    names::{self, InvalidText, MAX_METADATA_BYTES, MAX_PERSONA_BYTES, TextProblem, check_json_length, check_length},
    observers::ObserverScope,
    workspaces::plan::Quota,
};
use relay_store::{
    AgentChange, DeleteCondition, NewAgent, Registration, RespawnOutcome, TokenRotation,
    agents::details::AgentDetailsQuery, events::Event,
};
use relay_wire::{events::data::MemberChanged, field::ToValue as _};
use serde_json::{Map, Value};

use super::Agents;
use crate::{
    EngineError, EngineResult,
    access::{
        callers::{AgentCaller, Credential},
        idempotency::ClientKey,
    },
    error::{BadCredential, Conflict, Denial, Limit, Missing},
    parts::{Parts, parsed_sizes},
};

/// Prefix of the idempotency key with which a broker registers an agent that it is about to run.
pub const SPAWN_KEY_PREFIX: &str = "relay-spawn:";

/// Bound of the names of actions in an agent's record, those that it handles first.
const MAX_NAMED_ACTIONS: i64 = 1000;
/// Bound of the unsettled deliveries in an agent's record.
const MAX_PENDING: i64 = 100;

#[derive(Debug)]
pub struct RegisterAgent {
    pub name: String,
    pub kind: AgentKind,
    pub persona: Option<String>,
    /// JSON object of the client's.
    pub metadata: Option<Value>,
    pub capabilities: Option<Value>,
    pub skills: Option<Value>,
    pub joins_general: bool,
    /// Prefix of the machine of its own node.
    pub direct_machine_prefix: Option<String>,
}

#[derive(Debug)]
pub struct RegisteredAgent {
    pub agent_id: AgentId,
    /// Shown this once.
    pub token: String,
    pub created_at: DateTime<Utc>,
    /// Its name and the machine that it is on.
    pub address: String,
    /// True if an earlier request with the same key created the agent.
    pub replayed: bool,
}

/// Changes of an agent. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct ChangeAgent {
    pub status: Option<AgentStatus>,
    /// `Some(None)` clears it.
    pub persona: Option<Option<String>>,
    pub metadata: Option<Value>,
    /// `Some(None)` clears it.
    pub capabilities: Option<Option<Value>>,
    pub skills: Option<Value>,
    /// Merged into its overrides of the workspace's policy; `Some(None)` removes all of them.
    pub rights: Option<Option<RightChanges>>,
}

impl Agents {
    /// Registers an agent: with a token, a mailbox, its own direct node, and membership of `general`.
    ///
    /// # Errors
    /// When a field is out of bounds or the name is taken.
    pub async fn register(&self, scope: WorkspaceScope, request: &RegisterAgent) -> EngineResult<RegisteredAgent> {
        names::check_agent_name(&request.name)?;
        if let Some(persona) = &request.persona {
            check_length("persona", persona, MAX_PERSONA_BYTES)?;
        }
        let metadata = request.metadata.clone().unwrap_or_else(|| Map::new().into());
        check_json("metadata", Some(&metadata))?;
        check_json("capabilities", request.capabilities.as_ref())?;
        check_json("skills", request.skills.as_ref())?;
        let token = self.tokens.fresh(TokenKind::Agent)?;
        let agent_id = AgentId::new(self.core.next_id());
        let machine = request.direct_machine_prefix.as_deref().map(|prefix| direct_machine(prefix, agent_id));
        let machine = machine.transpose()?;
        let at = self.core.now();
        let new = NewAgent {
            agent_id,
            name: &request.name,
            kind: request.kind,
            persona: request.persona.as_deref(),
            metadata: &metadata,
            capabilities: request.capabilities.as_ref(),
            skills: request.skills.as_ref(),
            token: token.hash,
            direct_machine: machine.as_deref(),
            at,
            joins: request.joins_general.then_some(names::GENERAL_CHANNEL),
            quota: self.quotas.limit(scope, Quota::Agents).await?,
        };
        let joined = |channel| {
            let data = MemberChanged { channel: names::GENERAL_CHANNEL, agent_name: &request.name, agent_id };
            Event::new(kind::MEMBER_JOINED, data.to_value())
                .in_channel(channel, names::GENERAL_CHANNEL)
                .by_agent(agent_id)
        };
        match self.core.store.register_agent(scope, &new, joined).await? {
            Registration::NameTaken => Err(EngineError::Conflict(Conflict::AgentExists(request.name.clone()))),
            Registration::QuotaReached => Err(EngineError::LimitExceeded(Limit::Quota(Quota::Agents))),
            Registration::Registered(channel) => {
                if let Some((channel_id, recorded)) = channel {
                    self.core.hints.members_changed(scope, channel_id);
                    self.core.announce(recorded);
                }
                let address = address(&request.name, machine.as_deref().unwrap_or(DIRECT_MACHINE));
                Ok(RegisteredAgent { agent_id, token: token.text, created_at: at, address, replayed: false })
            }
        }
    }

    /// Registers an agent for the broker that is about to run it, under a key with [`SPAWN_KEY_PREFIX`]. A restarted
    /// broker does this for a name that it used before, and gives up the spawn on a refusal. So, if no other node runs
    /// the agent, the broker gets the same agent with a new token; mailbox and memberships stay. A repeated key returns
    /// the same agent wherever it runs.
    ///
    /// # Errors
    /// When a field is out of bounds, the agent runs elsewhere, or the key was used with another body.
    pub async fn register_spawned(
        &self,
        scope: WorkspaceScope,
        request: &RegisterAgent,
        key: &ClientKey,
    ) -> EngineResult<RegisteredAgent> {
        let spawn = key.stored("-", "agent.spawn", &request.name);
        match self.register(scope, request).await {
            Err(EngineError::Conflict(Conflict::AgentExists(_))) => {}
            Err(other) => return Err(other),
            Ok(registered) => {
                // Outside of the registration's transaction: without this row a replay still finds an agent that no
                // node runs.
                self.core.store.record_spawn_key(scope, &spawn, registered.agent_id, registered.created_at).await?;
                return Ok(registered);
            }
        }
        let token = self.tokens.fresh(TokenKind::Agent)?;
        match self.core.store.respawn_agent(scope, &request.name, &spawn, token.hash, self.core.now()).await? {
            RespawnOutcome::Adopted { agent_id, created_at, replaced_tokens, replayed, recorded } => {
                self.core.announce(recorded);
                replaced_tokens.into_iter().for_each(|hash| self.tokens.revoke(hash));
                self.seen.forget(scope, agent_id);
                let address = self.by_id(scope, agent_id).await.map_err(EngineError::after_commit)?.address();
                Ok(RegisteredAgent { agent_id, token: token.text, created_at, address, replayed })
            }
            RespawnOutcome::KeyReused => Err(EngineError::Conflict(Conflict::IdempotencyKeyReused)),
            RespawnOutcome::Hosted | RespawnOutcome::NotFound => {
                Err(EngineError::Conflict(Conflict::AgentExists(request.name.clone())))
            }
        }
    }

    /// Lists the agents of a workspace that the caller may see, oldest first, at most [`names::MAX_LISTED_AGENTS`];
    /// with `status`, only those that are reported with it.
    pub async fn list(&self, caller: &Credential, status: Option<AgentStatus>) -> EngineResult<Parts<Agent>> {
        let scope = caller.scope();
        let agents = self.core.store.agent_sizes(scope, &caller.view().filters).await?;
        let (store, now) = (self.core.store.clone(), self.core.now());
        let read = move |ids: Vec<AgentId>| {
            let store = store.clone();
            async move {
                let mut agents = store.agents(scope, &ids).await?;
                // The reported status depends on the time since the last sign of life, so storage cannot select it.
                agents.retain(|agent| status.is_none_or(|wanted| agent.status_at(now) == wanted));
                Ok(agents)
            }
        };
        self.core.read_in_parts(scope, parsed_sizes(agents), read).await
    }

    /// Lists the ids, names and statuses of all agents, oldest first, at most [`names::MAX_LISTED_AGENTS`].
    pub async fn statuses(&self, scope: WorkspaceScope) -> EngineResult<Vec<AgentPresence>> {
        let (mut rows, now) = (self.core.store.agent_statuses(scope).await?, self.core.now());
        for row in &mut rows {
            row.status = row.status.reported_at(row.last_seen_at, now);
        }
        Ok(rows)
    }

    /// Finds an agent by name.
    pub async fn by_name(&self, scope: WorkspaceScope, name: &str) -> EngineResult<Agent> {
        self.core
            .store
            .agent_by_name(scope, name)
            .await?
            .ok_or_else(|| EngineError::NotFound(Missing::Agent(name.to_owned())))
    }

    /// Finds an agent by name if the caller may see it.
    ///
    /// # Errors
    /// When the name is unknown or not visible to this caller.
    pub(crate) async fn visible(&self, caller: &Credential, name: &str) -> EngineResult<Agent> {
        let agent = self.by_name(caller.scope(), name).await?;
        if caller.view().sees_author(Some(agent.id)) {
            Ok(agent)
        } else {
            Err(EngineError::NotFound(Missing::Agent(agent.name)))
        }
    }

    /// Finds an agent, with those of its channels, actions and deliveries that the caller may see.
    ///
    /// # Errors
    /// When the name is unknown or not visible to this caller.
    pub async fn details(&self, caller: &Credential, agent: AgentKey<'_>) -> EngineResult<AgentDetails> {
        let view = caller.view();
        let reader = match caller {
            Credential::Agent(reader) => Some((reader.agent_id, &*reader.name)),
            Credential::Workspace { .. } | Credential::Node(_) | Credential::Observer(_) => None,
        };
        let query = AgentDetailsQuery {
            agent,
            reader,
            // Not filtered afterwards: what the observer may not see is not read.
            action_limit: if view.has_scope(ObserverScope::Activity) { MAX_NAMED_ACTIONS } else { 0 },
            delivery_limit: if view.has_scope(ObserverScope::Deliveries) { MAX_PENDING } else { 0 },
        };
        let found = self.core.store.agent_details(caller.scope(), &query).await?;
        let mut details = found
            .filter(|details| view.sees_author(Some(details.agent.id)))
            .ok_or_else(|| EngineError::NotFound(Missing::Agent(agent.to_string())))?;
        details.channels.retain(|membership| view.sees_channel(membership.channel_id, &membership.name));
        Ok(details)
    }

    pub(crate) async fn by_id(&self, scope: WorkspaceScope, agent: AgentId) -> EngineResult<Agent> {
        self.core
            .store
            .agent(scope, agent)
            .await?
            .ok_or_else(|| EngineError::NotFound(Missing::Agent(agent.to_string())))
    }

    /// Changes an agent.
    ///
    /// # Errors
    /// When the name is unknown or a field is out of bounds.
    pub async fn update(&self, scope: WorkspaceScope, name: &str, change: &ChangeAgent) -> EngineResult<Agent> {
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
            rights: change.rights.as_ref().map(Option::as_ref),
        };
        let limit = i32::try_from(MAX_METADATA_BYTES).unwrap_or(i32::MAX);
        let Some((agent, recorded)) =
            self.core.store.update_agent(scope, name, &row_change, limit, self.core.now()).await?
        else {
            self.by_name(scope, name).await?;
            // It exists, so the merged metadata is too large.
            return Err(too_long("metadata"));
        };
        if change.status.is_some() {
            self.seen.forget(scope, agent.id);
        }
        if change.rights.is_some() {
            // Rights are part of cached credentials.
            self.tokens.rights_changed(scope);
        }
        if let Some(recorded) = recorded {
            self.core.announce(recorded);
        }
        Ok(agent)
    }

    /// Deletes an agent. Its tokens are revoked and its memberships removed when this returns; its name is free.
    ///
    /// # Errors
    /// When the name is unknown, or the caller has not spawned it.
    pub async fn delete(&self, caller: &Credential, name: &str) -> EngineResult<()> {
        let agent = self.by_name(caller.scope(), name).await?;
        self.core.authorize(caller, Operation::Delete { spawned_by: agent.spawned_by }).await?;
        // With the id: another agent may have the name by now, and nothing was checked for it.
        let condition = DeleteCondition { agent: Some(agent.id), ..DeleteCondition::default() };
        self.delete_if(caller.scope(), name, &condition).await
    }

    /// Deletes an agent that meets conditions.
    ///
    /// # Errors
    /// When the name is unknown, or it does not meet them.
    pub(crate) async fn delete_if(
        &self,
        scope: WorkspaceScope,
        name: &str,
        condition: &DeleteCondition,
    ) -> EngineResult<()> {
        let deleted = self
            .core
            .store
            .delete_agent(scope, name, condition, self.core.now())
            .await?
            .ok_or_else(|| EngineError::NotFound(Missing::Agent(name.to_owned())))?;
        // After the commit: a cached token must not outlive the rows it was checked against.
        for hash in deleted.tokens {
            self.tokens.revoke(hash);
        }
        for channel in deleted.channels {
            self.core.hints.members_changed(scope, channel);
        }
        self.core.hints.agents_moved(scope, vec![deleted.node_id]);
        self.core.announce(deleted.recorded);
        // No consumer will take the rest. If this fails, the expiry loop does it.
        let mailbox = [(scope, deleted.agent_id)];
        if let Err(error) = self.mailboxes.dead_letter_mailboxes(&mailbox, DeadLetterReason::AgentDeleted).await {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "failed to empty the mailbox of a deleted agent, the worker will"
            );
        }
        Ok(())
    }

    /// Rotates an agent's token. The token before it is revoked when this returns, or accepted for the workspace's
    /// grace. The workspace key may do this for every agent, an agent for itself. The key ends the agent's own
    /// connection too: it rotates a token that was stolen.
    ///
    /// # Errors
    /// When there is no such agent, or the caller is another agent, a node, or the holder of a former token.
    pub async fn rotate_token(&self, caller: &Credential, name: &str) -> EngineResult<String> {
        let scope = caller.scope();
        match caller {
            Credential::Workspace { .. } => {
                let agent = self.by_name(scope, name).await?;
                let rotated = self.replace_token(scope, agent.id, ChangeOrigin::WorkspaceKey, None).await?;
                rotated.ok_or_else(|| EngineError::NotFound(Missing::Agent(name.to_owned())))
            }
            Credential::Agent(agent) if &*agent.name == name => {
                agent.refuse_former_token()?;
                // The credential may come from the cache. The update finds no agent if its token was rotated since.
                let generation = Some(agent.token_generation);
                let rotated = self.replace_token(scope, agent.agent_id, ChangeOrigin::Agent, generation).await?;
                rotated.ok_or(EngineError::Unauthenticated(BadCredential::UnknownToken { kind: TokenKind::Agent }))
            }
            Credential::Agent(_) | Credential::Node(_) | Credential::Observer(_) => {
                Err(EngineError::Forbidden(Denial::AgentRecovery))
            }
        }
    }

    /// Gives an agent a new token. `None` when there is no such agent, or the presented token is not its own any more.
    async fn replace_token(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        by: ChangeOrigin,
        presented_generation: Option<i64>,
    ) -> EngineResult<Option<String>> {
        let token = self.tokens.fresh(TokenKind::Agent)?;
        let rotation = TokenRotation { agent, token: token.hash, by, presented_generation, at: self.core.now() };
        let Some(rotated) = self.core.store.rotate_agent_token(scope, &rotation).await? else { return Ok(None) };
        // After the commit: a lookup that is cached from now on reads the new rows.
        rotated.changed.into_iter().for_each(|hash| self.tokens.revoke(hash));
        self.core.announce(rotated.recorded);
        Ok(Some(token.text))
    }

    /// Marks the calling agent online. A status that it has set itself, such as blocked, stays.
    pub async fn mark_online(&self, caller: &AgentCaller) -> EngineResult<()> {
        self.set_own_status(caller, AgentStatus::Active, Some(AgentStatus::Offline)).await
    }

    pub async fn mark_offline(&self, caller: &AgentCaller) -> EngineResult<()> {
        self.set_own_status(caller, AgentStatus::Offline, None).await
    }

    async fn set_own_status(
        &self,
        caller: &AgentCaller,
        status: AgentStatus,
        only_from: Option<AgentStatus>,
    ) -> EngineResult<()> {
        let (scope, agent) = (caller.scope, caller.agent_id);
        let recorded = self.core.store.set_agent_status(scope, agent, status, only_from, self.core.now()).await?;
        self.seen.forget(scope, agent);
        if let Some(recorded) = recorded {
            self.core.announce(recorded);
        }
        Ok(())
    }
}

pub(crate) fn too_long(field: &'static str) -> EngineError {
    InvalidText { field, problem: TextProblem::TooLong(MAX_METADATA_BYTES) }.into()
}

fn check_json(field: &'static str, value: Option<&Value>) -> Result<(), InvalidText> {
    value.map_or(Ok(()), |value| check_json_length(field, encoded_length(value)))
}
