//! Mailboxes as those see them who look at a workspace: where each stands, without what is in it.

use axum::extract::State;
use relay_domain::AgentId;
use relay_engine::{
    Engine,
    mailboxes::{self, MailboxRow},
};
use relay_wire::mailbox as wire;

use crate::{
    caller::{Reader, reads},
    envelope::Reply,
    error::ApiError,
    extract::Query,
    routes::page,
};

/// Lists mailboxes: how far each agent's deliveries go, and how far they are acknowledged.
///
/// In the order of the agents' ids. An observer whose token names agents sees the mailboxes of those.
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
    let limit = page::limit(query.limit.as_deref(), mailboxes::PAGE)?;
    let rows = engine.mailboxes(&caller, after, limit).await?;
    Ok(Reply::ok(rows.into_iter().map(mailbox).collect()))
}

fn mailbox(row: MailboxRow) -> wire::Mailbox {
    wire::Mailbox {
        agent_id: row.agent_id.to_string(),
        agent_name: row.agent_name,
        last_seq: row.last_seq,
        ack_floor: row.ack_floor,
        settled_floor: row.settled_floor,
        lag: row.last_seq - row.settled_floor,
    }
}
