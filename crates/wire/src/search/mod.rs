//! Bodies of the search route: its query, [`SearchQuery`], and its matches, [`SearchResult`].

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::field::Timestamp;

/// Query of `GET /v1/search`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct SearchQuery {
    /// Search terms: words, quoted phrases, `or`, and `-` for exclusion.
    #[serde(default)]
    pub q: Option<String>,
    /// Only messages in this channel.
    #[serde(default, alias = "in")]
    pub channel: Option<String>,
    /// Only messages of the author with this name.
    #[serde(default)]
    pub from: Option<String>,
    /// Page size: 20 by default, at most 100.
    #[serde(default)]
    pub limit: Option<String>,
    /// Only messages older than this message id.
    #[serde(default)]
    pub before: Option<String>,
    /// Only messages newer than this message id.
    #[serde(default)]
    pub after: Option<String>,
}

/// Message that matches a search.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Found)]
pub struct SearchResult {
    /// The message.
    pub id: String,
    /// Id of the channel.
    pub channel_id: String,
    /// Name of the channel.
    pub channel_name: String,
    /// Id of the conversation; null in a channel.
    pub conversation_id: Option<String>,
    /// Id of the agent.
    pub agent_id: String,
    /// Name of the agent.
    pub agent_name: String,
    /// Id of the message that the thread starts from; null outside of threads.
    pub thread_id: Option<String>,
    /// Text of the message.
    pub text: String,
    /// Time of acceptance.
    pub created_at: Timestamp,
    /// Relevance: higher is better.
    pub relevance_score: f64,
}
