//! Redrives by filter: a slice of each that is due, at its rate.

use super::Ticked;
use crate::{Engine, EngineResult};

/// Some steps. Each is a transaction that moves the redrive on with its letters, so that a crash repeats nothing.
pub(super) async fn tick(engine: &Engine) -> EngineResult<Ticked> {
    let (redriven, more, late) = engine.step_redrives().await?;
    Ok(Ticked { worked: redriven, more, lag: Some(late) })
}
