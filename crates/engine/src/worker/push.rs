//! Mailboxes that are to be pushed and that nobody serves: their worker died, or the hint that told of them was lost.

use std::time::Duration;

use super::Ticked;
use crate::{Engine, EngineResult};

/// One step over the mailboxes of http_push nodes. It lags by how long a mailbox that is due has waited for a worker.
pub(super) async fn sweep(engine: &Engine) -> EngineResult<Ticked> {
    let swept = engine.store().sweep_push_mailboxes().await?;
    if swept.taken_back > 0 {
        tracing::info!(mailboxes = swept.taken_back, "mailboxes were taken back from a worker that is gone");
    }
    let lag = Duration::from_secs_f64(engine.store().push_lag().await?);
    Ok(Ticked { worked: swept.taken_back + swept.woken, more: swept.more, lag: Some(lag) })
}
