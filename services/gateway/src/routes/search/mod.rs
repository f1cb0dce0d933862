//! Message search. Main type: [`MessageSearch`], the query of the engine.

use axum::extract::State;
use relay_domain::{ConversationId, channels::client_channel_id, search::FoundMessage};
use relay_engine::{
    Engine,
    search::queries::{MessageSearch, SEARCH_PAGE},
};
use relay_wire::search as wire;

use crate::{
    caller::{ReaderOrAgent, reads},
    error::ApiError,
    extract::Query,
    list_reply::ListReply,
    routes::page,
};

/// Searches messages, the best matches first.
///
/// An agent finds messages of channels and of its own conversations. Of more than 1000 matches the newest are ranked.
#[utoipa::path(
    get, path = "/v1/search", tag = "messages",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])), params(wire::SearchQuery),
    responses(
        (status = 200, body = Vec<wire::SearchResult>),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.search", skip_all)]
pub async fn search(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::SEARCH }>,
    Query(query): Query<wire::SearchQuery>,
) -> Result<ListReply<wire::SearchResult>, ApiError> {
    let search = MessageSearch {
        text: query.q.ok_or_else(|| ApiError::invalid_request("q is required"))?,
        channel: query.channel,
        from: query.from,
        before: page::parse_cursor(query.before.as_deref())?,
        after: page::parse_cursor(query.after.as_deref())?,
        limit: page::parse_limit(query.limit.as_deref(), SEARCH_PAGE)?,
    };
    ListReply::list(engine.search().messages(&caller, &search).await?.map(to_found_message))
}

fn to_found_message(row: FoundMessage) -> wire::SearchResult {
    wire::SearchResult {
        id: row.message_id.to_string(),
        channel_id: client_channel_id(row.channel_id, row.conversation_id.as_ref().map(ConversationId::as_str)),
        channel_name: row.channel_name,
        conversation_id: row.conversation_id.map(|id| id.to_string()),
        agent_id: row.agent_id.to_string(),
        agent_name: row.agent_name,
        thread_id: row.thread_id.map(|id| id.to_string()),
        text: row.text,
        created_at: row.created_at.into(),
        relevance_score: row.score.into(),
    }
}
