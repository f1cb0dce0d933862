//! Redrives by filter: steps of each due redrive, at its rate.

use crate::{Engine, EngineResult, tick::TickOutcome};

/// Runs some steps. Each is a transaction that moves the redrive on with its letters, so that a crash repeats nothing.
pub async fn step_redrives(engine: &Engine) -> EngineResult<TickOutcome> {
    let (redriven, more, late) = engine.mailboxes().step_redrives().await?;
    Ok(TickOutcome { worked: redriven, more, lag: Some(late) })
}
