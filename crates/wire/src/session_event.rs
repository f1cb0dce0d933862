//! Bodies of the routes for session events.

use relay_domain::{AgentId, SessionEventId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use crate::field::{Id, Timestamp};

/// `POST /v1/agents/:name/events`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ReportBody {
    /// What happened: `word.word`.
    #[serde(rename = "type")]
    #[schema(example = "tool.called")]
    pub event_type: String,
    /// More about it.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub payload: Option<Map<String, Value>>,
}

/// The query of `GET /v1/agents/:name/events`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// Only events of this type.
    #[serde(default, rename = "type")]
    pub event_type: Option<String>,
    /// How many at most: 100 unless given, never more than 500.
    #[serde(default)]
    pub limit: Option<String>,
}

/// A session event.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionEvent {
    /// The event.
    #[schema(value_type = String, example = "evt_243812004871278592")]
    pub id: SessionEventId,
    /// The agent.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// What happened.
    #[serde(rename = "type")]
    #[schema(example = "tool.called")]
    pub event_type: String,
    /// More about it.
    #[schema(value_type = Object)]
    pub payload: Value,
    /// Its number, from 1 per agent.
    pub sequence: i64,
    /// When it was accepted.
    pub created_at: Timestamp,
}
