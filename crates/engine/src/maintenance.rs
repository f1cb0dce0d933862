//! Housekeeping: partitions, redundant settlements, old rows, statistics of tables that have grown.

use std::time::Duration;

use chrono::TimeDelta;
use relay_domain::workspaces::rate_limit::WINDOW_SECONDS;
pub use relay_store::maintenance::grown_tables::AnalyzedTables;
use relay_store::maintenance::partitions::DailyTable;

use crate::{Engine, EngineResult, access::reencryption, tick::TickOutcome};

/// Retention of rows. Lowering a value frees disk space at the next tick and cannot be undone.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// Days of deliveries and ack log, not counting today. At least 8: the longest TTL is 6 days, and every expired row
    /// must become a dead letter before it is dropped.
    pub delivery_days: u32,
    /// Days of messages, not counting today. At least as many as of deliveries, which refer to them.
    pub message_days: u32,
    /// Days of the event log, not counting today.
    pub event_days: u32,
    /// Bound of each workspace's event log.
    pub workspace_events: u32,
}

impl Retention {
    /// Minimum retention of deliveries, in days.
    pub const LEAST_DAYS: u32 = 8;
}

impl Default for Retention {
    fn default() -> Self {
        Self { delivery_days: Self::LEAST_DAYS, message_days: 90, event_days: 7, workspace_events: 1_000_000 }
    }
}

/// Partitions are created this many days ahead, so that workers may be down for a week.
const DAYS_AHEAD: i32 = 7;
/// Days of attempts, not counting today. A delivery lives for six at most.
const ATTEMPT_DAYS: u32 = 7;
/// Days of usage by the minute, not counting today: a quarter of a year can be billed.
const USAGE_DAYS: u32 = 92;
const COMPACTION_PAGE: i64 = 2000;
const PRUNE_BATCH_SIZE: i64 = 1000;
/// Idempotency keys replay their response for a day.
const IDEMPOTENCY_KEYS_KEPT: Duration = Duration::from_secs(24 * 3600);
/// A batch with an unknown commit outcome is submitted again within seconds; 15 minutes are ample.
const PUBLISHED_BATCHES_KEPT: Duration = Duration::from_secs(15 * 60);
/// Records of the change feed. A reader whose last read is older compares everything instead.
pub const CHANGES_KEPT: Duration = Duration::from_secs(10 * 60);
/// A record is small and has one index: ten times as many as other rows cost as much.
const CHANGES_BATCH_SIZE: i64 = 10_000;
/// Session events are for debugging of recent sessions.
const SESSION_EVENTS_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// A deleted file is reported as deleted for this long.
const DELETED_FILES_KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
/// A finished redrive can be read for this long.
const REDRIVES_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Outcomes of invocations can be read for this long. Longer than any delivery of them lives.
const INVOCATIONS_KEPT: Duration = Duration::from_secs(8 * 24 * 3600);
/// An unused worker number keeps its last owner's name this long, for inspection.
const WORKER_IDS_KEPT: Duration = Duration::from_secs(3600);
/// A revoked observer token is listed this long, and longer while a text of it could still verify.
const REVOKED_TOKENS_KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
/// The text of an active observer token is renewed this long before its end: a month without workers ends none.
const TOKENS_RENEWED_BEFORE: Duration = Duration::from_secs(30 * 24 * 3600);
/// Claim counts are needed as long as a delivery can live.
const CLAIMS_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Rate limits of past minutes, with room for clock differences.
const MINUTES_KEPT: i64 = 10;

/// Deliveries of subscriptions are kept a day longer than the events, since a replay must know them.
fn calls_kept(retention: Retention) -> Duration {
    Duration::from_secs(u64::from(retention.event_days + 2) * 24 * 3600)
}

/// Earlier versions of messages are kept a day longer than the events that refer to them.
fn edits_kept(retention: Retention) -> Duration {
    Duration::from_secs(u64::from(retention.event_days + 2) * 24 * 3600)
}

/// Creates partitions ahead of time, then drops those past their retention.
pub async fn maintain_partitions(engine: &Engine, retention: Retention) -> EngineResult<TickOutcome> {
    let store = engine.store();
    let made = store.ensure_partitions(DAYS_AHEAD).await?;
    let today = engine.now().date_naive();
    let first_kept = |days: u32| today - TimeDelta::days(days.into());
    let mut dropped = 0;
    // Those without dependent rows come first: a slow removal of other rows must not keep them from being dropped.
    dropped += store.drop_partitions_before(DailyTable::EventLog, first_kept(retention.event_days)).await?;
    dropped += store.drop_partitions_before(DailyTable::Attempts, first_kept(ATTEMPT_DAYS)).await?;
    dropped += store.drop_partitions_before(DailyTable::Usage, first_kept(USAGE_DAYS)).await?;
    dropped += store.drop_partitions_before(DailyTable::MessageSearch, first_kept(retention.message_days)).await?;
    // Read receipts must outlive the deliveries that they are derived from, and deliveries their expiry.
    if let (Some(unfolded), Some(unexpired)) = (store.first_unfolded_day().await?, store.first_unexpired_day().await?) {
        let first_kept = first_kept(retention.delivery_days).min(unfolded).min(unexpired);
        for table in [DailyTable::Deliveries, DailyTable::AckLog] {
            dropped += store.drop_partitions_before(table, first_kept).await?;
        }
    }
    dropped += store.drop_partitions_before(DailyTable::Messages, first_kept(retention.message_days)).await?;
    if made > 0 || dropped > 0 {
        tracing::info!(made_count = made, dropped_count = dropped, "partitions changed");
    }
    Ok(TickOutcome { worked: u64::from(made.unsigned_abs()) + u64::from(dropped), more: false, lag: None })
}

/// Analyzes the tables that have grown to a multiple of their size at the last statistics.
pub async fn analyze_grown_tables(engine: &Engine, analyzed: &mut AnalyzedTables) -> EngineResult<TickOutcome> {
    let worked = engine.store().analyze_grown_tables(analyzed).await?;
    Ok(TickOutcome { worked, ..TickOutcome::default() })
}

/// Runs one step over the settlements.
pub async fn compact_settlements(engine: &Engine) -> EngineResult<TickOutcome> {
    let done = engine.store().compact_settlements(COMPACTION_PAGE).await?;
    Ok(TickOutcome { worked: done.removed + done.extended, more: done.more, lag: None })
}

/// Removes old rows, renews observer tokens, and re-encrypts secrets of former keys.
pub async fn prune_rows(engine: &Engine, retention: Retention) -> EngineResult<TickOutcome> {
    let store = engine.store();
    let keys = store.prune_idempotency_keys(IDEMPOTENCY_KEYS_KEPT, PRUNE_BATCH_SIZE).await?;
    let batches = store.prune_outbox(PUBLISHED_BATCHES_KEPT, PRUNE_BATCH_SIZE).await?;
    let changes = store.prune_changes(CHANGES_KEPT, CHANGES_BATCH_SIZE).await?;
    let workers = store.prune_worker_ids(WORKER_IDS_KEPT).await?;
    let this_minute = engine.now().timestamp().div_euclid(WINDOW_SECONDS);
    let budgets = store.prune_rate_limits(this_minute - MINUTES_KEPT, PRUNE_BATCH_SIZE).await?;
    let events = store.prune_events(retention.workspace_events.into(), PRUNE_BATCH_SIZE).await?;
    let reports = store.prune_session_events(SESSION_EVENTS_KEPT, PRUNE_BATCH_SIZE).await?;
    let files = store.prune_files(DELETED_FILES_KEPT, PRUNE_BATCH_SIZE).await?;
    let invocations = store.prune_invocations(INVOCATIONS_KEPT, PRUNE_BATCH_SIZE).await?;
    let tokens = store.prune_observer_tokens(REVOKED_TOKENS_KEPT, PRUNE_BATCH_SIZE).await?;
    let renewed = store.renew_observer_tokens(TOKENS_RENEWED_BEFORE, PRUNE_BATCH_SIZE).await?;
    let called = store.prune_subscription_deliveries(calls_kept(retention), PRUNE_BATCH_SIZE).await?;
    let bodies = store.prune_subscription_bodies(calls_kept(retention), PRUNE_BATCH_SIZE).await?;
    let redrives = store.prune_redrives(REDRIVES_KEPT, PRUNE_BATCH_SIZE).await?;
    let claims = store.prune_claims(CLAIMS_KEPT, PRUNE_BATCH_SIZE).await?;
    let edits = store.prune_message_edits(edits_kept(retention), PRUNE_BATCH_SIZE).await?;
    let (sealed, more_sealed) = reencryption::reencrypt_step(engine).await?;
    // Deliveries refer to messages, and a redrive on their last day lives for six more.
    let least_days = i32::try_from(retention.delivery_days + 6).unwrap_or(i32::MAX);
    let messages = store.prune_old_messages(engine.now().date_naive(), least_days, PRUNE_BATCH_SIZE).await?;
    let done = [
        keys,
        batches,
        budgets,
        events,
        reports,
        files,
        invocations,
        tokens,
        called,
        bodies,
        redrives,
        claims,
        edits,
        renewed,
    ];
    let more_changes = changes >= CHANGES_BATCH_SIZE.unsigned_abs();
    let more = more_sealed
        || more_changes
        || messages.more
        || done.iter().any(|done| *done >= PRUNE_BATCH_SIZE.unsigned_abs());
    Ok(TickOutcome {
        worked: workers + sealed + messages.removed + changes + done.iter().sum::<u64>(),
        more,
        lag: None,
    })
}
