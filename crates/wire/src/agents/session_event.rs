//! Request and response bodies of the session event routes.

use relay_domain::{AgentId, JsonText, SessionEventId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use crate::field::{Id, Timestamp};

/// Body of `POST /v1/agents/:name/events`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ReportBody {
    /// Event type, `word.word`.
    #[serde(rename = "type")]
    #[schema(example = "tool.called")]
    pub event_type: String,
    /// Payload of the event.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub payload: Option<Map<String, Value>>,
}

/// Query of `GET /v1/agents/:name/events`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// Only events of this type.
    #[serde(default, rename = "type")]
    pub event_type: Option<String>,
    /// Page size: 100 by default; more than 500 are refused.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Session event of an agent.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionEvent {
    /// Id of the event.
    #[schema(value_type = String, example = "evt_243812004871278592")]
    pub id: SessionEventId,
    /// Id of the agent.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// Event type, `word.word`.
    #[serde(rename = "type")]
    #[schema(example = "tool.called")]
    pub event_type: String,
    /// Payload of the event.
    #[schema(value_type = Object)]
    pub payload: JsonText,
    /// Sequence number, from 1 per agent.
    pub sequence: i64,
    /// Time of acceptance.
    pub created_at: Timestamp,
}
