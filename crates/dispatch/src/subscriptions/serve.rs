//! Service of one subscription: its events in order, one call at a time.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{
    metric_names,
    subscriptions::{
        DisabledReason,
        call::{AnswerClass, classify_status, probe_delay, retry_delay, should_disable},
        dispatch::{CallAttempt, CallOutcome, PendingCall},
        secrets::SubscriptionSecrets,
    },
};
use relay_egress::{Answer, Failure};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    LEASE,
    queue::{LeasedSubscription, QueuedEvents, SubscriptionQueue},
    request::request,
};
use crate::{QueueResult, call, destinations::Destinations};

const PENDING_BATCH_SIZE: i64 = 50;
/// A subscription is released after this long, so that others get the permit.
const MAX_SERVE_TIME: Duration = Duration::from_secs(10);
/// Pause of a subscription whose secrets cannot be used here: another worker may have the key.
const UNUSABLE_PAUSE: Duration = Duration::from_secs(60);
/// Bound of a stored error text.
const MAX_ERROR_CHARS: usize = 300;

/// Next step after a call.
enum NextStep {
    Continue,
    /// Release it; its row holds the next due time.
    Release,
    /// Release it for this long: its host is at its limit.
    Defer(Duration),
    /// Another worker has it, or it was disabled.
    Abandon,
}

/// Serves a subscription until nothing is due, it has to wait, or its time is up.
pub(super) async fn serve<Q: SubscriptionQueue>(
    queue: &Q,
    destinations: &Destinations,
    mut leased: LeasedSubscription<Q::Lease>,
    stop: &CancellationToken,
) {
    if let Err(error) = serve_leased(queue, destinations, &mut leased, stop).await {
        // The lease expires, and the next worker continues here.
        tracing::debug!(error = &error as &dyn std::error::Error, "serving a subscription ended early");
    }
}

async fn serve_leased<Q: SubscriptionQueue>(
    queue: &Q,
    destinations: &Destinations,
    leased: &mut LeasedSubscription<Q::Lease>,
    stop: &CancellationToken,
) -> QueueResult<()> {
    let Some(secrets) = leased.secrets.take() else {
        // The queue has logged the reason.
        return queue.release(leased, Some(call::instant_after(queue.now(), UNUSABLE_PAUSE))).await;
    };
    let began = Instant::now();
    let is_over = || stop.is_cancelled() || began.elapsed() >= MAX_SERVE_TIME;
    loop {
        // Queued events first: new ones are matched only when all earlier ones have been sent.
        let (pending, memory) = queue.pending(leased, PENDING_BATCH_SIZE).await?;
        if pending.is_empty() {
            // Matching reserves memory of its own, for which no other may be held.
            drop(memory);
            match queue.queue_events(leased, LEASE).await? {
                QueuedEvents::Read => {}
                QueuedEvents::None => return queue.release(leased, None).await,
                QueuedEvents::LeaseLost => return Ok(()),
            }
        }
        for pending in pending {
            if pending.next_attempt_at > queue.now() {
                return queue.release(leased, Some(pending.next_attempt_at)).await;
            }
            match attempt_call(queue, destinations, leased, &secrets, pending).await? {
                NextStep::Continue if !is_over() => {}
                NextStep::Continue | NextStep::Release => return queue.release(leased, None).await,
                NextStep::Defer(pause) => {
                    return queue.release(leased, Some(call::instant_after(queue.now(), pause))).await;
                }
                NextStep::Abandon => return Ok(()),
            }
        }
        if is_over() {
            return queue.release(leased, None).await;
        }
    }
}

/// Makes one call and records its outcome, also in the failures of `leased`.
async fn attempt_call<Q: SubscriptionQueue>(
    queue: &Q,
    destinations: &Destinations,
    leased: &mut LeasedSubscription<Q::Lease>,
    secrets: &SubscriptionSecrets,
    mut pending: PendingCall,
) -> QueueResult<NextStep> {
    // Checked at each call: the policy may have become stricter since the registration.
    let posted = match queue.client().policy().check_url(&leased.url) {
        Ok(target) => {
            if let Err(pause) = destinations.wait_for_turn(leased.family, target.host(), pending.body.len()).await {
                return Ok(NextStep::Defer(pause));
            }
            let request = request(leased.signature_scheme, secrets, &mut pending, queue.now());
            let span = || {
                tracing::info_span!(
                    "subscription.call",
                    attempt = pending.attempts + 1,
                    event.kind = pending.event_kind
                )
            };
            call::post(queue.client(), leased.family, &target, request, pending.traceparent.as_deref(), span).await
        }
        Err(refusal) => Err(refusal.into()),
    };
    let now = queue.now();
    let (verdict, attempt) = judge_call(leased.failures, &pending, posted, now);
    let outcome = match attempt.outcome {
        CallOutcome::Delivered => "delivered",
        CallOutcome::Retry(_) => "retried",
        CallOutcome::DeadLetter => "given_up",
    };
    metrics::counter!(metric_names::SUBSCRIPTION_CALLS, "outcome" => outcome).increment(1);
    // Recorded before the verdict is applied: the number of failures includes this call, and those of other workers
    // before.
    let Some(run) = queue.record(leased, &attempt, LEASE).await? else { return Ok(NextStep::Abandon) };
    leased.failures = run.failures;
    // Zero without a failure, and for a first failure that another clock has put after `now`.
    let failing_for = run.since.and_then(|since| (now - since).to_std().ok()).unwrap_or_default();
    let reason = match verdict {
        AnswerClass::Delivered => return Ok(NextStep::Continue),
        AnswerClass::Gone => DisabledReason::Gone,
        AnswerClass::Retry | AnswerClass::Final if should_disable(run.failures, failing_for) => DisabledReason::Failing,
        AnswerClass::Retry | AnswerClass::Final if attempt.blocked_until.is_some() => return Ok(NextStep::Release),
        AnswerClass::Retry | AnswerClass::Final => return Ok(NextStep::Continue),
    };
    if queue.disable(leased, reason).await? {
        tracing::warn!(subscription.id = %leased.id, reason = reason.as_str(), "a subscription was disabled");
    }
    Ok(NextStep::Abandon)
}

/// Decides the outcome of a call. A failing subscription is blocked until its next probe.
fn judge_call(
    failures: i32,
    pending: &PendingCall,
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
    // `failures` does not include this call yet.
    let probe_at = probe_delay(failures + 1).map(|pause| call::instant_after(now, pause));
    let (outcome, blocked_until) = match (verdict, retry_delay(pending.attempts + 1, retry_after)) {
        (AnswerClass::Delivered, _) => (CallOutcome::Delivered, None),
        (AnswerClass::Retry, Some(pause)) => {
            let retry_at = call::instant_after(now, pause);
            let at = probe_at.map_or(retry_at, |probe| probe.max(retry_at));
            // Later events wait too, because events leave in order.
            (CallOutcome::Retry(at), Some(at))
        }
        // A given-up event does not block the next one, unless the endpoint is only probed.
        (AnswerClass::Retry | AnswerClass::Final | AnswerClass::Gone, _) => (CallOutcome::DeadLetter, probe_at),
    };
    let error = error.map(|text| call::bounded(&text, MAX_ERROR_CHARS));
    (verdict, CallAttempt { delivery_id: pending.delivery_id, outcome, status, error, blocked_until })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{HeaderMap, header};
    use relay_domain::{SubscriptionDeliveryId, subscriptions::call::PROBE_FAILURES};

    use super::*;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).unwrap()
    }

    fn judged(failures: i32, attempts: i32, status: u16, retry_after: Option<&str>) -> (CallOutcome, Option<i64>) {
        let pending = PendingCall {
            delivery_id: SubscriptionDeliveryId::new(7),
            event_kind: "message.created".into(),
            body: "{}".into(),
            attempts,
            next_attempt_at: at(0),
            created_at: at(0),
            traceparent: None,
        };
        let answer = Answer {
            status,
            headers: retry_after
                .map(|seconds| HeaderMap::from_iter([(header::RETRY_AFTER, seconds.parse().unwrap())]))
                .unwrap_or_default(),
            body: Bytes::new(),
            is_truncated: false,
            latency: Duration::ZERO,
        };
        let (_, attempt) = judge_call(failures, &pending, Ok(answer), at(100));
        (attempt.outcome, attempt.blocked_until.map(|until| until.timestamp()))
    }

    #[test]
    fn failures_wait_for_the_schedule_the_endpoint_and_the_probe() {
        for ((failures, attempts, status, retry_after), expected) in [
            ((0, 0, 204, None), (CallOutcome::Delivered, None)),
            ((0, 0, 503, None), (CallOutcome::Retry(at(101)), Some(101))),
            ((1, 1, 503, None), (CallOutcome::Retry(at(102)), Some(102))),
            ((1, 1, 429, Some("7")), (CallOutcome::Retry(at(107)), Some(107))),
            ((2, 2, 503, None), (CallOutcome::DeadLetter, None)),
            ((0, 0, 400, None), (CallOutcome::DeadLetter, None)),
            ((PROBE_FAILURES - 1, 0, 503, None), (CallOutcome::Retry(at(130)), Some(130))),
            ((PROBE_FAILURES - 1, 2, 503, None), (CallOutcome::DeadLetter, Some(130))),
        ] {
            assert_eq!(judged(failures, attempts, status, retry_after), expected, "{status} after {attempts}");
        }
    }
}
