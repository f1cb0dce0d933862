//! Fires triggers: looks through the event log behind the commits, and invokes what the messages ask for.
//!
//! A part of a log is claimed, looked through, and given back with the position reached. A worker that dies in
//! between leaves its claim to run out; what it had invoked already is recognised by the idempotency key of
//! (trigger, message), so that each message invokes an action once however often it is looked at.

use chrono::TimeDelta;
use relay_domain::{
    TriggerId, WorkspaceScope,
    event::{MESSAGE_CREATED, THREAD_REPLY},
    trigger::{Seen, concerns},
};
use relay_store::{
    MessageRow,
    events::Recorded,
    triggers::{ClaimedEvents, TriggerRow},
};

use super::Ticked;
use crate::{Engine, EngineError, EngineResult, events::told, triggers::Pattern};

/// Workspaces that one tick looks at.
const WORKSPACES_AT_ONCE: i64 = 16;
/// Events of each of them, about.
const EVENTS_AT_ONCE: i64 = 200;
/// A message waits so long for room among the open invocations of what it triggers: what other triggers of its
/// workspace wait for waits with it.
const WAITS_FOR_ROOM: TimeDelta = TimeDelta::minutes(2);
/// Actions that one tick invokes for a workspace; the rest of its events waits for the next.
const FIRED_AT_ONCE: usize = 100;
/// How long a workspace is a worker's own. One that takes longer, or dies, shares the work or leaves it.
const CLAIM_SECONDS: i32 = 10;

/// A trigger, ready to be compared.
struct Ready {
    row: TriggerRow,
    pattern: Option<Pattern>,
}

impl Ready {
    fn new(row: TriggerRow) -> Self {
        // What was stored had been read before; what cannot be read matches nothing.
        let pattern = row
            .pattern
            .as_deref()
            .map(|pattern| Pattern::read(pattern).unwrap_or_else(|_| Pattern::Plain(pattern.to_owned())));
        Self { row, pattern }
    }

    fn matches(&self, seq: i64, message: &MessageRow) -> bool {
        let seen = Seen { channel: &message.channel_name, mentions: &message.mentions };
        seq > self.row.after_seq
            && concerns(self.row.channel.as_deref(), self.row.mention.as_deref(), &seen)
            && self.pattern.as_ref().is_none_or(|pattern| pattern.is_in(&message.text))
    }
}

/// What came of looking through a part.
struct Looked {
    /// How much was invoked.
    fired: u64,
    /// Up to where everything was.
    reached: i64,
    /// Whether the next message has to wait: as many invocations are open as may be.
    waits: bool,
}

/// Looks through what is new in some workspaces. The trouble of one is not the others': its claim runs out, and then it
/// is looked at again.
pub(super) async fn tick(engine: &Engine) -> EngineResult<Ticked> {
    let claimed = engine.store().claim_triggering(WORKSPACES_AT_ONCE, CLAIM_SECONDS).await?;
    let mut done = Ticked::default();
    for part in claimed {
        match look_through_and_note(engine, &part).await {
            Ok(looked) => {
                done.worked += looked.fired;
                done.more |= looked.reached < part.newest_seq && !looked.waits;
            }
            Err(error) => {
                let id = part.scope.workspace_id();
                let error = &error as &dyn std::error::Error;
                tracing::warn!(workspace.id = %id, error, "triggers wait for another look");
            }
        }
    }
    Ok(done)
}

async fn look_through_and_note(engine: &Engine, part: &ClaimedEvents) -> EngineResult<Looked> {
    let looked = look_through(engine, part).await?;
    if looked.waits {
        engine.store().note_triggering(part, looked.reached).await?;
    } else {
        engine.store().finish_triggering(part, looked.reached).await?;
    }
    Ok(looked)
}

async fn look_through(engine: &Engine, part: &ClaimedEvents) -> EngineResult<Looked> {
    let through = |fired: u64, reached: i64| Looked { fired, reached, waits: false };
    let records = engine.store().events_since(part.scope, part.reached_seq, EVENTS_AT_ONCE).await?;
    let Some(last) = records.last() else {
        // Retention was here first.
        return Ok(through(0, part.newest_seq));
    };
    let end = last.first_seq + i64::try_from(last.events.len()).unwrap_or(0) - 1;
    let posted = posted(&records, part.reached_seq);
    if posted.is_empty() {
        return Ok(through(0, end));
    }
    // As they were posted: an edit triggers nothing, and takes nothing back.
    let messages = engine.store().messages_of_events(part.scope, &posted).await?;
    let triggers = engine.store().enabled_triggers(part.scope).await?;
    let triggers: Vec<Ready> = triggers.into_iter().map(Ready::new).collect();
    let mut fired = 0;
    for (seq, _) in posted {
        if fired >= FIRED_AT_ONCE {
            return Ok(through(fired as u64, seq - 1));
        }
        let Some(message) = messages.get(&seq) else { continue };
        for trigger in triggers.iter().filter(|trigger| trigger.matches(seq, message)) {
            match fire(engine, part.scope, &trigger.row, message).await? {
                Fired::Settled => fired += 1,
                // What the message has invoked already, its keys remember.
                Fired::NotYet => return Ok(Looked { fired: fired as u64, reached: seq - 1, waits: true }),
            }
        }
    }
    Ok(through(fired as u64, end))
}

/// The messages of channels and their threads among the events above `since`, with the events' numbers.
fn posted(records: &[Recorded], since: i64) -> Vec<(i64, i64)> {
    told(records, |seq, event| {
        let said = event.kind == MESSAGE_CREATED || event.kind == THREAD_REPLY;
        said && event.conversation_id.is_none() && seq > since
    })
}

/// Whether a message is done with for a trigger.
#[derive(Clone, Copy)]
enum Fired {
    /// It has invoked the action, or was refused.
    Settled,
    /// It is to be tried again: the message has not been what was wrong.
    NotYet,
}

/// Invokes the action for a message. A refusal is noted with the trigger; only trouble of our own is an error.
async fn fire(
    engine: &Engine,
    scope: WorkspaceScope,
    trigger: &TriggerRow,
    message: &MessageRow,
) -> EngineResult<Fired> {
    let mut fired = Fired::Settled;
    let refusal = match engine.invoke_for_message(scope, trigger, message).await {
        // Made before and finished long ago, or being made by another worker right now.
        Ok(()) | Err(EngineError::InvocationNotFound | EngineError::IdempotencyInProgress) => None,
        Err(
            error @ (EngineError::Unavailable(_)
            | EngineError::Store(_)
            | EngineError::Stream(_)
            | EngineError::CommitUnavailable
            | EngineError::OutcomeUnknown
            | EngineError::Overloaded),
        ) => return Err(error),
        Err(error) => {
            let waited = engine.now() - message.created_at;
            if matches!(error, EngineError::TooManyInvocations(_)) && waited < WAITS_FOR_ROOM {
                fired = Fired::NotYet;
            }
            Some(error.to_string())
        }
    };
    let id = TriggerId::new(trigger.trigger_id);
    engine.store().mark_triggered(scope, id, refusal.as_deref(), engine.now()).await?;
    Ok(fired)
}
