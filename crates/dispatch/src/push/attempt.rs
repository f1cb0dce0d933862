//! One delivery attempt: the call, and the outcome of its response.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{
    mailboxes::{MessageLocation, dead_letter::DeadLetterReason},
    push::{
        self, AckMode, MAX_RETRY_DELAY, PushOutcome, STORED_ANSWER_BYTES,
        attempt::{AttemptOutcome, HttpAttempt, PushAttempt},
        classify_answer,
        mailbox::{LeasedMailbox, PushRow},
    },
};
use relay_egress::{Answer, Failure};

use super::{
    PushDispatcher,
    endpoints::{Endpoint, Route},
    request,
};
use crate::call::{self, HttpCall, set_header};

/// Pause of an endpoint that throttles without `Retry-After`.
const DEFAULT_PAUSE: Duration = Duration::from_secs(5);
const MAX_ERROR_CHARS: usize = 500;
/// Error of a delivery that ran out of attempts.
const EXHAUSTED: &str = "delivery attempts exhausted";

/// Attempts a row once. `None` when its message or invocation is no longer kept: there is nothing to send.
pub(super) async fn attempt_delivery(
    pusher: &PushDispatcher,
    endpoint: &Endpoint,
    mailbox: &LeasedMailbox,
    row: &PushRow,
) -> Option<PushAttempt> {
    let at = pusher.storage.now();
    let call = request::delivery_call(&row.delivery, &endpoint.auth, &endpoint.secrets, at)?;
    let span = || {
        tracing::info_span!("push.attempt", delivery.seq = row.delivery.seq, attempt = row.retry_no.saturating_add(1))
    };
    // Before the call: the endpoint may take a delivery whose answer is lost.
    pusher.storage.note_sent(mailbox, row.delivery.seq);
    let began = tokio::time::Instant::now();
    let answered = send_call(pusher, endpoint, call, row.traceparent.as_deref(), span).await;
    let latency = began.elapsed();
    let now = pusher.storage.now();
    let judgement = judge_answer(endpoint, &answered, now);
    record_health(pusher, endpoint, &answered, &judgement, now).await;

    let outcome = decide_outcome(endpoint, row, &judgement, now);
    let (status, answer) = match answered {
        Ok(answer) => {
            let kept = &answer.body[..answer.body.len().min(STORED_ANSWER_BYTES)];
            (i16::try_from(answer.status).ok(), (!kept.is_empty()).then(|| kept.to_vec()))
        }
        Err(_) => (None, None),
    };
    let error = match outcome {
        AttemptOutcome::DeadLettered { reason: DeadLetterReason::AttemptsExhausted } => Some(EXHAUSTED.to_owned()),
        AttemptOutcome::DeadLettered { .. }
        | AttemptOutcome::Delivered
        | AttemptOutcome::Acked
        | AttemptOutcome::Retry { .. }
        | AttemptOutcome::Disabled { .. } => judgement.error,
    };
    Some(PushAttempt {
        mailbox: mailbox.clone(),
        delivery_id: row.delivery.id(),
        seq: row.delivery.seq,
        location: message_location(row),
        http: HttpAttempt {
            id: pusher.storage.new_attempt_id(),
            started_at: at,
            // Attempts end after 10 s, so the number fits.
            latency_ms: i32::try_from(latency.as_millis()).unwrap_or(i32::MAX),
            status,
            answer,
            error,
        },
        outcome,
        pushed_seq: None,
        sender: row.delivery.sender,
    })
}

/// Posts an event once; only its effect on the endpoint's health is recorded.
pub(super) async fn post_event(pusher: &PushDispatcher, endpoint: &Endpoint, call: HttpCall) {
    let answered = send_call(pusher, endpoint, call, None, tracing::Span::none).await;
    let now = pusher.storage.now();
    let judgement = judge_answer(endpoint, &answered, now);
    record_health(pusher, endpoint, &answered, &judgement, now).await;
}

/// Records the effect of a call on its endpoint's health. An endpoint that responds is healthy, whatever it says of the
/// message.
async fn record_health(
    pusher: &PushDispatcher,
    endpoint: &Endpoint,
    answered: &Result<Answer, CallError>,
    judgement: &Judgement,
    now: DateTime<Utc>,
) {
    let (is_failure, throttles) = match judgement.verdict {
        PushOutcome::Failed { is_endpoint_fault, throttles } => (is_endpoint_fault, throttles),
        PushOutcome::Delivered | PushOutcome::Acked | PushOutcome::Rejected | PushOutcome::Gone => (false, false),
    };
    let paused = throttles.then(|| call::instant_after(now, judgement.wait.unwrap_or(DEFAULT_PAUSE)));
    pusher.endpoints.record_result(endpoint, answered.is_ok() && !is_failure, is_failure, paused).await;
}

/// Reason for a call without a response.
enum CallError {
    Failure(Failure),
    NoProxy,
}

impl CallError {
    fn text(&self) -> String {
        match self {
            Self::Failure(failure) => failure.to_string(),
            Self::NoProxy => "no proxy is configured".to_owned(),
        }
    }
}

async fn send_call(
    pusher: &PushDispatcher,
    endpoint: &Endpoint,
    mut call: HttpCall,
    traceparent: Option<&str>,
    span: impl FnOnce() -> tracing::Span,
) -> Result<Answer, CallError> {
    let target = match &endpoint.route {
        Route::Straight(target) => target,
        Route::ByProxy(proxy, auth) => {
            set_header(&mut call.headers, "x-forward-to", &endpoint.url);
            if let Some(auth) = auth {
                set_header(&mut call.headers, "x-proxy-auth", auth);
            }
            proxy
        }
        Route::NoProxy => return Err(CallError::NoProxy),
        Route::Refused(refusal) => return Err(CallError::Failure((*refusal).into())),
    };
    let posted = call::post(pusher.storage.client(), endpoint.family, target, call, traceparent, span);
    posted.await.map_err(CallError::Failure)
}

/// Meaning of a call's result.
struct Judgement {
    verdict: PushOutcome,
    /// At most [`MAX_ERROR_CHARS`] characters.
    error: Option<String>,
    /// Pause that the endpoint requested.
    wait: Option<Duration>,
}

impl Judgement {
    fn failed(error: String, is_endpoint_fault: bool) -> Self {
        let verdict = PushOutcome::Failed { is_endpoint_fault, throttles: false };
        Self { verdict, error: Some(call::bounded(&error, MAX_ERROR_CHARS)), wait: None }
    }
}

fn judge_answer(endpoint: &Endpoint, answered: &Result<Answer, CallError>, now: DateTime<Utc>) -> Judgement {
    match answered {
        Ok(answer) => {
            // The body counts in one mode only, and only if it was read completely.
            let is_readable = endpoint.ack_mode == AckMode::Response && !answer.is_truncated;
            let declared = if is_readable { request::declared_ack(&answer.headers, &answer.body) } else { None };
            let said =
                push::EndpointAnswer { status: answer.status, declared: declared.as_ref().map(|(word, _)| *word) };
            let verdict = classify_answer(endpoint.ack_mode, said);
            let error = match verdict {
                PushOutcome::Delivered | PushOutcome::Acked => None,
                PushOutcome::Rejected => {
                    let why = declared.and_then(|(_, why)| why);
                    Some(why.unwrap_or_else(|| DeadLetterReason::Rejected.default_error().to_owned()))
                }
                // In mode `response`, a 2xx whose body declares no ack is a failed attempt.
                PushOutcome::Failed { .. } if (200..300).contains(&answer.status) => {
                    Some("response ack not signaled".to_owned())
                }
                PushOutcome::Failed { .. } | PushOutcome::Gone => Some(format!("HTTP {}", answer.status)),
            };
            Judgement {
                verdict,
                error: error.map(|error| call::bounded(&error, MAX_ERROR_CHARS)),
                wait: requested_pause(answer, now),
            }
        }
        // A refused URL is not the endpoint's fault, and caused no call.
        Err(failure @ CallError::Failure(Failure::Refused(_)) | failure @ CallError::NoProxy) => {
            Judgement::failed(failure.text(), false)
        }
        // Our own lack of sockets says nothing about the endpoint.
        Err(CallError::Failure(Failure::Connect(error))) if error.kind() == std::io::ErrorKind::ResourceBusy => {
            Judgement::failed(error.to_string(), false)
        }
        Err(failure) => Judgement::failed(failure.text(), true),
    }
}

/// Decides the outcome of an attempt.
fn decide_outcome(endpoint: &Endpoint, row: &PushRow, judgement: &Judgement, now: DateTime<Utc>) -> AttemptOutcome {
    let retry_no = row.retry_no.saturating_add(1);
    match judgement.verdict {
        PushOutcome::Delivered => AttemptOutcome::Delivered,
        PushOutcome::Acked => AttemptOutcome::Acked,
        PushOutcome::Gone => {
            let reason = judgement.error.as_deref().unwrap_or("HTTP 410").to_owned();
            AttemptOutcome::Disabled { retry_no, reason }
        }
        PushOutcome::Rejected => AttemptOutcome::DeadLettered { reason: DeadLetterReason::Rejected },
        PushOutcome::Failed { .. } => {
            let failed = u32::try_from(retry_no).unwrap_or(u32::MAX);
            match endpoint.retry.retry_delay(failed, fastrand::u64(..)) {
                None => AttemptOutcome::DeadLettered { reason: DeadLetterReason::AttemptsExhausted },
                Some(pause) => {
                    // `Retry-After` wins over the schedule, even when it is shorter.
                    AttemptOutcome::Retry { at: call::instant_after(now, judgement.wait.unwrap_or(pause)), retry_no }
                }
            }
        }
    }
}

fn message_location(row: &PushRow) -> Option<MessageLocation> {
    let message = row.delivery.message()?;
    Some(MessageLocation {
        channel_id: message.channel_id,
        channel_name: message.channel_name.clone(),
        conversation_id: message.conversation_id.as_ref().map(ToString::to_string),
    })
}

/// Returns the pause that an answer asks for: at least a second, at most a day.
fn requested_pause(answer: &Answer, now: DateTime<Utc>) -> Option<Duration> {
    let wait = call::retry_after(&answer.headers, now)?;
    // A second at least: `Retry-After: 0` would otherwise repeat the call in a tight loop.
    Some(wait.clamp(Duration::from_secs(1), MAX_RETRY_DELAY))
}
