//! Invocations that nobody is doing.

use super::Ticked;
use crate::{Engine, EngineResult};

/// Takes back what lost its node, fails what is hopeless, and tries what waits.
pub(super) async fn tick(engine: &Engine) -> EngineResult<Ticked> {
    let (worked, more) = engine.look_after_invocations().await?;
    Ok(Ticked { worked, more, lag: None })
}
