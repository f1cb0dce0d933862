//! One delivery attempt: the call, and the outcome of its response.

use std::time::Duration;

use chrono::{DateTime, Utc};
use http::{HeaderMap, header};
use relay_domain::{
    AttemptId, DeliveryId,
    events::kind,
    mailboxes::dead_letter::DeadLetterReason,
    push::{self, AckMode, MAX_RETRY_DELAY, PushOutcome, STORED_ANSWER_BYTES, classify_answer},
};
use relay_egress::{Answer, CallOptions, Failure};
use relay_store::{
    MessageLocation,
    events::Event,
    mailboxes::expiry::DeadLetteredDelivery,
    push::{
        attempts::{AttemptOutcome, HttpAttempt, PushAttempt},
        mailboxes::LeasedMailbox,
        pages::PushRow,
    },
};
use relay_wire::{events::data::BindingDisabled, field::ToValue as _};
use tracing::Instrument as _;

use super::{
    PushDispatcher,
    endpoints::{Endpoint, Route},
    request,
};
use crate::trace;

/// Pause of an endpoint that throttles without `Retry-After`.
const DEFAULT_PAUSE: Duration = Duration::from_secs(5);
const MAX_ERROR_CHARS: usize = 500;
/// Error of a delivery that ran out of attempts.
pub(super) const EXHAUSTED: &str = "delivery attempts exhausted";

/// Attempts a row once. `None` when its message or invocation is no longer kept: there is nothing to send.
pub(super) async fn attempt_delivery(
    pusher: &PushDispatcher,
    endpoint: &Endpoint,
    mailbox: &LeasedMailbox,
    row: &PushRow,
) -> Option<PushAttempt> {
    let engine = &pusher.engine;
    let at = engine.now();
    let mut call = request::delivery_call(&row.delivery, &endpoint.auth, &endpoint.secrets, at)?;
    let span = trace::child_span(row.traceparent.as_deref(), || {
        tracing::info_span!("push.attempt", delivery.seq = row.delivery.seq, attempt = row.retry_no.saturating_add(1))
    });
    trace::insert_traceparent(&mut call.headers, span.as_ref(), row.traceparent.as_deref());
    let began = std::time::Instant::now();
    let answered = send_call(pusher, endpoint, call).instrument(span.unwrap_or_else(tracing::Span::none)).await;
    let latency = began.elapsed();
    let now = engine.now();
    let judgement = judge_answer(endpoint, &answered, now);
    record_health(pusher, endpoint, &answered, &judgement, now).await;

    let (outcome, events) = decide_outcome(endpoint, mailbox, row, &judgement, now);
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
        delivery_id: delivery_id_of(row),
        seq: row.delivery.seq,
        location: message_location(row),
        http: HttpAttempt {
            id: AttemptId::new(engine.next_id()),
            started_at: at,
            latency_ms: i32::try_from(latency.as_millis()).unwrap_or(i32::MAX),
            status,
            answer,
            error,
        },
        outcome,
        pushed_seq: None,
        sender: row.delivery.message.as_ref().map(|message| message.agent_id),
        events,
    })
}

/// Posts an event once; only its effect on the endpoint's health is recorded.
pub(super) async fn post_event(pusher: &PushDispatcher, endpoint: &Endpoint, call: request::HttpCall) {
    let answered = send_call(pusher, endpoint, call).await;
    let now = pusher.engine.now();
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
    let paused = throttles.then(|| now + to_time_delta(judgement.wait.unwrap_or(DEFAULT_PAUSE)));
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

async fn send_call(pusher: &PushDispatcher, endpoint: &Endpoint, call: request::HttpCall) -> Result<Answer, CallError> {
    let client = pusher.engine.egress();
    let mut headers = call.headers;
    let target = match &endpoint.route {
        Route::Straight(target) => target,
        Route::ByProxy(proxy, auth) => {
            request::set_header(&mut headers, "x-forward-to", &endpoint.url);
            if let Some(auth) = auth {
                request::set_header(&mut headers, "x-proxy-auth", auth);
            }
            proxy
        }
        Route::NoProxy => return Err(CallError::NoProxy),
        Route::Refused(refusal) => return Err(CallError::Failure((*refusal).into())),
    };
    client.post(target, headers, call.body, CallOptions::default()).await.map_err(CallError::Failure)
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
        Self { verdict, error: Some(bounded(error)), wait: None }
    }
}

fn bounded(error: String) -> String {
    error.chars().take(MAX_ERROR_CHARS).collect()
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
                PushOutcome::Failed { .. } if (200..300).contains(&answer.status) => {
                    Some("response ack not signaled".to_owned())
                }
                PushOutcome::Failed { .. } | PushOutcome::Gone => Some(format!("HTTP {}", answer.status)),
            };
            Judgement { verdict, error: error.map(bounded), wait: retry_after(&answer.headers, now) }
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

/// Decides the outcome of an attempt, with its events.
fn decide_outcome(
    endpoint: &Endpoint,
    mailbox: &LeasedMailbox,
    row: &PushRow,
    judgement: &Judgement,
    now: DateTime<Utc>,
) -> (AttemptOutcome, Vec<Event>) {
    let retry_no = row.retry_no.saturating_add(1);
    let error = judgement.error.as_deref();
    match judgement.verdict {
        PushOutcome::Delivered => (AttemptOutcome::Delivered, Vec::new()),
        PushOutcome::Acked => (AttemptOutcome::Acked, Vec::new()),
        PushOutcome::Gone => {
            let reason = error.unwrap_or("HTTP 410").to_owned();
            let data = BindingDisabled {
                node_id: endpoint.node_id.as_str(),
                agent_id: mailbox.agent_id,
                agent_name: &mailbox.agent_name,
                reason: &reason,
            };
            let event = Event::new(kind::NODE_BINDING_DISABLED, data.to_value()).by_agent(mailbox.agent_id);
            (AttemptOutcome::Disabled { retry_no, reason }, vec![event])
        }
        PushOutcome::Rejected => {
            let reason = DeadLetterReason::Rejected;
            let event = dead_letter_event(mailbox, row, reason, error.unwrap_or(reason.default_error()));
            (AttemptOutcome::DeadLettered { reason }, vec![event])
        }
        PushOutcome::Failed { .. } => {
            let failed = u32::try_from(retry_no).unwrap_or(u32::MAX);
            match (endpoint.retry.retry_delay(failed, fastrand::u64(..)), judgement.wait) {
                (None, _) => {
                    let reason = DeadLetterReason::AttemptsExhausted;
                    (AttemptOutcome::DeadLettered { reason }, vec![dead_letter_event(mailbox, row, reason, EXHAUSTED)])
                }
                (Some(_), Some(wait)) => {
                    (AttemptOutcome::Retry { at: now + to_time_delta(wait), retry_no }, Vec::new())
                }
                (Some(pause), None) => (AttemptOutcome::Retry { at: now + to_time_delta(pause), retry_no }, Vec::new()),
            }
        }
    }
}

/// Creates the event of a dead letter.
fn dead_letter_event(mailbox: &LeasedMailbox, row: &PushRow, reason: DeadLetterReason, error: &str) -> Event {
    let letter = DeadLetteredDelivery {
        scope: mailbox.scope,
        delivery_id: delivery_id_of(row),
        seq: row.delivery.seq,
        reason,
        error: Some(error.to_owned()),
        agent_name: Some(mailbox.agent_name.clone()),
        sender: None,
        place: message_location(row),
    };
    letter.event()
}

fn delivery_id_of(row: &PushRow) -> DeliveryId {
    let delivery = &row.delivery;
    DeliveryId { source: delivery.source_id, agent: delivery.agent_id, redrive_no: delivery.redrive_no }
}

fn message_location(row: &PushRow) -> Option<MessageLocation> {
    let message = row.delivery.message.as_ref()?;
    Some(MessageLocation {
        channel_id: message.channel_id,
        channel_name: message.channel_name.clone(),
        conversation_id: message.conversation_id.as_ref().map(ToString::to_string),
    })
}

fn to_time_delta(pause: Duration) -> chrono::Duration {
    chrono::Duration::from_std(pause).unwrap_or_else(|_| chrono::Duration::seconds(30))
}

/// Parses `Retry-After`: seconds, or a date. At least a second, at most a day.
fn retry_after(headers: &HeaderMap, now: DateTime<Utc>) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let at = DateTime::parse_from_rfc2822(text).ok()?;
            (at.with_timezone(&Utc) - now).to_std().unwrap_or_default()
        }
    };
    Some(wait.clamp(Duration::from_secs(1), MAX_RETRY_DELAY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_an_instant() {
        let now = DateTime::parse_from_rfc3339("2026-05-01T10:00:00Z").unwrap().with_timezone(&Utc);
        for (text, seconds) in [
            ("120", Some(120)),
            ("0", Some(1)),
            ("99999999", Some(86_400)),
            ("Fri, 01 May 2026 10:01:00 GMT", Some(60)),
            ("Fri, 01 May 2026 09:00:00 GMT", Some(1)),
            ("soon", None),
            ("-5", None),
        ] {
            let headers = HeaderMap::from_iter([(header::RETRY_AFTER, text.parse().unwrap())]);
            assert_eq!(retry_after(&headers, now).map(|wait| wait.as_secs()), seconds, "{text}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }
}
