//! Workspaces that ended long ago are erased: what retention by the day does not reach goes here.

use std::time::Duration;

use super::Ticked;
use crate::{Engine, EngineResult};

/// A workspace that was deleted, or that expired, this long ago is erased. JetStream has nothing of it by then: it keeps 70 minutes.
const ENDED_FOR: Duration = Duration::from_secs(30 * 24 * 3600);
/// Rows removed in one tick, or some more: a batch is never cut.
const ROWS_PER_TICK: u64 = 20_000;

/// One step of the erasure of the workspace that ended first. The next step of a large one waits for the next tick; small ones go one
/// after the other, so that many that live for minutes do not pile up.
pub(super) async fn tick(engine: &Engine) -> EngineResult<Ticked> {
    let store = engine.store();
    let Some(ended) = store.ended_workspace(ENDED_FOR).await? else { return Ok(Ticked::default()) };
    let workspace = ended.scope.workspace_id();
    if let Some(at) = ended.expired_at {
        // As if it had been deleted when it expired: its tokens go, and its files, before its rows.
        store.delete_workspace(ended.scope, at).await?;
        tracing::info!(workspace.id = %workspace, "a workspace that expired long ago was deleted");
        return Ok(Ticked { worked: 1, more: true, lag: None });
    }
    let step = store.erase_some(ended.scope, ROWS_PER_TICK).await?;
    if step.gone {
        tracing::info!(workspace.id = %workspace, "a workspace that ended long ago was erased");
    }
    let is_small = step.gone || (1..ROWS_PER_TICK).contains(&step.removed);
    Ok(Ticked { worked: step.removed, more: is_small, lag: None })
}
