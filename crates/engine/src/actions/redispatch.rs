//! Open invocations without progress.

use crate::{Engine, EngineResult, tick::TickOutcome};

/// Takes back invocations of lost nodes, fails hopeless ones, and places waiting ones.
pub async fn redispatch_lost_invocations(engine: &Engine) -> EngineResult<TickOutcome> {
    let (worked, more) = engine.actions().process_open_invocations().await?;
    Ok(TickOutcome { worked, more, lag: None })
}
