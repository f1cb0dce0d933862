//! Aggregation of the usage of workspaces.

use crate::{Engine, EngineResult, tick::TickOutcome};

const BATCH_SIZE: i64 = 500;

/// Runs one step of the round over all workspaces, once a minute is over. It lags when a minute stays uncounted for
/// longer.
pub async fn roll_up_usage(engine: &Engine) -> EngineResult<TickOutcome> {
    let done = engine.store().roll_up_usage(engine.now(), BATCH_SIZE).await?;
    // Negative while less than a minute is uncounted, which is no lag.
    let lag = done.behind.map(|behind| (behind - chrono::TimeDelta::minutes(1)).to_std().unwrap_or_default());
    Ok(TickOutcome { worked: done.workspaces, more: done.more, lag })
}
