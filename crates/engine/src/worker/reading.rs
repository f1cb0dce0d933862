//! What makes reading cheap: the search index, last-read pointers, and receipts that outlive deliveries.

use std::time::Instant;

use chrono::TimeDelta;

use super::{Retention, Ticked};
use crate::{Engine, EngineResult};

/// Messages that one step puts into the search index.
const INDEXED_AT_ONCE: i64 = 500;
/// While the index is behind, a step is followed by a pause as long as this many steps: the index takes a quarter of
/// one connection's time at most, and falls behind rather than take more from posting. A search reads what is
/// missing from the messages themselves.
const PAUSE_STEPS: u32 = 3;
/// Mailboxes that one step of the pointers looks at.
const MAILBOXES_AT_ONCE: i64 = 2000;
/// Deliveries that one step of the receipts looks at.
const RECEIPTS_AT_ONCE: i64 = 5000;

/// Puts new messages into the search index.
pub(super) async fn search_index(engine: &Engine) -> EngineResult<Ticked> {
    let began = Instant::now();
    let done = engine.store().index_messages(engine.now(), INDEXED_AT_ONCE).await?;
    let more = i64::try_from(done.added).is_ok_and(|added| added >= INDEXED_AT_ONCE);
    if more {
        tokio::time::sleep(began.elapsed() * PAUSE_STEPS).await;
    }
    Ok(Ticked { worked: done.added, more, lag: None })
}

/// Moves last-read pointers up behind the ack floors.
pub(super) async fn pointers(engine: &Engine) -> EngineResult<Ticked> {
    let done = engine.store().fold_read_pointers(MAILBOXES_AT_ONCE).await?;
    Ok(Ticked { worked: done.worked, more: done.more, lag: None })
}

/// Writes receipts for the days that retention drops tomorrow.
pub(super) async fn receipts(engine: &Engine, retention: Retention) -> EngineResult<Ticked> {
    let first_unfolded =
        engine.now().date_naive() - TimeDelta::days(retention.delivery_days.into()) + TimeDelta::days(1);
    let done = engine.store().fold_receipts(first_unfolded, RECEIPTS_AT_ONCE).await?;
    Ok(Ticked { worked: done.worked, more: done.more, lag: None })
}
