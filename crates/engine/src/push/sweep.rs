//! Sweep of http_push mailboxes that no worker serves: their worker crashed, or their hint was lost.

use std::time::Duration;

use crate::{Engine, EngineResult, tick::TickOutcome};

/// Runs one step over the mailboxes of http_push nodes. Its lag is the longest wait of a due mailbox for a worker.
pub async fn sweep_mailboxes(engine: &Engine) -> EngineResult<TickOutcome> {
    let swept = engine.store().sweep_push_mailboxes().await?;
    if swept.released > 0 {
        tracing::info!(mailboxes = swept.released, "mailboxes were released from an expired worker");
    }
    let lag = Duration::from_secs_f64(engine.store().push_lag().await?);
    Ok(TickOutcome { worked: swept.released + swept.repaired, more: swept.more, lag: Some(lag) })
}
