//! Readers of messages, and read positions in channels.

use axum::extract::State;
use relay_engine::Engine;
use relay_wire::messages::reading as wire;

use crate::{
    caller::{Caller, ReaderOrAgent, reads},
    envelope::Reply,
    error::ApiError,
    extract::Path,
};

/// Lists the readers of a message, each once, in the order of reading.
#[utoipa::path(
    get, path = "/v1/messages/{id}/readers", tag = "messages",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses(
        (status = 200, body = Vec<wire::Reader>),
        (status = 404, description = "message_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.messages.readers", skip_all)]
pub async fn readers(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
) -> Result<Reply<Vec<wire::Reader>>, ApiError> {
    let readers = engine.messages().readers(&caller, &id).await?;
    Ok(Reply::ok(
        readers
            .into_iter()
            .map(|row| wire::Reader {
                agent_id: row.agent_id.to_string(),
                agent_name: row.agent_name,
                read_at: row.read_at.into(),
            })
            .collect(),
    ))
}

/// Lists the read position of each member of a channel.
#[utoipa::path(
    get, path = "/v1/channels/{name}/read-status", tag = "channels",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])),
    responses(
        (status = 200, body = Vec<wire::ReadPosition>),
        (status = 404, description = "channel_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.read_status", skip_all)]
pub async fn read_status(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::MESSAGES }>,
    Path(name): Path<String>,
) -> Result<Reply<Vec<wire::ReadPosition>>, ApiError> {
    let positions = engine.messages().read_status(&caller, &name).await?;
    Ok(Reply::ok(
        positions
            .into_iter()
            .map(|row| wire::ReadPosition {
                agent_name: row.agent_name,
                last_read_id: row.last_read_id.map(|id| id.to_string()),
                last_read_at: row.last_read_at.map(Into::into),
            })
            .collect(),
    ))
}
