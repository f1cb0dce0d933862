//! Triggers: messages that invoke actions. The worker (`actions::trigger_scans`) fires them after the commit.

use relay_domain::{
    TriggerId, WorkspaceScope,
    actions::{
        is_reserved,
        trigger::{MAX_COMPILED_BYTES, MAX_PATTERN_BYTES, MAX_PER_WORKSPACE},
    },
    messages::Message,
    names::{MAX_AGENT_NAME_BYTES, check_length, check_name, is_channel_name, strip_hash},
};
use relay_store::IdempotencyKey;
pub use relay_store::actions::triggers::{TriggerChange, TriggerRow};

use relay_wire::{actions::trigger::TriggerInput, field::ToValue as _};
use sha2::{Digest, Sha256};

use super::Actions;
use crate::{
    EngineError, EngineResult,
    access::authentication::AgentCaller,
    actions::InvokeAction,
    error::{Conflict, InvalidInput, Missing},
};

#[derive(Debug)]
pub struct NewTrigger {
    /// Only messages in this channel.
    pub channel: Option<String>,
    /// Only texts that match this pattern.
    pub pattern: Option<String>,
    /// Only messages that mention this agent.
    pub mention: Option<String>,
    pub action_name: String,
    pub enabled: bool,
}

/// Compiled pattern of a trigger.
#[derive(Debug)]
pub(crate) enum Pattern {
    Expression(Box<regex::Regex>),
    Plain(String),
}

impl Pattern {
    /// Compiles a pattern. Text that is no regular expression is matched literally.
    ///
    /// # Errors
    /// When it takes more memory than it may.
    pub(crate) fn read(pattern: &str) -> EngineResult<Self> {
        match regex::RegexBuilder::new(pattern).size_limit(MAX_COMPILED_BYTES).build() {
            Ok(expression) => Ok(Self::Expression(Box::new(expression))),
            Err(regex::Error::CompiledTooBig(_)) => {
                Err(EngineError::invalid_request("pattern repeats itself too often"))
            }
            Err(_) => Ok(Self::Plain(pattern.to_owned())),
        }
    }

    /// True if the text matches, in time linear in its length.
    pub(crate) fn matches(&self, text: &str) -> bool {
        match self {
            Self::Expression(expression) => expression.is_match(text),
            Self::Plain(plain) => text.contains(plain.as_str()),
        }
    }
}

impl Actions {
    /// Creates a trigger for later messages. A missing action shows when it fires.
    ///
    /// # Errors
    /// When a field is invalid, or there are too many triggers.
    pub async fn create_trigger(&self, scope: WorkspaceScope, request: NewTrigger) -> EngineResult<TriggerRow> {
        let row = TriggerRow {
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
        };
        if self.core.store.create_trigger(scope, &row, MAX_PER_WORKSPACE).await? {
            Ok(row)
        } else {
            Err(EngineError::Conflict(Conflict::TooManyTriggers))
        }
    }

    /// Lists the triggers of a workspace, oldest first.
    pub async fn triggers(&self, scope: WorkspaceScope) -> EngineResult<Vec<TriggerRow>> {
        Ok(self.core.store.triggers(scope, MAX_PER_WORKSPACE).await?)
    }

    pub async fn trigger(&self, scope: WorkspaceScope, id: TriggerId) -> EngineResult<TriggerRow> {
        self.core.store.trigger(scope, id).await?.ok_or(EngineError::NotFound(Missing::Trigger))
    }

    /// Changes a trigger.
    ///
    /// # Errors
    /// When there is none of that id, or a field is out of bounds.
    pub async fn update_trigger(
        &self,
        scope: WorkspaceScope,
        id: TriggerId,
        change: TriggerChange,
    ) -> EngineResult<TriggerRow> {
        let change = TriggerChange {
            channel: change.channel.map(checked_channel).transpose()?,
            pattern: change.pattern.map(checked_pattern).transpose()?,
            mention: change.mention.map(checked_mention).transpose()?,
            action_name: change.action_name.map(checked_action).transpose()?,
            enabled: change.enabled,
        };
        self.core
            .store
            .update_trigger(scope, id, &change, self.core.now())
            .await?
            .ok_or(EngineError::NotFound(Missing::Trigger))
    }

    /// Deletes a trigger. Its open invocations continue.
    pub async fn delete_trigger(&self, scope: WorkspaceScope, id: TriggerId) -> EngineResult<()> {
        let gone = self.core.store.delete_trigger(scope, id).await?;
        if gone { Ok(()) } else { Err(EngineError::NotFound(Missing::Trigger)) }
    }
}

impl Actions {
    /// Invokes a trigger's action for a message, in the name of its author; a webhook's messages are the workspace's.
    /// Idempotent per trigger and message.
    ///
    /// # Errors
    /// When the action cannot be invoked.
    pub(crate) async fn invoke_for_message(
        &self,
        scope: WorkspaceScope,
        trigger: &TriggerRow,
        message: &Message,
    ) -> EngineResult<()> {
        if is_reserved(&trigger.action_name) {
            return Err(EngineError::NotFound(Missing::Action));
        }
        let trigger_id = trigger.trigger_id;
        let author = self.core.store.agent(scope, message.agent_id).await?;
        let caller = author.map(|agent| AgentCaller {
            scope,
            agent_id: agent.id,
            name: agent.name.into(),
            kind: agent.kind,
            token_generation: 0,
            is_former_token: false,
        });
        let input = TriggerInput {
            trigger_id,
            message_id: message.id,
            channel: &message.channel_name,
            channel_id: message.channel_id,
            thread_id: message.thread_id,
            agent_id: message.agent_id,
            agent_name: &message.agent_name,
            text: &message.text,
            mentions: &message.mentions,
            created_at: message.created_at.into(),
        }
        .to_value();
        let key = IdempotencyKey {
            hash: Sha256::digest(format!("trigger {trigger_id} {}", message.id)).into(),
            // Constant: an edited message is still the same message.
            fingerprint: [0; 32],
        };
        let request =
            InvokeAction { name: trigger.action_name.clone(), node: None, input: Some(input), durable: false };
        self.invoke_defined(scope, caller.as_ref(), request, Some(key)).await.map(drop)
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
    Pattern::read(&pattern)?;
    Ok(Some(pattern))
}

fn checked_mention(mention: Option<String>) -> EngineResult<Option<String>> {
    let Some(mention) = mention.filter(|mention| !mention.is_empty()) else { return Ok(None) };
    check_name("mention", mention.strip_prefix('@').unwrap_or(&mention), MAX_AGENT_NAME_BYTES)?;
    Ok(Some(mention))
}

fn checked_action(name: String) -> EngineResult<String> {
    check_name("action_name", &name, MAX_AGENT_NAME_BYTES)?;
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_expressions_match_literally() {
        for (pattern, text, expected) in [
            ("^deploy\\b", "deploy it", true),
            ("^deploy\\b", "please deploy it", false),
            ("deploy", "please deploy it", true),
            ("(?i)DEPLOY", "please deploy it", true),
            ("what?(", "so what?(", true),
            ("what?(", "what", false),
            ("a.c", "abc", true),
        ] {
            assert_eq!(Pattern::read(pattern).unwrap().matches(text), expected, "{pattern} in {text}");
        }
    }

    #[test]
    fn oversized_patterns_are_refused() {
        assert!(Pattern::read("(?:a{1000}){1000}").is_err());
        assert!(checked_pattern(Some("x".repeat(MAX_PATTERN_BYTES + 1))).is_err());
        assert_eq!(checked_pattern(Some(String::new())).unwrap(), None);
    }
}
