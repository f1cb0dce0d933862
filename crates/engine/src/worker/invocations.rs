//! Open invocations without progress.

use super::TickOutcome;
use crate::{Engine, EngineResult};

/// Takes back invocations of lost nodes, fails hopeless ones, and places waiting ones.
pub(super) async fn tick(engine: &Engine) -> EngineResult<TickOutcome> {
    let (worked, more) = engine.process_open_invocations().await?;
    Ok(TickOutcome { worked, more, lag: None })
}
