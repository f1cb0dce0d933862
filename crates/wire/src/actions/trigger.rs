//! Request and response bodies of the trigger routes.

use relay_domain::{AgentId, ChannelId, JsonText, MessageId, TriggerId, actions::trigger};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::field::{Id, Timestamp, present};

/// Body of `POST /v1/triggers`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateTriggerBody {
    /// Only messages in this channel; a leading `#` is ignored.
    #[serde(default)]
    #[schema(example = "#general")]
    pub channel: Option<String>,
    /// Only texts that match this regular expression, or contain it if it is not a valid one.
    #[serde(default)]
    #[schema(max_length = 512, example = "^deploy\\b")]
    pub pattern: Option<String>,
    /// Only messages that mention this agent, or any for `true`.
    #[serde(default)]
    pub mention: Option<MentionFilter>,
    /// Name of the action to invoke.
    #[schema(example = "deploy")]
    pub action_name: String,
    /// `true` (default) enables the trigger.
    #[serde(default)]
    pub enabled: Option<bool>,
    /// Minimum time between two invocations, in seconds; matches within it invoke nothing. 0 by default: none.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 86_400)]
    pub min_interval_seconds: Option<i32>,
}

/// Body of `PATCH /v1/triggers/:id`. Absent fields keep their value; null removes a filter.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateTriggerBody {
    /// Only messages in this channel; null removes the filter.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>, example = "#general")]
    pub channel: Option<Option<String>>,
    /// Only matching texts; null removes the filter.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>, max_length = 512, example = "^deploy\\b")]
    pub pattern: Option<Option<String>>,
    /// Only messages that mention this agent, or any for `true`; null removes the filter.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<MentionFilter>)]
    pub mention: Option<Option<MentionFilter>>,
    /// Name of the action to invoke.
    #[serde(default)]
    #[schema(example = "deploy")]
    pub action_name: Option<String>,
    /// `true` enables the trigger.
    #[serde(default)]
    pub enabled: Option<bool>,
    /// Minimum time between two invocations, in seconds; 0 for none.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 86_400)]
    pub min_interval_seconds: Option<i32>,
}

/// Condition of a trigger on mentions, as a boolean or as the name of an agent.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged, expecting = "mention must be true, false or the name of an agent")]
pub enum MentionFilter {
    /// `true`: messages that mention at least one agent. `false`: any message.
    Any(bool),
    /// Messages that mention this agent; a leading `@` is ignored.
    #[schema(example = "lead")]
    Agent(String),
}

impl MentionFilter {
    /// Reads the condition. An empty name is none.
    #[must_use]
    pub fn into_condition(self) -> Option<trigger::MentionFilter> {
        match self {
            Self::Any(false) => Some(trigger::MentionFilter::Unrestricted),
            Self::Any(true) => Some(trigger::MentionFilter::AnyAgent),
            Self::Agent(name) if name.is_empty() => None,
            Self::Agent(name) => Some(trigger::MentionFilter::Agent(name)),
        }
    }
}

impl From<trigger::MentionFilter> for MentionFilter {
    fn from(condition: trigger::MentionFilter) -> Self {
        match condition {
            trigger::MentionFilter::Unrestricted => Self::Any(false),
            trigger::MentionFilter::AnyAgent => Self::Any(true),
            trigger::MentionFilter::Agent(name) => Self::Agent(name),
        }
    }
}

/// Trigger: invokes an action once for each matching message.
#[derive(Debug, Serialize, ToSchema)]
pub struct Trigger {
    /// Id of the trigger.
    #[schema(value_type = String, example = "trg_243812004871278592")]
    pub id: TriggerId,
    /// Only messages in this channel.
    #[schema(example = "#general")]
    pub channel: Option<String>,
    /// Only texts that match this pattern.
    #[schema(example = "^deploy\\b")]
    pub pattern: Option<String>,
    /// Only messages that mention this agent, or any for `true`; in the form that was given.
    pub mention: Option<MentionFilter>,
    /// Name of the invoked action.
    #[schema(example = "deploy")]
    pub action_name: String,
    /// `true` while the trigger is enabled.
    pub enabled: bool,
    /// Minimum time between two invocations, in seconds; absent for none.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(required = false)]
    pub min_interval_seconds: i32,
    /// Time of the latest match.
    pub last_triggered_at: Option<Timestamp>,
    /// Error of the latest match, if it invoked nothing.
    pub last_error: Option<String>,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time of the last change.
    pub updated_at: Option<Timestamp>,
    /// Id of the agent that created it; absent for the workspace key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Id>, nullable = false)]
    pub created_by: Option<AgentId>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(seconds: &i32) -> bool {
    *seconds == 0
}

/// Input of the action that a trigger invokes. The fields beside `message` are those of earlier versions.
#[derive(Debug, Serialize)]
pub struct TriggerInput<'a> {
    /// Id of the trigger.
    pub trigger_id: TriggerId,
    /// The message that it matched; absent if both copies of a long text exceed the bound of an input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<TriggerMessage<'a>>,
    /// Id of the message that it matched.
    pub message_id: MessageId,
    /// Name of the message's channel.
    pub channel: &'a str,
    /// Id of the message's channel.
    pub channel_id: ChannelId,
    /// Root of the message's thread, for replies.
    pub thread_id: Option<MessageId>,
    /// Id of the author.
    pub agent_id: AgentId,
    /// Name of the author.
    pub agent_name: &'a str,
    /// Text of the message.
    pub text: &'a str,
    /// Names mentioned in the text.
    pub mentions: &'a [String],
    /// Time of acceptance of the message.
    pub created_at: Timestamp,
}

/// Message in the input of a trigger's action.
#[derive(Debug, Serialize)]
pub struct TriggerMessage<'a> {
    /// Id of the message.
    pub id: MessageId,
    /// Id of its channel.
    pub channel_id: ChannelId,
    /// Name of its channel.
    pub channel_name: &'a str,
    /// Id of its author.
    pub agent_id: AgentId,
    /// Name of its author.
    pub agent_name: &'a str,
    /// Its text.
    pub text: &'a str,
    /// Names mentioned in the text.
    pub mentions: &'a [String],
    /// Data of its author.
    pub metadata: JsonText,
    /// Time of its acceptance.
    pub created_at: Timestamp,
}
