//! Serving one subscription: its events in order, one call at a time.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    metric_names,
    subscription_call::{Verdict, is_given_up, pause_after, probe_pause, verdict, wants},
};
use relay_egress::{Failure, Options};
use relay_store::{
    events::EventBody,
    subscription_dispatch::{CallOutcome, CallTried, LeasedSubscription, WaitingCall, WantedEvent},
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::{LEASE, call};
use crate::{Engine, EngineResult, events::told, subscriptions::SubscriptionSecrets, trace};

/// Calls read at once.
const WAITING_AT_ONCE: i64 = 50;
/// Events of the log looked at in one step.
const EVENTS_AT_ONCE: i64 = 200;
/// After this long a subscription goes back, for others to have the place.
const SERVED_AT_MOST: Duration = Duration::from_secs(10);
/// How long a subscription whose secrets cannot be opened here is left alone: another worker may know the key.
const UNREADABLE_FOR: Duration = Duration::from_secs(60);
/// Bytes of an error that are kept.
const ERROR_BYTES: usize = 300;

/// What is to be done after a call.
enum Next {
    Go,
    /// Give it back. It says itself when it is due again.
    Release,
    /// Somebody else has it, or it is gone.
    Leave,
}

/// Serves a subscription until nothing is left to do, it has to wait, or others are to have a turn.
pub(super) async fn serve(engine: &Engine, mut leased: LeasedSubscription, stop: &CancellationToken) {
    if let Err(error) = serve_leased(engine, &mut leased, stop).await {
        // The lease runs out, and whoever takes it goes on where this ended.
        tracing::debug!(error = &error as &dyn std::error::Error, "serving a subscription ended early");
    }
}

async fn serve_leased(engine: &Engine, leased: &mut LeasedSubscription, stop: &CancellationToken) -> EngineResult<()> {
    let opened = leased.sealed.as_ref().map(|sealed| engine.opened_secrets(leased.scope, leased.id, sealed));
    let secrets = match opened.transpose() {
        Ok(secrets) => secrets.unwrap_or_default(),
        Err(error) => {
            tracing::error!(
                subscription.id = %leased.id,
                error = &error as &dyn std::error::Error,
                "a subscription's secrets cannot be read"
            );
            let later = engine.now() + delta(UNREADABLE_FOR);
            return Ok(engine.store().release_subscription(leased, Some(later)).await?);
        }
    };
    let began = Instant::now();
    let is_over = || stop.is_cancelled() || began.elapsed() >= SERVED_AT_MOST;
    loop {
        let waiting = engine.store().waiting_calls(leased, WAITING_AT_ONCE).await?;
        if waiting.is_empty() {
            match queue_events(engine, leased).await? {
                Next::Go => {}
                Next::Release => return Ok(engine.store().release_subscription(leased, None).await?),
                Next::Leave => return Ok(()),
            }
        }
        for waiting in waiting {
            if waiting.next_attempt_at > engine.now() {
                let due = Some(waiting.next_attempt_at);
                return Ok(engine.store().release_subscription(leased, due).await?);
            }
            match attempt(engine, leased, &secrets, &waiting).await? {
                Next::Go if !is_over() => {}
                Next::Go | Next::Release => return Ok(engine.store().release_subscription(leased, None).await?),
                Next::Leave => return Ok(()),
            }
        }
        if is_over() {
            return Ok(engine.store().release_subscription(leased, None).await?);
        }
    }
}

/// Looks at the next events of the log and queues those that are wanted.
async fn queue_events(engine: &Engine, leased: &mut LeasedSubscription) -> EngineResult<Next> {
    // Where the log stands, before it is read: what comes after that is seen the next time.
    let heads = engine.store().event_heads(&[leased.scope]).await?;
    let head = heads.first().map_or(0, |head| head.next_seq - 1);
    let Some(since) = leased.event_cursor else {
        return move_cursor(engine, leased, head, &[]).await;
    };
    if since >= head {
        return Ok(Next::Release);
    }
    let mut records = engine.store().events_since(leased.scope, since, EVENTS_AT_ONCE).await?;
    // Retention may have dropped what was left to look at.
    let last = records
        .last()
        .map_or(head, |record| record.first_seq + i64::try_from(record.events.len()).unwrap_or(i64::MAX) - 1);
    let is_wanted = |kind: &str| wants(&leased.events, kind);
    let told = told(&records, |seq, event| seq > since && is_wanted(&event.kind));
    let messages = engine.store().messages_of_events(leased.scope, &told).await?;
    let mut wanted = Vec::new();
    for record in &mut records {
        for (event_seq, event) in (record.first_seq..).zip(std::mem::take(&mut record.events)) {
            if event_seq <= since || !is_wanted(&event.kind) {
                continue;
            }
            let data = call::data(&event, messages.get(&event_seq));
            if !call::passes(leased.filter.as_ref(), event.channel_name.as_deref(), &data) {
                continue;
            }
            wanted.push(WantedEvent {
                delivery_id: engine.next_id(),
                event_seq,
                message_id: match &event.body {
                    EventBody::Message(id) => Some(*id),
                    EventBody::Data(_) => None,
                },
                body: call::body(leased.scope, &event.kind, record.created_at, data),
                kind: event.kind.into_owned(),
                created_at: record.created_at,
            });
        }
    }
    move_cursor(engine, leased, last, &wanted).await
}

async fn move_cursor(
    engine: &Engine,
    leased: &mut LeasedSubscription,
    to: i64,
    wanted: &[WantedEvent],
) -> EngineResult<Next> {
    if !engine.store().queue_wanted(leased, to, wanted, LEASE).await? {
        return Ok(Next::Leave);
    }
    leased.event_cursor = Some(to);
    Ok(Next::Go)
}

/// One call, and what follows from it.
async fn attempt(
    engine: &Engine,
    leased: &LeasedSubscription,
    secrets: &SubscriptionSecrets,
    waiting: &WaitingCall,
) -> EngineResult<Next> {
    let span = trace::below(waiting.traceparent.as_deref(), || {
        tracing::info_span!("subscription.call", attempt = waiting.attempts + 1, event.kind = waiting.event_kind)
    });
    let mut headers = call::headers(leased, secrets, waiting, engine.now());
    trace::tell(&mut headers, span.as_ref(), waiting.traceparent.as_deref());
    let post = engine.egress().post_url(&leased.url, headers, waiting.body.clone().into(), Options::default());
    let posted = post.instrument(span.unwrap_or_else(tracing::Span::none)).await;
    let now = engine.now();
    let (status, verdict, error, retry_after) = match posted {
        Ok(answer) => {
            let verdict = verdict(answer.status);
            let error = (verdict != Verdict::Delivered).then(|| format!("HTTP {}", answer.status));
            (i16::try_from(answer.status).ok(), verdict, error, call::retry_after(&answer.headers, now))
        }
        Err(Failure::Refused(refusal)) => (None, Verdict::Final, Some(format!("not called: {refusal}")), None),
        Err(failure) => (None, Verdict::Retry, Some(failure.to_string()), None),
    };
    let pause = pause_after(waiting.attempts + 1, retry_after);
    let (outcome, told) = match (verdict, pause) {
        (Verdict::Delivered, _) => (CallOutcome::Delivered, "delivered"),
        (Verdict::Retry, Some(pause)) => (CallOutcome::Retry(now + delta(pause)), "retried"),
        _ => (CallOutcome::DeadLetter, "given_up"),
    };
    let probe = if outcome == CallOutcome::Delivered { None } else { probe_pause(leased.failures + 1) };
    let probe = probe.map(|pause| now + delta(pause));
    let blocked_until: Option<DateTime<Utc>> = match outcome {
        CallOutcome::Retry(at) => Some(probe.map_or(at, |probe| probe.max(at))),
        _ => probe,
    };
    let tried = CallTried {
        delivery_id: waiting.delivery_id,
        outcome: match (outcome, blocked_until) {
            (CallOutcome::Retry(_), Some(until)) => CallOutcome::Retry(until),
            (outcome, _) => outcome,
        },
        status,
        error: error.map(|text| text.chars().take(ERROR_BYTES).collect()),
        blocked_until,
    };
    metrics::counter!(metric_names::SUBSCRIPTION_CALLS, "outcome" => told).increment(1);
    let Some((failures, failing_since)) = engine.store().note_call(leased, &tried, LEASE).await? else {
        return Ok(Next::Leave);
    };
    let failing_for = failing_since.and_then(|since| (now - since).to_std().ok()).unwrap_or_default();
    let reason = match verdict {
        Verdict::Delivered => return Ok(Next::Go),
        Verdict::Gone => "gone",
        _ if is_given_up(failures, failing_for) => "failing",
        _ if blocked_until.is_some() => return Ok(Next::Release),
        _ => return Ok(Next::Go),
    };
    if let Some(recorded) = engine.store().disable_subscription(leased, reason, now).await? {
        tracing::warn!(subscription.id = %leased.id, reason, "a subscription was disabled");
        engine.announce(recorded);
    }
    Ok(Next::Leave)
}

fn delta(duration: Duration) -> TimeDelta {
    TimeDelta::from_std(duration).unwrap_or(TimeDelta::MAX)
}
