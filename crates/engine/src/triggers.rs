//! Triggers: messages that invoke actions. What fires them is the worker (`worker::triggers`), behind the commit.

use chrono::SecondsFormat;
use relay_domain::{
    AgentId, TriggerId, WorkspaceScope,
    action::is_reserved,
    names::{MAX_AGENT_NAME_BYTES, check_length, check_name, is_channel_name, strip_hash},
    trigger::{MAX_COMPILED_BYTES, MAX_PATTERN_BYTES, MAX_PER_WORKSPACE},
};
pub use relay_store::triggers::{TriggerChange, TriggerRow};

use relay_store::MessageRow;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::{Engine, EngineError, EngineResult, actions::InvokeAction, auth::AgentCaller};

/// A request for a trigger.
#[derive(Debug)]
pub struct NewTrigger {
    /// Only messages in this channel.
    pub channel: Option<String>,
    /// Only texts that this is found in.
    pub pattern: Option<String>,
    /// Only messages that mention this agent.
    pub mention: Option<String>,
    /// What is invoked.
    pub action_name: String,
    /// Whether it is.
    pub enabled: bool,
}

/// What is looked for in a text.
#[derive(Debug)]
pub(crate) enum Pattern {
    /// A regular expression.
    Expression(Box<regex::Regex>),
    /// Text that is none.
    Plain(String),
}

impl Pattern {
    /// Reads a pattern. What is no regular expression is plain text.
    ///
    /// # Errors
    /// When it takes more memory than it may.
    pub(crate) fn read(pattern: &str) -> EngineResult<Self> {
        match regex::RegexBuilder::new(pattern).size_limit(MAX_COMPILED_BYTES).build() {
            Ok(expression) => Ok(Self::Expression(Box::new(expression))),
            Err(regex::Error::CompiledTooBig(_)) => {
                Err(EngineError::InvalidRequest("pattern repeats itself too often".into()))
            }
            Err(_) => Ok(Self::Plain(pattern.to_owned())),
        }
    }

    /// Whether it is found in a text, in time linear in the text's length.
    pub(crate) fn is_in(&self, text: &str) -> bool {
        match self {
            Self::Expression(expression) => expression.is_match(text),
            Self::Plain(plain) => text.contains(plain.as_str()),
        }
    }
}

impl Engine {
    /// Makes a trigger, for the messages from now on. Whether there is such an action shows when it fires.
    ///
    /// # Errors
    /// When a field is out of bounds or makes no sense, or there are too many.
    pub async fn create_trigger(&self, scope: WorkspaceScope, request: NewTrigger) -> EngineResult<TriggerRow> {
        let row = TriggerRow {
            trigger_id: self.next_id(),
            channel: checked_channel(request.channel)?,
            pattern: checked_pattern(request.pattern)?,
            mention: checked_mention(request.mention)?,
            action_name: checked_action(request.action_name)?,
            enabled: request.enabled,
            after_seq: 0,
            last_triggered_at: None,
            last_error: None,
            created_at: self.now(),
            updated_at: None,
        };
        if self.store().create_trigger(scope, &row, MAX_PER_WORKSPACE).await? {
            Ok(row)
        } else {
            Err(EngineError::TooManyTriggers)
        }
    }

    /// The triggers of a workspace, oldest first.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn triggers(&self, scope: WorkspaceScope) -> EngineResult<Vec<TriggerRow>> {
        Ok(self.store().triggers(scope, MAX_PER_WORKSPACE).await?)
    }

    /// A trigger.
    ///
    /// # Errors
    /// When there is none of that id.
    pub async fn trigger(&self, scope: WorkspaceScope, id: TriggerId) -> EngineResult<TriggerRow> {
        self.store().trigger(scope, id).await?.ok_or(EngineError::TriggerNotFound)
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
        self.store().update_trigger(scope, id, &change, self.now()).await?.ok_or(EngineError::TriggerNotFound)
    }

    /// Ends a trigger. What it has invoked goes on.
    ///
    /// # Errors
    /// When there is none of that id.
    pub async fn delete_trigger(&self, scope: WorkspaceScope, id: TriggerId) -> EngineResult<()> {
        let gone = self.store().delete_trigger(scope, id).await?;
        if gone { Ok(()) } else { Err(EngineError::TriggerNotFound) }
    }
}

impl Engine {
    /// Invokes a trigger's action for a message, in the name of its author; a webhook's messages are the workspace's.
    /// Doing so again for the same two does nothing.
    ///
    /// # Errors
    /// When the action cannot be invoked, or storage is away.
    pub(crate) async fn invoke_for_message(
        &self,
        scope: WorkspaceScope,
        trigger: &TriggerRow,
        message: &MessageRow,
    ) -> EngineResult<()> {
        if is_reserved(&trigger.action_name) {
            return Err(EngineError::ActionNotFound);
        }
        let trigger_id = TriggerId::new(trigger.trigger_id);
        let author = self.store().agent(scope, AgentId::new(message.agent_id)).await?;
        let caller = author.map(|agent| AgentCaller {
            scope,
            agent_id: agent.agent_id,
            name: agent.name.into(),
            kind: agent.kind,
            token_generation: 0,
        });
        let input = json!({
            "trigger_id": trigger_id,
            "message_id": message.message_id.to_string(),
            "channel": message.channel_name,
            "channel_id": message.channel_id.to_string(),
            "thread_id": message.thread_id.map(|id| id.to_string()),
            "agent_id": message.agent_id.to_string(),
            "agent_name": message.agent_name,
            "text": message.text,
            "mentions": message.mentions,
            "created_at": message.created_at.to_rfc3339_opts(SecondsFormat::Millis, true),
        });
        let key = (
            Sha256::digest(format!("trigger {trigger_id} {}", message.message_id)).into(),
            // The text may have been edited since: it is the same message all the same.
            [0; 32],
        );
        let request =
            InvokeAction { name: trigger.action_name.clone(), node: None, input: Some(input), durable: false };
        self.invoke_defined(scope, caller.as_ref(), request, Some(key)).await.map(drop)
    }
}

/// Kept as given; nothing in it is the same as none.
fn checked_channel(channel: Option<String>) -> EngineResult<Option<String>> {
    let Some(channel) = channel.filter(|channel| !channel.is_empty()) else { return Ok(None) };
    if is_channel_name(strip_hash(&channel)) { Ok(Some(channel)) } else { Err(EngineError::InvalidChannelName) }
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
    fn what_is_no_expression_is_plain_text() {
        for (pattern, text, expected) in [
            ("^deploy\\b", "deploy it", true),
            ("^deploy\\b", "please deploy it", false),
            ("deploy", "please deploy it", true),
            ("(?i)DEPLOY", "please deploy it", true),
            ("what?(", "so what?(", true),
            ("what?(", "what", false),
            ("a.c", "abc", true),
        ] {
            assert_eq!(Pattern::read(pattern).unwrap().is_in(text), expected, "{pattern} in {text}");
        }
    }

    #[test]
    fn a_pattern_that_explodes_is_refused() {
        assert!(Pattern::read("(?:a{1000}){1000}").is_err());
        assert!(checked_pattern(Some("x".repeat(MAX_PATTERN_BYTES + 1))).is_err());
        assert_eq!(checked_pattern(Some(String::new())).unwrap(), None);
    }
}
