//! Adds up what workspaces use.

use super::Ticked;
use crate::{Engine, EngineResult};

/// Workspaces that one step looks at.
const WORKSPACES_AT_ONCE: i64 = 500;

/// One step of the round over all workspaces, once a minute is over. It lags when a minute stays uncounted for longer.
pub(super) async fn tick(engine: &Engine) -> EngineResult<Ticked> {
    let done = engine.store().roll_up_usage(engine.now(), WORKSPACES_AT_ONCE).await?;
    let lag = done.behind.map(|behind| (behind - chrono::TimeDelta::minutes(1)).to_std().unwrap_or_default());
    Ok(Ticked { worked: done.workspaces, more: done.more, lag })
}
