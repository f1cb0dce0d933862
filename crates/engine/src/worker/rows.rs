//! Housekeeping: partitions, redundant exceptions, old rows.

use std::time::Duration;

use chrono::TimeDelta;
use relay_domain::rate::WINDOW_SECONDS;
use relay_store::partitions::DailyTable;

use super::{Retention, Ticked, sealing};
use crate::{Engine, EngineResult};

/// Partitions are made this many days ahead: a worker may be away for a week.
const DAYS_AHEAD: i32 = 7;
/// Days that tries to hand a delivery over are kept, today not counted. A delivery lives for six at most.
const ATTEMPT_DAYS: u32 = 7;
/// Days that usage is kept by the minute, today not counted: a quarter of a year can be accounted for.
const USAGE_DAYS: u32 = 92;
/// Exception rows that one step of the compaction looks at.
const COMPACTION_PAGE: i64 = 2000;
/// Rows that one statement of the pruning removes.
const PRUNED_AT_ONCE: i64 = 1000;
/// A key replays its response for a day.
const IDEMPOTENCY_KEYS_KEPT: Duration = Duration::from_secs(24 * 3600);
/// A batch whose COMMIT was cut off is submitted again within seconds; 15 minutes are ample.
const PUBLISHED_BATCHES_KEPT: Duration = Duration::from_secs(15 * 60);
/// What a session reported is of interest while somebody may still be looking into it.
const SESSION_EVENTS_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// A deleted file still answers that it is deleted for this long.
const DELETED_FILES_KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
/// A redrive that is through can be looked at for this long.
const REDRIVES_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// What came of an invocation can be read for this long. Longer than any delivery of its outcome lives.
const INVOCATIONS_KEPT: Duration = Duration::from_secs(8 * 24 * 3600);
/// An unused worker number keeps its last owner's name this long, for people who look.
const WORKER_IDS_KEPT: Duration = Duration::from_secs(3600);
/// A revoked observer token is shown this long, and longer while some string of it could still verify.
const REVOKED_TOKENS_KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
/// How often a delivery was claimed counts as long as a delivery can live.
const CLAIMS_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Request budgets of minutes that are over, with room for clocks that differ.
const MINUTES_KEPT: i64 = 10;

/// What a subscription has had is kept a day longer than the events: a replay must know it.
fn calls_kept(retention: Retention) -> Duration {
    Duration::from_secs(u64::from(retention.event_days + 2) * 24 * 3600)
}

/// What a message said before it was edited is kept a day longer than the events that told it.
fn edits_kept(retention: Retention) -> Duration {
    Duration::from_secs(u64::from(retention.event_days + 2) * 24 * 3600)
}

/// Makes partitions ahead of time, then drops those past their retention.
pub(super) async fn partitions(engine: &Engine, retention: Retention) -> EngineResult<Ticked> {
    let store = engine.store();
    let made = store.ensure_partitions(DAYS_AHEAD).await?;
    let today = engine.now().date_naive();
    let first_kept = |days: u32| today - TimeDelta::days(days.into());
    let mut dropped = 0;
    // Who has read what must outlive the deliveries that tell it.
    if let Some(unfolded) = store.first_unfolded_day().await? {
        for table in [DailyTable::Deliveries, DailyTable::AckLog] {
            let first_kept = first_kept(retention.delivery_days).min(unfolded);
            dropped += store.drop_partitions_before(table, first_kept).await?;
        }
    }
    for table in [DailyTable::Messages, DailyTable::MessageSearch] {
        dropped += store.drop_partitions_before(table, first_kept(retention.message_days)).await?;
    }
    dropped += store.drop_partitions_before(DailyTable::EventLog, first_kept(retention.event_days)).await?;
    dropped += store.drop_partitions_before(DailyTable::Attempts, first_kept(ATTEMPT_DAYS)).await?;
    dropped += store.drop_partitions_before(DailyTable::Usage, first_kept(USAGE_DAYS)).await?;
    if made > 0 || dropped > 0 {
        tracing::info!(made_count = made, dropped_count = dropped, "partitions changed");
    }
    Ok(Ticked { worked: u64::from(made.unsigned_abs()) + u64::from(dropped), more: false, lag: None })
}

/// One step over the exceptions.
pub(super) async fn compaction(engine: &Engine) -> EngineResult<Ticked> {
    let done = engine.store().compact_exceptions(COMPACTION_PAGE).await?;
    Ok(Ticked { worked: done.removed + done.extended, more: done.more, lag: None })
}

/// Removes old rows, and the last of what former keys have sealed.
pub(super) async fn pruning(engine: &Engine, retention: Retention) -> EngineResult<Ticked> {
    let store = engine.store();
    let keys = store.prune_idempotency_keys(IDEMPOTENCY_KEYS_KEPT, PRUNED_AT_ONCE).await?;
    let batches = store.prune_outbox(PUBLISHED_BATCHES_KEPT, PRUNED_AT_ONCE).await?;
    let workers = store.prune_worker_ids(WORKER_IDS_KEPT).await?;
    let this_minute = engine.now().timestamp().div_euclid(WINDOW_SECONDS);
    let budgets = store.prune_rate_budgets(this_minute - MINUTES_KEPT, PRUNED_AT_ONCE).await?;
    let events = store.prune_events(retention.workspace_events.into(), PRUNED_AT_ONCE).await?;
    let reports = store.prune_session_events(SESSION_EVENTS_KEPT, PRUNED_AT_ONCE).await?;
    let files = store.prune_files(DELETED_FILES_KEPT, PRUNED_AT_ONCE).await?;
    let invocations = store.prune_invocations(INVOCATIONS_KEPT, PRUNED_AT_ONCE).await?;
    let tokens = store.prune_observer_tokens(REVOKED_TOKENS_KEPT, PRUNED_AT_ONCE).await?;
    let called = store.prune_subscription_deliveries(calls_kept(retention), PRUNED_AT_ONCE).await?;
    let redrives = store.prune_redrives(REDRIVES_KEPT, PRUNED_AT_ONCE).await?;
    let claims = store.prune_claims(CLAIMS_KEPT, PRUNED_AT_ONCE).await?;
    let edits = store.prune_message_edits(edits_kept(retention), PRUNED_AT_ONCE).await?;
    let (sealed, more_sealed) = sealing::step(engine).await?;
    // Deliveries refer to messages, and what is sent again on its last day lives for six more.
    let least_days = i32::try_from(retention.delivery_days + 6).unwrap_or(i32::MAX);
    let messages = store.prune_old_messages(engine.now().date_naive(), least_days, PRUNED_AT_ONCE).await?;
    let removed =
        [keys, batches, budgets, events, reports, files, invocations, tokens, called, redrives, claims, edits];
    let more = more_sealed || messages.more || removed.iter().any(|removed| *removed >= PRUNED_AT_ONCE.unsigned_abs());
    Ok(Ticked { worked: workers + sealed + messages.removed + removed.iter().sum::<u64>(), more, lag: None })
}
