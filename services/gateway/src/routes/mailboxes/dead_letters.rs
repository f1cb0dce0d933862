//! Dead letters: deliveries that were given up. For holders of the workspace key.

use std::collections::BTreeMap;

use axum::extract::State;
use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    DeliveryId, RedriveId,
    mailboxes::dead_letter::{DeadLetter, Redrive},
};
use relay_engine::{
    Engine, EngineError,
    error::Missing,
    mailboxes::dead_letters::{DeadLetterCount, DeadLetterQuery, PAGE},
};
use relay_wire::mailboxes::dead_letter as wire;

use crate::{
    caller::WorkspaceKey,
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path, Query},
    routes::page,
};

/// Lists dead letters, newest first.
#[utoipa::path(
    get, path = "/v1/dead-letters", operation_id = "list_dead_letters", tag = "deliveries",
    security(("workspace_key" = [])), params(wire::DeadLettersQuery),
    responses((status = 200, body = Vec<wire::DeadLetter>), (status = 404, description = "agent_not_found, delivery_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.dead_letters.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Query(query): Query<wire::DeadLettersQuery>,
) -> Result<Reply<Vec<wire::DeadLetter>>, ApiError> {
    let limit = page::parse_limit(query.limit.as_deref(), PAGE)?;
    let before = query.before.as_deref().map(parse_delivery_id).transpose()?;
    let rows = engine.mailboxes().dead_letters(caller.scope, &query_from_parameters(query), before, limit).await?;
    Ok(Reply::ok(rows.into_iter().map(to_dead_letter).collect()))
}

/// Counts dead letters by reason.
#[utoipa::path(
    get, path = "/v1/dead-letters/summary", operation_id = "count_dead_letters", tag = "deliveries",
    security(("workspace_key" = [])), params(wire::DeadLettersQuery),
    responses((status = 200, body = wire::DeadLetterSummary), (status = 404, description = "agent_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.dead_letters.summary", skip_all)]
pub async fn summary(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Query(query): Query<wire::DeadLettersQuery>,
) -> Result<Reply<wire::DeadLetterSummary>, ApiError> {
    let (total, by_reason) =
        split_count(engine.mailboxes().count_dead_letters(caller.scope, &query_from_parameters(query), false).await?);
    Ok(Reply::ok(wire::DeadLetterSummary { total, by_reason }))
}

/// Shows a dead letter.
#[utoipa::path(
    get, path = "/v1/dead-letters/{id}", operation_id = "get_dead_letter", tag = "deliveries",
    security(("workspace_key" = [])),
    responses((status = 200, body = wire::DeadLetter), (status = 404, description = "delivery_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.dead_letters.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(id): Path<String>,
) -> Result<Reply<wire::DeadLetter>, ApiError> {
    Ok(Reply::ok(to_dead_letter(engine.mailboxes().dead_letter(caller.scope, parse_delivery_id(&id)?).await?)))
}

/// Redrives dead letters: one at once, or those that match a filter in the background.
///
/// A redriven letter is a new delivery at the end of its mailbox. Repeating a redrive delivers nothing twice.
#[utoipa::path(
    post, path = "/v1/dead-letters/redrive", operation_id = "redrive", tag = "deliveries",
    security(("workspace_key" = [])), request_body = wire::RedriveBody,
    responses(
        (status = 200, body = wire::RedriveAnswer),
        (status = 404, description = "agent_not_found, delivery_not_found"),
        (status = 409, description = "delivery_not_redrivable"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.dead_letters.redrive", skip_all)]
pub async fn redrive(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Body(body): Body<wire::RedriveBody>,
) -> Result<Reply<wire::RedriveAnswer>, ApiError> {
    let scope = caller.scope;
    let answer = match (body.delivery_id, body.filter) {
        (Some(id), None) => {
            let id = parse_delivery_id(&id)?;
            if body.dry_run {
                let row = engine.mailboxes().dead_letter(scope, id).await?;
                let by_reason = BTreeMap::from([(row.reason.as_str().to_owned(), 1)]);
                wire::RedriveAnswer::Dry(wire::DryRun { dry_run: true, matched: 1, by_reason })
            } else {
                let (fresh, seq) = engine.mailboxes().redrive_one(scope, id).await?;
                let (delivery_id, redriven_as) = (id.to_string(), fresh.to_string());
                wire::RedriveAnswer::One(wire::Redriven { delivery_id, redriven_as, seq })
            }
        }
        (None, Some(filter)) => {
            let query = query_from_filter(filter, engine.now());
            if body.dry_run {
                let (matched, by_reason) =
                    split_count(engine.mailboxes().count_dead_letters(scope, &query, true).await?);
                wire::RedriveAnswer::Dry(wire::DryRun { dry_run: true, matched, by_reason })
            } else {
                wire::RedriveAnswer::Many(to_redrive(engine.mailboxes().redrive_all(scope, &query, body.rate).await?))
            }
        }
        _ => return Err(ApiError::invalid_request("exactly one of delivery_id and filter is required")),
    };
    Ok(Reply::ok(answer))
}

/// Shows the progress of a redrive by filter.
#[utoipa::path(
    get, path = "/v1/dead-letters/redrives/{id}", operation_id = "get_redrive", tag = "deliveries",
    security(("workspace_key" = [])),
    responses((status = 200, body = wire::Redrive), (status = 404, description = "redrive_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.dead_letters.redrive_progress", skip_all)]
pub async fn progress(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(id): Path<String>,
) -> Result<Reply<wire::Redrive>, ApiError> {
    let id: RedriveId = id.parse().map_err(|_| EngineError::NotFound(Missing::Redrive))?;
    Ok(Reply::ok(to_redrive(engine.mailboxes().redrive(caller.scope, id).await?)))
}

/// Purges the dead letters that match a filter. They are no longer listed and cannot be redriven.
#[utoipa::path(
    post, path = "/v1/dead-letters/purge", operation_id = "purge_dead_letters", tag = "deliveries",
    security(("workspace_key" = [])), request_body = wire::PurgeBody,
    responses((status = 200, body = wire::Purged), (status = 404, description = "agent_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.dead_letters.purge", skip_all)]
pub async fn purge(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Body(body): Body<wire::PurgeBody>,
) -> Result<Reply<wire::Purged>, ApiError> {
    let query = query_from_filter(body.filter, engine.now());
    let purged = if body.dry_run {
        engine.mailboxes().count_dead_letters(caller.scope, &query, false).await?.total.unsigned_abs()
    } else {
        engine.mailboxes().purge_dead_letters(caller.scope, &query).await?
    };
    Ok(Reply::ok(wire::Purged { purged }))
}

/// Purges a dead letter. It is no longer listed and cannot be redriven.
#[utoipa::path(
    delete, path = "/v1/dead-letters/{id}", operation_id = "purge_dead_letter", tag = "deliveries",
    security(("workspace_key" = [])),
    responses((status = 204), (status = 404, description = "delivery_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.dead_letters.purge_one", skip_all)]
pub async fn purge_one(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(id): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.mailboxes().purge_dead_letter(caller.scope, parse_delivery_id(&id)?).await?;
    Ok(NoContent)
}

fn parse_delivery_id(text: &str) -> Result<DeliveryId, ApiError> {
    text.parse().map_err(|_| EngineError::NotFound(Missing::Delivery).into())
}

fn query_from_parameters(query: wire::DeadLettersQuery) -> DeadLetterQuery {
    DeadLetterQuery {
        agent: query.agent,
        node: query.node,
        reason: query.reason,
        from: query.since,
        until: query.until,
    }
}

fn query_from_filter(filter: wire::DeadLetterFilter, now: DateTime<Utc>) -> DeadLetterQuery {
    let aged: Option<DateTime<Utc>> = filter.older_than_seconds.map(|seconds| now - TimeDelta::seconds(seconds.into()));
    DeadLetterQuery {
        agent: filter.agent,
        node: filter.node,
        reason: filter.reason,
        from: filter.since,
        until: [filter.until, aged].into_iter().flatten().min(),
    }
}

fn split_count(count: DeadLetterCount) -> (i64, BTreeMap<String, i64>) {
    (count.total, count.by_reason.into_iter().map(|(reason, count)| (reason.as_str().to_owned(), count)).collect())
}

fn to_redrive(row: Redrive) -> wire::Redrive {
    wire::Redrive {
        redrive_id: row.redrive_id.to_string(),
        status: if row.finished_at.is_some() { "finished" } else { "running" },
        rate: row.rate,
        matched: row.matched,
        redriven: row.redriven,
        refused: row.refused,
        created_at: row.created_at.into(),
        finished_at: row.finished_at.map(Into::into),
    }
}

fn to_dead_letter(row: DeadLetter) -> wire::DeadLetter {
    let id = row.delivery_id();
    let next = DeliveryId { redrive_no: row.redrive_no + 1, ..id };
    wire::DeadLetter {
        delivery_id: id.to_string(),
        message_id: row.source_id.to_string(),
        agent_id: row.agent_id.to_string(),
        agent_name: row.agent_name,
        sender_name: row.sender_name,
        channel_id: row.channel_id.map(|id| id.to_string()),
        node_id: row.node_id.to_string(),
        seq: row.seq,
        reason: row.reason.as_str().to_owned(),
        error: row.error,
        redrive_count: row.redrive_no,
        redriven_as: row.redriven_seq.map(|_| next.to_string()),
        redriven_at: row.redriven_at.map(Into::into),
        created_at: row.created_at.into(),
        expires_at: row.expires_at.into(),
        dead_lettered_at: row.at.into(),
    }
}
