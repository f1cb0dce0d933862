//! Reactions to messages.

use axum::extract::State;
use relay_engine::Engine;
use relay_wire::messages::{ReactionGroup, reactions as wire};

use crate::{
    caller::{Agent, ReaderOrAgent, reads},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path},
};

/// Adds a reaction to a message. Repeating it has no effect.
#[utoipa::path(
    post, path = "/v1/messages/{id}/reactions", tag = "messages",
    security(("agent_token" = [])), request_body = wire::ReactBody,
    responses(
        (status = 201, body = wire::Reaction),
        (status = 404, description = "message_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.reactions.add", skip_all)]
pub async fn react(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
    Body(body): Body<wire::ReactBody>,
) -> Result<Reply<wire::Reaction>, ApiError> {
    let reaction = engine.messages().add_reaction(&caller, &id, &body.emoji).await?;
    Ok(Reply::created(wire::Reaction {
        id: reaction.id.to_string(),
        message_id: reaction.message_id.to_string(),
        agent_name: caller.name.to_string(),
        emoji: reaction.emoji,
        created_at: reaction.created_at.into(),
    }))
}

/// Removes the caller's reaction; a missing one is not an error.
#[utoipa::path(
    delete, path = "/v1/messages/{id}/reactions/{emoji}", tag = "messages",
    security(("agent_token" = [])),
    responses(
        (status = 204),
        (status = 404, description = "message_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.reactions.remove", skip_all)]
pub async fn unreact(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path((id, emoji)): Path<(String, String)>,
) -> Result<NoContent, ApiError> {
    engine.messages().remove_reaction(&caller, &id, &emoji).await?;
    Ok(NoContent)
}

/// Lists the reactions to a message, the earliest emoji first.
#[utoipa::path(
    get, path = "/v1/messages/{id}/reactions", tag = "messages",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])),
    responses(
        (status = 200, body = Vec<ReactionGroup>),
        (status = 404, description = "message_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.reactions.list", skip_all)]
pub async fn reactions(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::REACTIONS }>,
    Path(id): Path<String>,
) -> Result<Reply<Vec<ReactionGroup>>, ApiError> {
    let counts = engine.messages().reactions(&caller, &id).await?;
    Ok(Reply::ok(
        counts
            .into_iter()
            .map(|row| ReactionGroup { emoji: row.emoji, count: row.count, agents: row.agents })
            .collect(),
    ))
}
