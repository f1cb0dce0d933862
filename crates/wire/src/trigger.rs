//! Bodies of the routes for triggers.

use relay_domain::TriggerId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::field::{Timestamp, present};

/// `POST /v1/triggers`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateTriggerBody {
    /// Only messages in this channel; a leading `#` is understood.
    #[serde(default)]
    #[schema(example = "#general")]
    pub channel: Option<String>,
    /// Only texts that this is found in: a regular expression, or plain text if it is none.
    #[serde(default)]
    #[schema(max_length = 512, example = "^deploy\\b")]
    pub pattern: Option<String>,
    /// Only messages that mention this agent; a leading `@` is understood.
    #[serde(default)]
    #[schema(example = "lead")]
    pub mention: Option<String>,
    /// What is invoked.
    #[schema(example = "deploy")]
    pub action_name: String,
    /// Whether it is. True unless given.
    #[serde(default)]
    pub enabled: Option<bool>,
}

/// `PATCH /v1/triggers/:id`. What is left out stays as it is; null asks for nothing any more.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateTriggerBody {
    /// Only messages in this channel.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>, example = "#general")]
    pub channel: Option<Option<String>>,
    /// Only texts that this is found in.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>, max_length = 512, example = "^deploy\\b")]
    pub pattern: Option<Option<String>>,
    /// Only messages that mention this agent.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>, example = "lead")]
    pub mention: Option<Option<String>>,
    /// What is invoked.
    #[serde(default)]
    #[schema(example = "deploy")]
    pub action_name: Option<String>,
    /// Whether it is.
    #[serde(default)]
    pub enabled: Option<bool>,
}

/// A trigger: each message that matches invokes the action once.
#[derive(Debug, Serialize, ToSchema)]
pub struct Trigger {
    /// The trigger.
    #[schema(value_type = String, example = "trg_243812004871278592")]
    pub id: TriggerId,
    /// Only messages in this channel.
    #[schema(example = "#general")]
    pub channel: Option<String>,
    /// Only texts that this is found in.
    #[schema(example = "^deploy\\b")]
    pub pattern: Option<String>,
    /// Only messages that mention this agent.
    #[schema(example = "lead")]
    pub mention: Option<String>,
    /// What is invoked.
    #[schema(example = "deploy")]
    pub action_name: String,
    /// Whether it is.
    pub enabled: bool,
    /// When a message last matched.
    pub last_triggered_at: Option<Timestamp>,
    /// Why that invoked nothing, if so.
    pub last_error: Option<String>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Option<Timestamp>,
}
