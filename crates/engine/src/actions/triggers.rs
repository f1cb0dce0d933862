//! Triggers: messages that invoke actions. The worker (`actions::trigger_scans`) fires them after the commit.

use relay_domain::{
    AgentId, TriggerId, WorkspaceScope,
    access::rights::{Operation, Refusal, Right},
    actions::{
        MAX_VALUE_BYTES, SPAWN_PREFIX, WORKSPACE_CALLER, is_reserved,
        trigger::{MAX_PATTERN_BYTES, MAX_PER_WORKSPACE, MIN_INTERVAL_SECONDS, MentionFilter, Trigger, TriggerChange},
    },
    encoded_length,
    messages::{Message, client_metadata},
    names::{MAX_AGENT_NAME_BYTES, check_length, check_name, is_channel_name, strip_hash},
};
use relay_store::{IdempotencyKey, access::rights::AgentWithRights, messages::webhooks::webhook_agent};

use relay_wire::{
    actions::trigger::{TriggerInput, TriggerMessage},
    field::ToValue as _,
};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{
    Actions, InvocationRequest,
    call::{Callee, Handler, WaitPolicy, action_handler, policy_handler},
    trigger_patterns::TriggerPattern,
};
use crate::{
    EngineError, EngineResult,
    access::callers::{AgentCaller, Credential},
    actions::InvokeAction,
    error::{Conflict, Denial, InvalidInput, Missing},
};

#[derive(Debug)]
pub struct NewTrigger {
    /// Only messages in this channel.
    pub channel: Option<String>,
    /// Only texts that match this pattern.
    pub pattern: Option<String>,
    /// Only messages with these mentions.
    pub mention: Option<MentionFilter>,
    pub action_name: String,
    pub enabled: bool,
    pub min_interval_seconds: i32,
}

impl Actions {
    /// Creates a trigger for later messages. A missing action shows when it fires.
    ///
    /// # Errors
    /// When a field is invalid, the caller may not invoke the action itself, or there are too many triggers.
    pub async fn create_trigger(&self, caller: &Credential, request: NewTrigger) -> EngineResult<Trigger> {
        let scope = caller.scope();
        self.core.authorize(caller, Operation::CreateTrigger).await?;
        let row = Trigger {
            trigger_id: TriggerId::new(self.core.next_id()),
            channel: checked_channel(request.channel)?,
            pattern: checked_pattern(request.pattern)?,
            mention: checked_mention(request.mention)?,
            action_name: checked_action(request.action_name)?,
            enabled: request.enabled,
            after_seq: 0,
            last_triggered_at: None,
            last_error: None,
            created_at: self.core.now(),
            updated_at: None,
            created_by: caller.agent_id(),
            min_interval_seconds: checked_interval(request.min_interval_seconds)?,
        };
        if let Credential::Agent(agent) = caller {
            self.check_creator(agent, &row.action_name).await?;
        }
        if self.core.store.create_trigger(scope, &row, MAX_PER_WORKSPACE).await? {
            Ok(row)
        } else {
            Err(EngineError::Conflict(Conflict::TooManyTriggers))
        }
    }

    /// Lists the triggers of a workspace, oldest first.
    pub async fn triggers(&self, scope: WorkspaceScope) -> EngineResult<Vec<Trigger>> {
        Ok(self.core.store.triggers(scope, MAX_PER_WORKSPACE).await?)
    }

    pub async fn trigger(&self, scope: WorkspaceScope, id: TriggerId) -> EngineResult<Trigger> {
        self.core.store.trigger(scope, id).await?.ok_or(EngineError::NotFound(Missing::Trigger))
    }

    /// Changes a trigger.
    ///
    /// # Errors
    /// When the id is unknown, it is not the caller's, the caller may not invoke the new action itself, or a
    /// field is out of bounds.
    pub async fn update_trigger(
        &self,
        caller: &Credential,
        id: TriggerId,
        change: TriggerChange,
    ) -> EngineResult<Trigger> {
        let change = TriggerChange {
            channel: change.channel.map(checked_channel).transpose()?,
            pattern: change.pattern.map(checked_pattern).transpose()?,
            mention: change.mention.map(checked_mention).transpose()?,
            action_name: change.action_name.map(checked_action).transpose()?,
            enabled: change.enabled,
            min_interval_seconds: change.min_interval_seconds.map(checked_interval).transpose()?,
        };
        let scope = caller.scope();
        let trigger = self.trigger(scope, id).await?;
        self.core.authorize(caller, Operation::ManageTrigger { creator: trigger.created_by }).await?;
        if let (Credential::Agent(agent), Some(action)) = (caller, &change.action_name) {
            self.check_creator(agent, action).await?;
        }
        self.core
            .store
            .update_trigger(scope, id, &change, self.core.now())
            .await?
            .ok_or(EngineError::NotFound(Missing::Trigger))
    }

    /// Deletes a trigger. Its open invocations continue.
    ///
    /// # Errors
    /// When the id is unknown, or it is not the caller's.
    pub async fn delete_trigger(&self, caller: &Credential, id: TriggerId) -> EngineResult<()> {
        let trigger = self.trigger(caller.scope(), id).await?;
        self.core.authorize(caller, Operation::ManageTrigger { creator: trigger.created_by }).await?;
        let deleted = self.core.store.delete_trigger(caller.scope(), id).await?;
        if deleted { Ok(()) } else { Err(EngineError::NotFound(Missing::Trigger)) }
    }
}

impl Actions {
    /// Checks that the creator of a trigger may invoke its action itself.
    async fn check_creator(&self, creator: &AgentCaller, action: &str) -> EngineResult<()> {
        if creator.rights.has(Right::TriggerAny) {
            return Ok(());
        }
        self.authorize_spawn(creator, action).await?;
        match self.find_callee(creator.scope, None, action).await? {
            Callee::Action(row) | Callee::Policy(row) => self.check_caller(creator.scope, Some(creator), &row).await,
            Callee::Capacity | Callee::Nothing => Ok(()),
        }
    }

    /// Invokes a trigger's action for a message, in the name of its author; a webhook's messages are the workspace's.
    /// The agent that created the trigger must be permitted the action too, so that a trigger gives no rights to its
    /// creator. Idempotent per trigger and message.
    ///
    /// # Errors
    /// When the action cannot be invoked, or one of the two may not invoke it.
    pub(crate) async fn invoke_for_message(
        &self,
        scope: WorkspaceScope,
        trigger: &Trigger,
        message: &Message,
    ) -> EngineResult<()> {
        if is_reserved(&trigger.action_name) {
            return Err(EngineError::NotFound(Missing::Action));
        }
        let trigger_id = trigger.trigger_id;
        let parties: Vec<AgentId> = trigger.created_by.into_iter().chain([message.agent_id]).collect();
        let parties = self.core.store.agents_with_rights(scope, &parties).await?;
        let party =
            |id: AgentId| parties.iter().find(|agent| agent.agent_id == id).map(|agent| to_caller(scope, agent));
        if let Some(creator) = trigger.created_by {
            // An agent that was deleted has no rights.
            let denied = || EngineError::Forbidden(Denial::Refused(Refusal::CreateTrigger));
            let creator = party(creator).ok_or_else(denied)?;
            self.core.authorize(&creator, Operation::CreateTrigger).await?;
            self.check_creator(&creator, &trigger.action_name).await?;
        }
        let caller = party(message.agent_id);
        if let Some(author) = &caller {
            self.authorize_spawn(author, &trigger.action_name).await?;
        }
        let input = trigger_input(trigger_id, message);
        let key = IdempotencyKey {
            hash: Sha256::digest(format!("trigger {trigger_id} {}", message.id)).into(),
            // Constant: an edited message is still the same message.
            fingerprint: [0; 32],
        };
        if let Some(handler) = self.node_handler(scope, &trigger.action_name).await? {
            let call = InvocationRequest {
                action_name: trigger.action_name.clone(),
                handler,
                caller_id: caller.as_ref().map(|caller| caller.agent_id),
                caller_name: caller.map_or_else(|| WORKSPACE_CALLER.to_owned(), |caller| caller.name.to_string()),
                input,
                durable: false,
                key: Some(key),
            };
            return self.create_invocation(scope, self.new_invocation_id(), call).await.map(drop);
        }
        let request =
            InvokeAction { name: trigger.action_name.clone(), node: None, input: Some(input), durable: false };
        self.invoke_defined(scope, caller.as_ref(), request, Some(key)).await.map(drop)
    }

    /// Returns the handler of an action that no handler owns in the workspace and nodes have of their own. One node is
    /// addressed as such, so that its queue counts; several share the work. An action with the name of a capacity to
    /// spawn is a policy of its node, and queues nothing.
    async fn node_handler(&self, scope: WorkspaceScope, name: &str) -> EngineResult<Option<Handler>> {
        match self.find_callee(scope, None, name).await? {
            Callee::Action(_) | Callee::Policy(_) => return Ok(None),
            Callee::Capacity | Callee::Nothing => {}
        }
        let is_policy = name.starts_with(SPAWN_PREFIX);
        // Two are enough to see that it is not the only one.
        let mut actions = self.core.store.node_actions_named(scope, name, 2).await?;
        let Some(action) = actions.pop() else { return Ok(None) };
        Ok(Some(match (actions.is_empty(), is_policy) {
            (true, true) => policy_handler(action),
            (true, false) => action_handler(&action),
            (false, _) => Handler::Node {
                capability: name.to_owned(),
                target: None,
                provider: None,
                only_capacity: false,
                wait_policy: if is_policy { WaitPolicy::Never } else { WaitPolicy::AsDeclared },
            },
        }))
    }

    /// Returns whether a webhook's message was produced by an action: the call or its payload names the invocation. It
    /// fires nothing, so that an action which reports through a webhook does not start itself again.
    pub(crate) async fn is_produced_by_action(&self, scope: WorkspaceScope, message: &Message) -> EngineResult<bool> {
        if message.agent_id != webhook_agent(scope) {
            return Ok(false);
        }
        // Metadata is stored as JSON, so it parses.
        let metadata: Value = serde_json::from_str(message.metadata.get()).unwrap_or_default();
        for named in [&metadata["invocation_id"], &metadata["payload"]["invocation_id"]] {
            if let Some(id) = named.as_str().and_then(|id| id.parse().ok())
                && self.core.store.invocation(scope, id).await?.is_some()
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn trigger_input(trigger_id: TriggerId, message: &Message) -> Value {
    let mut input = TriggerInput {
        trigger_id,
        message: Some(TriggerMessage {
            id: message.id,
            channel_id: message.channel_id,
            channel_name: &message.channel_name,
            agent_id: message.agent_id,
            agent_name: &message.agent_name,
            text: &message.text,
            mentions: &message.mentions,
            metadata: client_metadata(&message.metadata),
            created_at: message.created_at.into(),
        }),
        message_id: message.id,
        channel: &message.channel_name,
        channel_id: message.channel_id,
        thread_id: message.thread_id,
        agent_id: message.agent_id,
        agent_name: &message.agent_name,
        text: &message.text,
        mentions: &message.mentions,
        created_at: message.created_at.into(),
    };
    let value = input.to_value();
    if encoded_length(&value) <= MAX_VALUE_BYTES {
        return value;
    }
    // It repeats the fields beside it; only its metadata are lost.
    input.message = None;
    input.to_value()
}

fn to_caller(scope: WorkspaceScope, agent: &AgentWithRights) -> AgentCaller {
    AgentCaller {
        scope,
        agent_id: agent.agent_id,
        name: agent.name.as_str().into(),
        kind: agent.kind,
        // No token was presented. Rights are judged here, and only the commit of a send compares generations.
        token_generation: 0,
        is_former_token: false,
        rights: agent.rights,
    }
}

/// Stores the text as given; an empty one counts as none.
fn checked_channel(channel: Option<String>) -> EngineResult<Option<String>> {
    let Some(channel) = channel.filter(|channel| !channel.is_empty()) else { return Ok(None) };
    if is_channel_name(strip_hash(&channel)) {
        Ok(Some(channel))
    } else {
        Err(EngineError::Invalid(InvalidInput::ChannelName))
    }
}

fn checked_pattern(pattern: Option<String>) -> EngineResult<Option<String>> {
    let Some(pattern) = pattern.filter(|pattern| !pattern.is_empty()) else { return Ok(None) };
    check_length("pattern", &pattern, MAX_PATTERN_BYTES)?;
    TriggerPattern::compile(&pattern)?;
    Ok(Some(pattern))
}

fn checked_mention(mention: Option<MentionFilter>) -> EngineResult<Option<MentionFilter>> {
    if let Some(MentionFilter::Agent(name)) = &mention {
        check_name("mention", name.strip_prefix('@').unwrap_or(name), MAX_AGENT_NAME_BYTES)?;
    }
    Ok(mention)
}

fn checked_interval(seconds: i32) -> EngineResult<i32> {
    if MIN_INTERVAL_SECONDS.contains(&seconds) {
        return Ok(seconds);
    }
    let (least, most) = (MIN_INTERVAL_SECONDS.start(), MIN_INTERVAL_SECONDS.end());
    Err(EngineError::invalid_request(format!("min_interval_seconds must be {least} to {most}")))
}

fn checked_action(name: String) -> EngineResult<String> {
    check_name("action_name", &name, MAX_AGENT_NAME_BYTES)?;
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversized_patterns_are_refused() {
        assert!(checked_pattern(Some("(?:a{1000}){1000}".to_owned())).is_err());
        assert!(checked_pattern(Some("x".repeat(MAX_PATTERN_BYTES + 1))).is_err());
        assert_eq!(checked_pattern(Some(String::new())).unwrap(), None);
    }
}
