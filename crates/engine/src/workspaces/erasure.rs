//! Erasure of workspaces that ended long ago: rows that daily retention does not reach.

use std::time::Duration;

use crate::{Engine, EngineResult, tick::TickOutcome};

/// Time from the deletion or expiry of a workspace to its erasure. JetStream has nothing of it by then: it keeps 70
/// minutes.
const ENDED_FOR: Duration = Duration::from_secs(30 * 24 * 3600);
/// Rows removed per tick, or some more: a batch is never cut.
const ROWS_PER_TICK: u64 = 20_000;

/// Erases a step of the workspace that ended first. A large one continues with the next tick; small ones follow at
/// once, so that many short-lived workspaces do not pile up.
pub async fn erase_due_workspaces(engine: &Engine) -> EngineResult<TickOutcome> {
    let store = engine.store();
    let Some(ended) = store.find_ended_workspace(ENDED_FOR).await? else { return Ok(TickOutcome::default()) };
    let workspace = ended.scope.workspace_id();
    if let Some(at) = ended.expired_at {
        // As if it had been deleted when it expired: its tokens and files go before its rows.
        store.delete_workspace(ended.scope, at).await?;
        tracing::info!(workspace.id = %workspace, "an expired workspace was deleted");
        return Ok(TickOutcome { worked: 1, more: true, lag: None });
    }
    let step = store.erase_rows(ended.scope, ROWS_PER_TICK).await?;
    if step.complete {
        tracing::info!(workspace.id = %workspace, "an ended workspace was erased");
    }
    let is_small = step.complete || (1..ROWS_PER_TICK).contains(&step.removed);
    Ok(TickOutcome { worked: step.removed, more: is_small, lag: None })
}
