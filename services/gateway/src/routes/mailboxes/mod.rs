//! Mailboxes of a workspace: their positions, without the messages in them. Main types: `Mailbox` of the domain, and
//! `MailboxesQuery` of the wire. The folder also has the routes of deliveries and dead letters.

pub mod dead_letters;
pub mod deliveries;
pub mod inbox;
pub mod insight;

use axum::extract::State;
use relay_domain::{AgentId, mailboxes::Mailbox};
use relay_engine::{Engine, mailboxes::positions};
use relay_wire::mailboxes as wire;

use crate::{
    caller::{Reader, reads},
    envelope::Reply,
    error::ApiError,
    extract::Query,
    routes::page,
};

/// Lists mailboxes with the positions up to which deliveries are written, acked and settled.
///
/// Ordered by agent id. An observer whose token names agents gets only their mailboxes.
#[utoipa::path(
    get, path = "/v1/observe/mailboxes", operation_id = "list_mailboxes", tag = "observers",
    security(("workspace_key" = []), ("observer_token" = [])), params(wire::MailboxesQuery),
    responses((status = 200, body = Vec<wire::Mailbox>), (status = 403, description = "insufficient_scope")),
)]
#[tracing::instrument(level = "debug", name = "http.mailboxes.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    Reader(caller): Reader<{ reads::DELIVERIES }>,
    Query(query): Query<wire::MailboxesQuery>,
) -> Result<Reply<Vec<wire::Mailbox>>, ApiError> {
    let after: Option<AgentId> = query
        .after
        .map(|id| id.parse())
        .transpose()
        .map_err(|_| ApiError::invalid_request("Invalid pagination query"))?;
    let limit = page::parse_limit(query.limit.as_deref(), positions::PAGE)?;
    let rows = engine.mailboxes().list(&caller, after, limit).await?;
    Ok(Reply::ok(rows.into_iter().map(to_mailbox).collect()))
}

fn to_mailbox(row: Mailbox) -> wire::Mailbox {
    wire::Mailbox {
        agent_id: row.agent_id.to_string(),
        agent_name: row.agent_name,
        last_seq: row.last_seq,
        ack_floor: row.ack_floor,
        settled_floor: row.settled_floor,
        lag: row.last_seq - row.settled_floor,
    }
}
