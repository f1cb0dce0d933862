//! WebSocket upgrade of nodes. Refusals happen before the upgrade, as plain HTTP statuses, which decide how clients
//! retry.

use axum::{
    Extension,
    extract::{
        State,
        ws::{WebSocketUpgrade, rejection::WebSocketUpgradeRejection},
    },
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use futures::FutureExt as _;
use relay_domain::access::token::{TokenHash, TokenKind};
use relay_engine::{
    EngineError,
    access::{callers::Credential, limits::RateLimitSubject},
    error::BadCredential,
};
use relay_runtime::server::ReadGate;
use serde::Deserialize;

use super::connection;
use crate::{
    caller::{SOCKET_PROTOCOL, find_socket_token},
    connections::Client,
    error::ApiError,
    extract::Query,
    state::AppState,
};

/// Larger frames are refused: the connection closes with 1009.
pub(super) const FRAME_LIMIT: usize = 1024 * 1024;
/// Larger frames are refused at their first byte. Of frames between the two limits, what exceeds the first is read and
/// dropped, so that they get an orderly close.
const READ_LIMIT: usize = 8 * 1024 * 1024;
/// Read buffer of each socket. It is allocated from the start, and most sockets are idle; a larger frame gets memory of
/// its own size, and is read in pieces of this size.
const READ_BUFFER: usize = 1024;
/// Bytes of frames that are written together. The buffer takes memory only once there are frames.
const WRITE_BUFFER: usize = 4 * 1024;

/// The token may be in the query, which is never logged.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Credentials {
    /// A node token.
    #[serde(default)]
    token: Option<String>,
}

/// Opens the socket of a node.
///
/// The token goes into the `Authorization` header, into `token`, or into a subprotocol: `relay.v1, relay.token.<token>`.
#[utoipa::path(
    get, path = "/v1/node/ws", operation_id = "node", tag = "sockets", security(("node_token" = [])), params(Credentials),
    responses(
        (status = 101),
        (status = 503, description = "too_many_connections, workspace_suspended, node_drained, workspace_busy"),
        (status = 426, body = String, content_type = "text/plain; charset=utf-8", description = "No upgrade was asked for"),
    ),
)]
pub(crate) async fn upgrade(
    State(state): State<AppState>,
    Query(query): Query<Credentials>,
    headers: HeaderMap,
    client: Client,
    Extension(gate): Extension<ReadGate>,
    socket: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let Ok(socket) = socket else {
        return Ok((StatusCode::UPGRADE_REQUIRED, "Upgrade to a WebSocket").into_response());
    };
    let token = find_socket_token(query.token, &headers).ok_or_else(|| ApiError::unauthorized("Missing node token"))?;
    // By the prefix alone: the token of another kind costs no lookup.
    if TokenKind::from_prefix(&token) != Some(TokenKind::Node) {
        return Err(ApiError::unauthorized("Invalid node token format"));
    }
    if state.shutdown.is_requested() {
        return Err(ApiError::draining());
    }
    let hash = TokenHash::from_token(&token);
    let (access, address) = (state.engine.access(), client.address.limited_ip());
    let node = match access.limit_unknown(&token, address, access.authenticate(&token)).await {
        Ok(Credential::Node(node)) => node,
        Ok(_) => return Err(EngineError::Unauthenticated(BadCredential::UnknownToken { kind: TokenKind::Node }).into()),
        Err(EngineError::WorkspaceSuspended) => return Err(ApiError::socket_suspended()),
        Err(error) => return Err(error.into()),
    };
    let family = state.engine.workspaces().family(node.scope).await;
    // Authentication refuses suspended workspaces; this finds drained nodes, with a code of their own.
    if state.engine.suspensions().is_suspended_or_drained(node.scope, &node.node_id) {
        return Err(ApiError::node_drained());
    }
    // Its agents would receive everything twice: over the socket and by the delivery method of their node.
    if !node.kind.has_socket() {
        return Err(ApiError::node_without_socket());
    }
    let subject = RateLimitSubject::Node(node.node_id.clone());
    // The last check, so that a refused upgrade takes no permit.
    let permit =
        state.connections.nodes.try_acquire(family, node.scope, subject).map_err(ApiError::too_many_connections)?;
    let socket = socket
        .protocols([SOCKET_PROTOCOL])
        .max_message_size(READ_LIMIT)
        .max_frame_size(READ_LIMIT)
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(WRITE_BUFFER);
    let peer = connection::Peer { node, token: hash, gate };
    // A combinator, since an async block would hold the future of the socket twice. The permits end with the socket.
    Ok(socket.on_upgrade(move |socket| {
        connection::serve_socket(socket, state, family, peer).map(move |()| drop((permit, client)))
    }))
}
