//! Housekeeping: partitions, redundant exceptions, old rows.

use std::time::Duration;

use chrono::TimeDelta;
use relay_store::partitions::DailyTable;

use super::{Retention, Ticked};
use crate::{Engine, EngineResult};

/// Partitions are made this many days ahead: a worker may be away for a week.
const DAYS_AHEAD: i32 = 7;
/// Exception rows that one step of the compaction looks at.
const COMPACTION_PAGE: i64 = 2000;
/// Rows that one statement of the pruning removes.
const PRUNED_AT_ONCE: i64 = 1000;
/// A key replays its response for a day.
const IDEMPOTENCY_KEYS_KEPT: Duration = Duration::from_secs(24 * 3600);
/// A batch whose COMMIT was cut off is submitted again within seconds; 15 minutes are ample.
const PUBLISHED_BATCHES_KEPT: Duration = Duration::from_secs(15 * 60);
/// An unused worker number keeps its last owner's name this long, for people who look.
const WORKER_IDS_KEPT: Duration = Duration::from_secs(3600);

/// Makes partitions ahead of time, then drops those past their retention.
pub(super) async fn partitions(engine: &Engine, retention: Retention) -> EngineResult<Ticked> {
    let store = engine.store();
    let made = store.ensure_partitions(DAYS_AHEAD).await?;
    let today = engine.now().date_naive();
    let first_kept = |days: u32| today - TimeDelta::days(days.into());
    let mut dropped = 0;
    for table in [DailyTable::Deliveries, DailyTable::AckLog] {
        dropped += store.drop_partitions_before(table, first_kept(retention.delivery_days)).await?;
    }
    dropped += store.drop_partitions_before(DailyTable::Messages, first_kept(retention.message_days)).await?;
    if made > 0 || dropped > 0 {
        tracing::info!(made_count = made, dropped_count = dropped, "partitions changed");
    }
    Ok(Ticked { worked: u64::from(made.unsigned_abs()) + u64::from(dropped), more: false })
}

/// One step over the exceptions.
pub(super) async fn compaction(engine: &Engine) -> EngineResult<Ticked> {
    let done = engine.store().compact_exceptions(COMPACTION_PAGE).await?;
    Ok(Ticked { worked: done.removed + done.extended, more: done.more })
}

/// Removes old rows.
pub(super) async fn pruning(engine: &Engine) -> EngineResult<Ticked> {
    let store = engine.store();
    let keys = store.prune_idempotency_keys(IDEMPOTENCY_KEYS_KEPT, PRUNED_AT_ONCE).await?;
    let batches = store.prune_outbox(PUBLISHED_BATCHES_KEPT, PRUNED_AT_ONCE).await?;
    let workers = store.prune_worker_ids(WORKER_IDS_KEPT).await?;
    let full = PRUNED_AT_ONCE.unsigned_abs();
    Ok(Ticked { worked: keys + batches + workers, more: keys >= full || batches >= full })
}
