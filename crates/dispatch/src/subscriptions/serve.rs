//! Service of one subscription: its events in order, one call at a time.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    SubscriptionDeliveryId, metric_names,
    subscriptions::{
        DisabledReason,
        call::{AnswerClass, classify_status, includes_kind, probe_delay, retry_delay, should_disable},
    },
};
use relay_egress::{Answer, CallOptions, Failure};
use relay_store::{
    events::EventBody,
    subscriptions::dispatch::{CallAttempt, CallOutcome, LeasedSubscription, MatchedEvent, PendingCall},
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::{LEASE, call};
use crate::{
    Engine, EngineError, EngineResult, error::Fault, events::message_events,
    subscriptions::definitions::SubscriptionSecrets, trace,
};

const WAITING_AT_ONCE: i64 = 50;
const EVENTS_AT_ONCE: i64 = 200;
/// A subscription is released after this long, so that others get the slot.
const MAX_SERVE_TIME: Duration = Duration::from_secs(10);
/// Pause of a subscription whose secrets cannot be decrypted here: another worker may have the key.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(60);
/// Bound of a stored error text.
const ERROR_BYTES: usize = 300;

/// Next step after a call.
enum NextStep {
    Continue,
    /// Release it; its row holds the next due time.
    Release,
    /// Another worker has it, or it was deleted.
    Abandon,
}

/// Serves a subscription until nothing is due, it has to wait, or its time is up.
pub(super) async fn serve(engine: &Engine, mut leased: LeasedSubscription, stop: &CancellationToken) {
    if let Err(error) = serve_leased(engine, &mut leased, stop).await {
        // The lease expires, and the next worker continues here.
        tracing::debug!(error = &error as &dyn std::error::Error, "serving a subscription ended early");
    }
}

async fn serve_leased(engine: &Engine, leased: &mut LeasedSubscription, stop: &CancellationToken) -> EngineResult<()> {
    let opened = leased.secret.as_ref().map(|secret| engine.open_subscription_secrets(leased.scope, leased.id, secret));
    let usable = opened.transpose().map(Option::unwrap_or_default).and_then(|secrets| {
        let suffice = secrets.suffice_for(leased.signature_scheme);
        suffice.then_some(secrets).ok_or(EngineError::Internal(Fault::EndpointSecretUnusable))
    });
    let secrets = match usable {
        Ok(secrets) => secrets,
        Err(error) => {
            tracing::error!(
                subscription.id = %leased.id,
                error = &error as &dyn std::error::Error,
                "secrets of a subscription cannot be used, trying again later"
            );
            let later = engine.now() + to_time_delta(UNREADABLE_PAUSE);
            return Ok(engine.store().release_subscription(leased, Some(later)).await?);
        }
    };
    let began = Instant::now();
    let is_over = || stop.is_cancelled() || began.elapsed() >= MAX_SERVE_TIME;
    loop {
        // Queued events first: new ones are matched only when all earlier ones have been sent.
        let waiting = engine.store().pending_calls(leased, WAITING_AT_ONCE).await?;
        if waiting.is_empty() {
            match queue_events(engine, leased).await? {
                NextStep::Continue => {}
                NextStep::Release => return Ok(engine.store().release_subscription(leased, None).await?),
                NextStep::Abandon => return Ok(()),
            }
        }
        for waiting in waiting {
            if waiting.next_attempt_at > engine.now() {
                let due = Some(waiting.next_attempt_at);
                return Ok(engine.store().release_subscription(leased, due).await?);
            }
            match attempt_call(engine, leased, &secrets, &waiting).await? {
                NextStep::Continue if !is_over() => {}
                NextStep::Continue | NextStep::Release => {
                    return Ok(engine.store().release_subscription(leased, None).await?);
                }
                NextStep::Abandon => return Ok(()),
            }
        }
        if is_over() {
            return Ok(engine.store().release_subscription(leased, None).await?);
        }
    }
}

/// Reads the next events of the log and queues those that match.
async fn queue_events(engine: &Engine, leased: &mut LeasedSubscription) -> EngineResult<NextStep> {
    // The head is read before the log: later events are seen the next time.
    let heads = engine.store().event_heads(&[leased.scope]).await?;
    let head = heads.first().map_or(0, |head| head.next_seq - 1);
    let Some(since) = leased.event_cursor else {
        return move_cursor(engine, leased, head, &[]).await;
    };
    if since >= head {
        return Ok(NextStep::Release);
    }
    let mut records = engine.store().events_since(leased.scope, since, EVENTS_AT_ONCE).await?;
    // Retention may have dropped the remaining events.
    let last = records
        .last()
        .map_or(head, |record| record.first_seq + i64::try_from(record.events.len()).unwrap_or(i64::MAX) - 1);
    let is_wanted = |kind: &str| includes_kind(&leased.events, kind);
    let outcome_label = message_events(&records, |seq, event| seq > since && is_wanted(&event.kind));
    let messages = engine.store().messages_of_events(leased.scope, &outcome_label).await?;
    let mut wanted = Vec::new();
    for record in &mut records {
        for (event_seq, event) in (record.first_seq..).zip(std::mem::take(&mut record.events)) {
            if event_seq <= since || !is_wanted(&event.kind) {
                continue;
            }
            let data = call::event_data(&event, messages.get(&event_seq));
            let matches = |filter| call::matches_filter(filter, event.channel_name.as_deref(), &data);
            if !leased.filter.as_ref().is_none_or(matches) {
                continue;
            }
            wanted.push(MatchedEvent {
                delivery_id: SubscriptionDeliveryId::new(engine.next_id()),
                event_seq,
                message_id: match &event.body {
                    EventBody::Message(id) => Some(*id),
                    EventBody::Data(_) => None,
                },
                body: call::call_body(leased.scope, &event.kind, record.created_at, data),
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
    wanted: &[MatchedEvent],
) -> EngineResult<NextStep> {
    if !engine.store().queue_events(leased, to, wanted, LEASE).await? {
        return Ok(NextStep::Abandon);
    }
    leased.event_cursor = Some(to);
    Ok(NextStep::Continue)
}

/// Makes one call and records its outcome.
async fn attempt_call(
    engine: &Engine,
    leased: &LeasedSubscription,
    secrets: &SubscriptionSecrets,
    waiting: &PendingCall,
) -> EngineResult<NextStep> {
    let span = trace::child_span(waiting.traceparent.as_deref(), || {
        tracing::info_span!("subscription.call", attempt = waiting.attempts + 1, event.kind = waiting.event_kind)
    });
    let mut headers = call::call_headers(leased, secrets, waiting, engine.now());
    trace::insert_traceparent(&mut headers, span.as_ref(), waiting.traceparent.as_deref());
    let post = engine.egress().post_url(&leased.url, headers, waiting.body.clone().into(), CallOptions::default());
    let posted = post.instrument(span.unwrap_or_else(tracing::Span::none)).await;
    let now = engine.now();
    let (verdict, attempt) = judge_call(leased, waiting, posted, now);
    let outcome_label = match attempt.outcome {
        CallOutcome::Delivered => "delivered",
        CallOutcome::Retry(_) => "retried",
        CallOutcome::DeadLetter => "given_up",
    };
    metrics::counter!(metric_names::SUBSCRIPTION_CALLS, "outcome" => outcome_label).increment(1);
    let Some((failures, failing_since)) = engine.store().record_call_attempt(leased, &attempt, LEASE).await? else {
        return Ok(NextStep::Abandon);
    };
    let failing_for = failing_since.and_then(|since| (now - since).to_std().ok()).unwrap_or_default();
    let reason = match verdict {
        AnswerClass::Delivered => return Ok(NextStep::Continue),
        AnswerClass::Gone => DisabledReason::Gone,
        AnswerClass::Retry | AnswerClass::Final if should_disable(failures, failing_for) => DisabledReason::Failing,
        AnswerClass::Retry | AnswerClass::Final if attempt.blocked_until.is_some() => return Ok(NextStep::Release),
        AnswerClass::Retry | AnswerClass::Final => return Ok(NextStep::Continue),
    };
    if let Some(recorded) = engine.store().disable_subscription(leased, reason, now).await? {
        tracing::warn!(subscription.id = %leased.id, reason = reason.as_str(), "a subscription was disabled");
        engine.announce(recorded);
    }
    Ok(NextStep::Abandon)
}

/// Decides the outcome of a call. A failing subscription is blocked until its next probe.
fn judge_call(
    leased: &LeasedSubscription,
    waiting: &PendingCall,
    posted: Result<Answer, Failure>,
    now: DateTime<Utc>,
) -> (AnswerClass, CallAttempt) {
    let (status, verdict, error, retry_after) = match posted {
        Ok(answer) => {
            let verdict = classify_status(answer.status);
            let error = (verdict != AnswerClass::Delivered).then(|| format!("HTTP {}", answer.status));
            (i16::try_from(answer.status).ok(), verdict, error, call::retry_after(&answer.headers, now))
        }
        Err(Failure::Refused(refusal)) => (None, AnswerClass::Final, Some(format!("not called: {refusal}")), None),
        Err(failure) => (None, AnswerClass::Retry, Some(failure.to_string()), None),
    };
    let probe_at = probe_delay(leased.failures + 1).map(|pause| now + to_time_delta(pause));
    let (outcome, blocked_until) = match (verdict, retry_delay(waiting.attempts + 1, retry_after)) {
        (AnswerClass::Delivered, _) => (CallOutcome::Delivered, None),
        (AnswerClass::Retry, Some(pause)) => {
            let retry_at = now + to_time_delta(pause);
            let at = probe_at.map_or(retry_at, |probe| probe.max(retry_at));
            // Later events wait too, because events leave in order.
            (CallOutcome::Retry(at), Some(at))
        }
        (AnswerClass::Retry | AnswerClass::Final | AnswerClass::Gone, _) => (CallOutcome::DeadLetter, probe_at),
    };
    let error = error.map(|text| text.chars().take(ERROR_BYTES).collect());
    (verdict, CallAttempt { delivery_id: waiting.delivery_id, outcome, status, error, blocked_until })
}

fn to_time_delta(duration: Duration) -> TimeDelta {
    TimeDelta::from_std(duration).unwrap_or(TimeDelta::MAX)
}
