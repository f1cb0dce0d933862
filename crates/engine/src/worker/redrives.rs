//! Redrives by filter: steps of each due redrive, at its rate.

use super::TickOutcome;
use crate::{Engine, EngineResult};

/// Runs some steps. Each is a transaction that moves the redrive on with its letters, so that a crash repeats nothing.
pub(super) async fn tick(engine: &Engine) -> EngineResult<TickOutcome> {
    let (redriven, more, late) = engine.step_redrives().await?;
    Ok(TickOutcome { worked: redriven, more, lag: Some(late) })
}
