//! Usage of a workspace, for its tenant.

use axum::extract::State;
use relay_domain::workspaces::usage::{Granularity, UsageBucket};
use relay_engine::{Engine, workspaces::usage::UsageQuery};
use relay_wire::workspaces::usage as wire;

use crate::{
    caller::{Reader, reads},
    envelope::Reply,
    error::ApiError,
    extract::Query,
};

/// Shows the usage of the workspace by minute, hour or day.
///
/// At most 1500 buckets; empty ones are omitted. Minutes are kept for 92 days. A token that names agents is refused.
#[utoipa::path(
    get, path = "/v1/workspace/usage", tag = "workspaces",
    security(("workspace_key" = []), ("observer_token" = [])), params(wire::UsageQuery),
    responses(
        (status = 200, body = wire::WorkspaceUsage),
        (status = 403, description = "insufficient_scope"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.workspace.usage", skip_all)]
pub async fn usage(
    State(engine): State<Engine>,
    Reader(caller): Reader<{ reads::ACTIVITY }>,
    Query(query): Query<wire::UsageQuery>,
) -> Result<Reply<wire::WorkspaceUsage>, ApiError> {
    let granularity = query.granularity.map(|granularity| match granularity {
        wire::Granularity::Minute => Granularity::Minute,
        wire::Granularity::Hour => Granularity::Hour,
        wire::Granularity::Day => Granularity::Day,
    });
    let usage_query = UsageQuery { since: query.since, until: query.until, granularity };
    let report = engine.workspaces().usage(&caller, usage_query).await?;
    Ok(Reply::ok(wire::WorkspaceUsage {
        granularity: match report.granularity {
            Granularity::Minute => wire::Granularity::Minute,
            Granularity::Hour => wire::Granularity::Hour,
            Granularity::Day => wire::Granularity::Day,
        },
        since: report.since.into(),
        until: report.until.into(),
        final_until: report.final_until.map(Into::into),
        usage: report.usage.into_iter().map(to_usage_bucket).collect(),
    }))
}

fn to_usage_bucket(usage: UsageBucket) -> wire::UsageBucket {
    wire::UsageBucket {
        at: usage.at.into(),
        messages: usage.messages,
        deliveries: usage.deliveries,
        acked: usage.acked,
        settled: usage.settled,
        dead_letters: usage.dead_letters,
        invocations: usage.invocations,
        push_attempts: usage.push_attempts,
    }
}
