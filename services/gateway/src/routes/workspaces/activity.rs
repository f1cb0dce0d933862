//! Activity, statistics and system prompt of a workspace.

use axum::extract::State;
use relay_domain::{
    ConversationId,
    channels::client_channel_id,
    messages::client_metadata,
    workspaces::activity::{ActivityFilter, ActivityMessage, AuthorStats},
};
use relay_engine::{
    Engine,
    workspaces::{
        Workspaces,
        activity::{ACTIVITY_PAGE, CONSOLE_AGENTS_PAGE, CONSOLE_PAGE},
    },
};
use relay_wire::workspaces::activity as wire;

use crate::{
    caller::{Caller, Reader, WorkspaceKey, reads},
    envelope::Reply,
    error::ApiError,
    extract::{Body, Query},
    list_reply::ListReply,
    routes::page,
};

/// Default and maximum length of a window, in days.
const DAYS: (i64, i64) = (7, 30);

/// Lists the newest messages of the workspace.
#[utoipa::path(
    get, path = "/v1/activity", tag = "workspaces",
    security(("workspace_key" = []), ("observer_token" = [])), params(wire::ActivityQuery),
    responses(
        (status = 200, body = Vec<wire::ActivityItem>),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.activity", skip_all)]
pub async fn activity(
    State(engine): State<Engine>,
    Reader(caller): Reader<{ reads::ACTIVITY }>,
    Query(query): Query<wire::ActivityQuery>,
) -> Result<ListReply<wire::ActivityItem>, ApiError> {
    let limit = page::parse_limit(query.limit.as_deref(), ACTIVITY_PAGE)?;
    let rows = engine.workspaces().activity(&caller, &Default::default(), limit).await?;
    let shown = |row: ActivityMessage| {
        let in_channel = row.conversation_id.is_none();
        wire::ActivityItem {
            kind: if in_channel { "message" } else { "dm" },
            id: row.message_id.to_string(),
            channel_id: in_channel.then(|| row.channel_id.to_string()),
            channel_name: in_channel.then_some(row.channel_name),
            conversation_id: row.conversation_id.map(|id| id.to_string()),
            agent_id: row.agent_id.to_string(),
            agent_name: row.agent_name,
            text: row.text,
            created_at: row.created_at.into(),
        }
    };
    ListReply::list(rows.map(shown))
}

/// Lists messages of the workspace, newest first.
///
/// A filter applies to the newest 20000.
#[utoipa::path(
    get, path = "/v1/console/messages", tag = "workspaces",
    security(("workspace_key" = []), ("observer_token" = [])), params(wire::ConsoleQuery),
    responses(
        (status = 200, body = Vec<wire::ConsoleMessage>),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.console.messages", skip_all)]
pub async fn console_messages(
    State(engine): State<Engine>,
    Reader(caller): Reader<{ reads::CONSOLE }>,
    Query(query): Query<wire::ConsoleQuery>,
) -> Result<ListReply<wire::ConsoleMessage>, ApiError> {
    let filter = Workspaces::parse_activity_filter(
        page::parse_cursor(query.before.as_deref())?,
        query.agent_id.as_deref(),
        query.channel_id.as_deref(),
        query.conversation_id.as_deref(),
        query.delivery_kind.map(|kind| kind == wire::DeliveryKind::Dm),
    );
    let limit = page::parse_limit(query.limit.as_deref(), CONSOLE_PAGE)?;
    // No message passes an invalid filter.
    let (filter, limit) = filter.map_or((ActivityFilter::default(), 0), |filter| (filter, limit));
    ListReply::list(engine.workspaces().activity(&caller, &filter, limit).await?.map(console_message))
}

#[expect(clippy::cast_possible_truncation, reason = "the cast saturates")]
fn console_message(row: ActivityMessage) -> wire::ConsoleMessage {
    let direct = row.conversation_id.is_some();
    wire::ConsoleMessage {
        id: row.message_id.to_string(),
        message_id: row.message_id.to_string(),
        channel_id: client_channel_id(row.channel_id, row.conversation_id.as_ref().map(ConversationId::as_str)),
        channel_name: row.channel_name,
        agent_id: row.agent_id.to_string(),
        agent_name: row.agent_name,
        conversation_id: row.conversation_id.map(|id| id.to_string()),
        delivery_kind: if direct { wire::DeliveryKind::Dm } else { wire::DeliveryKind::Channel },
        thread_id: row.thread_id.map(|id| id.to_string()),
        text: row.text,
        content_type: row.content_type,
        metadata: client_metadata(&row.metadata),
        attachment_count: row.attachment_count,
        mention_count: row.mention_count,
        latency_ms: row.latency_ms.map(|ms| ms.round() as i64),
        created_at: row.created_at.into(),
    }
}

/// Returns message statistics of the last days, and current totals.
#[utoipa::path(
    get, path = "/v1/console/stats", tag = "workspaces",
    security(("workspace_key" = [])), params(wire::WindowQuery),
    responses(
        (status = 200, body = wire::Stats),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.console.stats", skip_all)]
pub async fn stats(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Query(query): Query<wire::WindowQuery>,
) -> Result<Reply<wire::Stats>, ApiError> {
    let days = window(&query)?;
    let stats = engine.workspaces().stats(caller.scope, days).await?;
    let (posted, now) = (stats.posted, stats.now);
    Ok(Reply::ok(wire::Stats {
        window_days: days,
        since: stats.since.into(),
        total_messages: posted.channel_messages + posted.direct_messages,
        channel_messages: posted.channel_messages,
        dm_messages: posted.direct_messages,
        unique_agents: posted.unique_agents,
        avg_latency_ms: posted.avg_latency_ms.unwrap_or_default(),
        max_latency_ms: posted.max_latency_ms.unwrap_or_default(),
        attachment_count: posted.attachment_count,
        mention_count: posted.mention_count,
        agents: wire::AgentTotals { total: now.agents, online: now.online },
        messages: wire::MessageTotals { total: now.messages, today: posted.messages_today },
        channels: wire::Totals { total: now.channels },
    }))
}

/// Lists the authors with the most messages in the last days.
#[utoipa::path(
    get, path = "/v1/console/agents", tag = "workspaces",
    security(("workspace_key" = [])), params(wire::WindowQuery),
    responses(
        (status = 200, body = Vec<wire::AuthorStats>),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.console.agents", skip_all)]
pub async fn console_agents(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Query(query): Query<wire::WindowQuery>,
) -> Result<Reply<Vec<wire::AuthorStats>>, ApiError> {
    let days = window(&query)?;
    let limit = page::parse_limit(query.limit.as_deref(), CONSOLE_AGENTS_PAGE)?;
    let rows = engine.workspaces().author_stats(caller.scope, days, limit).await?;
    let shown = |row: AuthorStats| wire::AuthorStats {
        agent_id: row.agent_id.to_string(),
        agent_name: row.agent_name,
        message_count: row.channel_messages + row.direct_messages,
        channel_count: row.channel_messages,
        dm_count: row.direct_messages,
        avg_latency_ms: row.avg_latency_ms.unwrap_or_default(),
        last_message_at: row.last_message_at.map(Into::into),
    };
    Ok(Reply::ok(rows.into_iter().map(shown).collect()))
}

/// Sums the costs and tokens that authors stated in their messages' metadata.
#[utoipa::path(
    get, path = "/v1/console/costs", tag = "workspaces",
    security(("workspace_key" = [])), params(wire::WindowQuery),
    responses(
        (status = 200, body = wire::Costs),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.console.costs", skip_all)]
pub async fn costs(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Query(query): Query<wire::WindowQuery>,
) -> Result<Reply<wire::Costs>, ApiError> {
    let days = window(&query)?;
    let mut totals = wire::CostTotals::default();
    let mut agents = Vec::new();
    for row in engine.workspaces().costs(caller.scope, days).await? {
        let of_author = wire::CostTotals {
            total_cost_usd: row.cost_usd,
            prompt_tokens: round_tokens(row.prompt_tokens),
            completion_tokens: round_tokens(row.completion_tokens),
            total_tokens: round_tokens(row.total_tokens),
        };
        totals.total_cost_usd += of_author.total_cost_usd;
        totals.prompt_tokens = totals.prompt_tokens.saturating_add(of_author.prompt_tokens);
        totals.completion_tokens = totals.completion_tokens.saturating_add(of_author.completion_tokens);
        totals.total_tokens = totals.total_tokens.saturating_add(of_author.total_tokens);
        agents.push(wire::AuthorCosts {
            agent_id: row.agent_id.to_string(),
            agent_name: row.agent_name,
            message_count: row.channel_messages + row.direct_messages,
            totals: of_author,
        });
    }
    Ok(Reply::ok(wire::Costs { window_days: days, totals, agents }))
}

#[expect(clippy::cast_possible_truncation, reason = "the cast saturates, and tokens are counted in whole ones")]
fn round_tokens(tokens: f64) -> i64 {
    tokens.round() as i64
}

fn window(query: &wire::WindowQuery) -> Result<u32, ApiError> {
    let days =
        page::parse_limit(query.days.as_deref(), DAYS).map_err(|_| ApiError::invalid_request("days is 1 to 30"))?;
    Ok(u32::try_from(days).unwrap_or(1))
}

/// Shows the workspace's system prompt for agents.
#[utoipa::path(
    get, path = "/v1/workspace/system-prompt", tag = "workspaces",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses(
        (status = 200, body = wire::SystemPrompt),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.workspaces.system_prompt", skip_all)]
pub async fn system_prompt(
    State(engine): State<Engine>,
    Caller(caller): Caller,
) -> Result<Reply<wire::SystemPrompt>, ApiError> {
    let own = engine.workspaces().system_prompt(caller.scope()).await?;
    Ok(Reply::ok(wire::SystemPrompt { prompt: own.prompt, is_default: own.is_default }))
}

/// Sets the workspace's system prompt for agents, or restores the default.
#[utoipa::path(
    put, path = "/v1/workspace/system-prompt", tag = "workspaces",
    security(("workspace_key" = [])), request_body = wire::SystemPromptBody,
    responses(
        (status = 200, body = wire::SystemPrompt),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.workspaces.set_system_prompt", skip_all)]
pub async fn set_system_prompt(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Body(body): Body<wire::SystemPromptBody>,
) -> Result<Reply<wire::SystemPrompt>, ApiError> {
    let text = match (body.reset, body.prompt) {
        (true, _) => None,
        (false, Some(text)) => text,
        (false, None) => return Err(ApiError::invalid_request("prompt or reset is required")),
    };
    let own = engine.workspaces().set_system_prompt(caller.scope, text).await?;
    Ok(Reply::ok(wire::SystemPrompt { prompt: own.prompt, is_default: own.is_default }))
}
