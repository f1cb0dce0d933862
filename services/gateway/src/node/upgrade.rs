//! The upgrade: refusals happen before it, as plain HTTP statuses, because clients' retries go by them.

use axum::{
    extract::{
        State,
        ws::{WebSocketUpgrade, rejection::WebSocketUpgradeRejection},
    },
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    response::{IntoResponse, Response},
};
use relay_domain::token::TokenKind;
use relay_engine::{EngineError, auth::Credential};
use serde::Deserialize;

use super::connection;
use crate::{error::ApiError, extract::Query, state::AppState};

/// Frames above this are not taken: the connection closes with 1009.
pub(super) const FRAME_LIMIT: usize = 1024 * 1024;
/// Frames above this are not even read to their end. In between, the client gets an orderly close.
const READ_LIMIT: usize = 8 * 1024 * 1024;
/// Read and write buffers per socket: small, since most sockets are idle.
const SOCKET_BUFFER: usize = 4 * 1024;

/// The token may travel in the query; it is never logged.
#[derive(Deserialize)]
pub(super) struct Credentials {
    #[serde(default)]
    token: Option<String>,
}

/// `GET /v1/node/ws`.
pub(super) async fn upgrade(
    State(state): State<AppState>,
    Query(query): Query<Credentials>,
    headers: HeaderMap,
    socket: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let Ok(socket) = socket else {
        return Ok((StatusCode::UPGRADE_REQUIRED, "Upgrade to a WebSocket").into_response());
    };
    let token = query
        .token
        .filter(|token| !token.is_empty())
        .or_else(|| bearer(&headers))
        .ok_or_else(|| ApiError::unauthorized("unauthorized", "Missing node token"))?;
    if TokenKind::of(&token) != Some(TokenKind::Node) {
        return Err(ApiError::unauthorized("unauthorized", "Invalid node token format"));
    }
    if state.shutdown.is_asked() {
        return Err(ApiError::unavailable("workspace_busy", "This gateway is draining, try again"));
    }
    let Credential::Node(node) = state.engine.authenticate(&token).await? else {
        return Err(EngineError::UnknownToken { kind: TokenKind::Node }.into());
    };
    let direct = state
        .engine
        .is_direct_node(node.scope, &node.node_id)
        .await?
        .ok_or(EngineError::UnknownToken { kind: TokenKind::Node })?;
    let socket = socket
        .max_message_size(READ_LIMIT)
        .max_frame_size(READ_LIMIT)
        .read_buffer_size(SOCKET_BUFFER)
        .write_buffer_size(SOCKET_BUFFER);
    Ok(socket.on_upgrade(move |socket| connection::serve(socket, state, node, direct)))
}

fn bearer(headers: &HeaderMap) -> Option<String> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    (scheme.eq_ignore_ascii_case("bearer") && !token.trim().is_empty()).then(|| token.trim().to_owned())
}
