//! Read models: the search index, last-read pointers, and receipts that outlive deliveries.

use tokio::time::Instant;

use chrono::TimeDelta;

use relay_store::search::index::IndexedWorkspaces;

use crate::{Engine, EngineResult, maintenance::Retention, tick::TickOutcome};

const INDEX_BATCH_SIZE: i64 = 500;
/// While the index is behind, a step is followed by a pause of this many steps: the index takes a quarter of one
/// connection's time at most, and falls behind rather than take more from posting. Searches read missing messages
/// themselves.
const PAUSE_STEPS: u32 = 3;
/// The same while only workspaces are behind that do not search: a twentieth.
const UNWANTED_PAUSE_STEPS: u32 = 19;
const MAILBOX_BATCH_SIZE: i64 = 2000;
const RECEIPT_BATCH_SIZE: i64 = 5000;

/// Adds new messages to the search index, first those of workspaces that search.
pub async fn index_messages(engine: &Engine) -> EngineResult<TickOutcome> {
    let wanted = index_step(engine, IndexedWorkspaces::Wanted, PAUSE_STEPS).await?;
    if wanted.more {
        return Ok(wanted);
    }
    let all = index_step(engine, IndexedWorkspaces::All, UNWANTED_PAUSE_STEPS).await?;
    Ok(TickOutcome { worked: wanted.worked + all.worked, ..all })
}

/// Runs a step, and pauses if messages are left.
async fn index_step(engine: &Engine, which: IndexedWorkspaces, pause_steps: u32) -> EngineResult<TickOutcome> {
    let began = Instant::now();
    let done = engine.store().index_messages(which, engine.now(), INDEX_BATCH_SIZE).await?;
    let more = i64::try_from(done.added).is_ok_and(|added| added >= INDEX_BATCH_SIZE);
    if more {
        tokio::time::sleep(began.elapsed() * pause_steps).await;
    }
    Ok(TickOutcome { worked: done.added, more, lag: None })
}

/// Moves last-read pointers up to the ack floors.
pub async fn move_read_pointers(engine: &Engine) -> EngineResult<TickOutcome> {
    let done = engine.store().fold_read_pointers(MAILBOX_BATCH_SIZE, engine.now()).await?;
    Ok(TickOutcome { worked: done.worked, more: done.more, lag: None })
}

/// Writes receipts for the days that retention drops tomorrow.
pub async fn write_receipts(engine: &Engine, retention: Retention) -> EngineResult<TickOutcome> {
    let first_unfolded =
        engine.now().date_naive() - TimeDelta::days(retention.delivery_days.into()) + TimeDelta::days(1);
    let done = engine.store().fold_receipts(first_unfolded, RECEIPT_BATCH_SIZE).await?;
    Ok(TickOutcome { worked: done.worked, more: done.more, lag: None })
}
