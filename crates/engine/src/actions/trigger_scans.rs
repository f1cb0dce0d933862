//! Triggers: scans the event log after commits, and invokes the actions of matching messages.
//!
//! A section of a log is claimed, scanned, and released with the reached position. A worker that crashes in between
//! leaves its claim to expire; its invocations are recognized by the idempotency key of (trigger, message), so that
//! each message invokes an action once however often it is scanned.

use std::time::Duration;

use chrono::TimeDelta;
use futures::StreamExt as _;
use relay_domain::{
    MessageId, TriggerId, WorkspaceScope,
    actions::trigger::{Trigger, TriggerFacts, matches_scope},
    events::{
        EventSeq,
        kind::{MESSAGE_CREATED, THREAD_REPLY},
    },
    messages::Message,
};
use relay_store::{actions::triggers::TriggerScan, events::RecordedEvents};
use tokio::time::Instant;

use crate::{
    Engine, EngineError, EngineResult,
    error::{Conflict, Fault, Limit, Missing},
    events::message_events,
    tick::TickOutcome,
};

const WORKSPACE_BATCH_SIZE: i64 = 16;
/// Of them, workspaces of one family at most: half of [`CONCURRENT_SCANS`], because the family matches its patterns one
/// at a time and its scans wait for each other.
const WORKSPACES_OF_FAMILY: i64 = 2;
/// Workspaces scanned at the same time, so that one whose schemas cost much does not hold up the others.
const CONCURRENT_SCANS: usize = 4;
/// Time after which a scan leaves the rest of its events to the next: far below its claim.
const SCAN_TIME: Duration = Duration::from_millis(500);
/// Target number of events of each.
const EVENT_BATCH_SIZE: i64 = 200;
/// Time that a message waits for capacity among the open invocations of its action; other triggers of the workspace
/// wait with it.
const MAX_CAPACITY_WAIT: TimeDelta = TimeDelta::minutes(2);
/// Bound of the invocations of a workspace per tick; the rest of its events waits for the next.
const MAX_FIRED: usize = 100;
/// Memory for the messages of one scan, decoded.
const MATCH_BYTES: usize = 2 * MESSAGE_BYTES;
/// Bound of the messages of one scan.
const MESSAGE_BYTES: usize = 1024 * 1024;
/// Longest wait for that memory; then the workspace is scanned again when its claim ends.
const MEMORY_WAIT: Duration = Duration::from_secs(1);
/// Recorded with a trigger.
const PATTERNS_TOO_COSTLY: &str = "a message was not matched: the patterns of earlier triggers took too long";
/// Claim of a workspace. A worker that takes longer shares the work with others.
const CLAIM_SECONDS: i32 = 10;

struct ScanOutcome {
    /// Number of invocations.
    fired: u64,
    /// Position up to which everything was invoked.
    reached: EventSeq,
    /// True if the next message has to wait, because too many invocations are open.
    waits: bool,
}

/// Scans the new events of some workspaces. A failure in one does not affect the others: its claim expires, and then it
/// is scanned again.
pub async fn scan_triggers(engine: &Engine) -> EngineResult<TickOutcome> {
    let claimed = engine.store().claim_trigger_scans(WORKSPACE_BATCH_SIZE, WORKSPACES_OF_FAMILY, CLAIM_SECONDS).await?;
    let mut done = TickOutcome::default();
    let scans = claimed.into_iter().map(|part| async move { (scan_and_record(engine, &part).await, part) });
    let mut scans = futures::stream::iter(scans).buffer_unordered(CONCURRENT_SCANS);
    while let Some((scanned, part)) = scans.next().await {
        match scanned {
            Ok(scanned) => {
                done.worked += scanned.fired;
                done.more |= scanned.reached < part.newest_seq && !scanned.waits;
            }
            Err(error) => {
                let id = part.scope.workspace_id();
                let error = &error as &dyn std::error::Error;
                tracing::warn!(workspace.id = %id, error, "trigger scan failed, will retry");
            }
        }
    }
    Ok(done)
}

async fn scan_and_record(engine: &Engine, part: &TriggerScan) -> EngineResult<ScanOutcome> {
    let scanned = scan_events(engine, part).await?;
    if scanned.waits {
        // The claim stays: the scan is repeated when the claim expires, and not at once.
        engine.store().record_trigger_progress(part, scanned.reached).await?;
    } else {
        engine.store().finish_trigger_scan(part, scanned.reached).await?;
    }
    Ok(scanned)
}

async fn scan_events(engine: &Engine, part: &TriggerScan) -> EngineResult<ScanOutcome> {
    let through = |fired: u64, reached: EventSeq| ScanOutcome { fired, reached, waits: false };
    let records = engine.store().events_since(part.scope, part.reached_seq, EVENT_BATCH_SIZE).await?;
    let Some(last) = records.last() else {
        // Retention has dropped the events.
        return Ok(through(0, part.newest_seq));
    };
    // A length always fits.
    let mut end = last.first_seq + i64::try_from(last.events.len()).unwrap_or(0) - 1;
    let mut posted = posted_messages(&records, part.reached_seq);
    if posted.is_empty() {
        return Ok(through(0, end));
    }
    let reserved = engine.core().bodies.reserve(engine.core().family(part.scope).await, MATCH_BYTES);
    let Ok(_memory) = tokio::time::timeout(MEMORY_WAIT, reserved).await else {
        return Ok(ScanOutcome { fired: 0, reached: part.reached_seq, waits: true });
    };
    let fitting = engine.store().count_fitting_messages(part.scope, &posted, MESSAGE_BYTES).await?;
    if let Some((later, _)) = posted.get(fitting) {
        end = later - 1;
        posted.truncate(fitting);
    }
    // In their posted version: an edit triggers nothing, and revokes nothing.
    let messages = engine.store().messages_of_events(part.scope, &posted).await?;
    let triggers = engine.store().enabled_triggers(part.scope).await?;
    let mut fired = 0;
    let began = Instant::now();
    for (seq, _) in posted {
        if fired >= MAX_FIRED || began.elapsed() >= SCAN_TIME {
            return Ok(through(fired as u64, seq - 1));
        }
        // The message is no longer kept.
        let Some(message) = messages.get(&seq) else { continue };
        let Some(matching) = matching_triggers(engine, part.scope, &triggers, (seq, message)).await? else {
            return Ok(through(fired as u64, seq - 1));
        };
        if matching.is_empty() || engine.actions().is_produced_by_action(part.scope, message).await? {
            continue;
        }
        for row in matching {
            // Claimed before the invocation: two workers would otherwise both start one. A retry claims it again.
            if row.min_interval_seconds > 0
                && !engine.store().claim_trigger_interval(part.scope, row.trigger_id, message.id).await?
            {
                continue;
            }
            match fire(engine, part.scope, row, message).await? {
                FireOutcome::Settled => fired += 1,
                // The keys remember earlier invocations of the message.
                FireOutcome::NotYet => return Ok(ScanOutcome { fired: fired as u64, reached: seq - 1, waits: true }),
            }
        }
    }
    Ok(through(fired as u64, end))
}

/// Returns the triggers that a message (with the number of its event) matches, oldest first; `None` if there was no
/// place to match their patterns. Triggers behind those whose patterns take too long do not match, which is recorded
/// with them.
async fn matching_triggers<'a>(
    engine: &Engine,
    scope: WorkspaceScope,
    triggers: &'a [Trigger],
    (seq, message): (EventSeq, &Message),
) -> EngineResult<Option<Vec<&'a Trigger>>> {
    let seen = TriggerFacts { channel: &message.channel_name, mentions: &message.mentions };
    let in_scope =
        |row: &&Trigger| seq > row.after_seq && matches_scope(row.channel.as_deref(), row.mention.as_ref(), &seen);
    let (with_pattern, mut matching): (Vec<_>, Vec<_>) =
        triggers.iter().filter(in_scope).partition(|row| row.pattern.is_some());
    let patterns = with_pattern.iter().filter_map(|row| row.pattern.clone()).collect();
    let family = engine.core().family(scope).await;
    let Some(matched) = engine.actions().trigger_patterns.match_all(family, patterns, &message.text).await else {
        return Ok(None);
    };
    // In range, and empty when all were matched: no more were matched than there are.
    let unmatched = with_pattern.get(matched.len()..).unwrap_or_default();
    if !unmatched.is_empty() {
        let unmatched: Vec<TriggerId> = unmatched.iter().map(|row| row.trigger_id).collect();
        engine.store().record_unmatched_triggers(scope, &unmatched, PATTERNS_TOO_COSTLY).await?;
    }
    matching.extend(with_pattern.into_iter().zip(matched).filter_map(|(row, matches)| matches.then_some(row)));
    matching.sort_unstable_by_key(|row| row.trigger_id);
    Ok(Some(matching))
}

/// Lists the messages of channels and their threads among the events above `since`, with the events' numbers.
fn posted_messages(records: &[RecordedEvents], since: EventSeq) -> Vec<(EventSeq, MessageId)> {
    message_events(records, |seq, event| {
        let said = event.kind == MESSAGE_CREATED || event.kind == THREAD_REPLY;
        said && event.conversation_id.is_none() && seq > since
    })
}

/// Outcome of a message for a trigger.
#[derive(Clone, Copy)]
enum FireOutcome {
    /// It has invoked the action, or was refused.
    Settled,
    /// To be retried: the message was not the reason.
    NotYet,
}

/// Invokes the action for a message. A refusal is recorded with the trigger; only failures of the system are errors.
async fn fire(
    engine: &Engine,
    scope: WorkspaceScope,
    trigger: &Trigger,
    message: &Message,
) -> EngineResult<FireOutcome> {
    let mut fired = FireOutcome::Settled;
    let refusal = match engine.actions().invoke_for_message(scope, trigger, message).await {
        // Invoked before and completed long ago, or being invoked by another worker right now.
        Ok(())
        | Err(EngineError::NotFound(Missing::Invocation) | EngineError::Conflict(Conflict::IdempotencyInProgress)) => {
            None
        }
        Err(
            error @ (EngineError::Unavailable(_)
            | EngineError::Internal(Fault::Store(_))
            | EngineError::Internal(Fault::Stream(_))
            | EngineError::CommitUnavailable
            | EngineError::OutcomeUnknown
            | EngineError::Overloaded),
        ) => return Err(error),
        Err(error) => {
            let waited = engine.now() - message.created_at;
            // Only a limit passes by itself. Any other refusal would hold up the later messages for nothing.
            if matches!(error, EngineError::LimitExceeded(Limit::Invocations(_))) && waited < MAX_CAPACITY_WAIT {
                fired = FireOutcome::NotYet;
            }
            Some(error.to_string())
        }
    };
    engine.store().mark_triggered(scope, trigger.trigger_id, refusal.as_deref(), engine.now()).await?;
    Ok(fired)
}
