//! One try: the call, and what its answer means.

use std::time::Duration;

use chrono::{DateTime, Utc};
use http::{HeaderMap, header};
use relay_domain::{
    AgentId, ChannelId, DeliveryId,
    dead_letter::DeadReason,
    event,
    push::{self, AckMode, KEPT_ANSWER, MAX_PAUSE, Verdict, judge},
};
use relay_egress::{Answer, Failure, Options};
use relay_store::{
    Place,
    events::NewEvent,
    expiry::DeadLettered,
    push_mailboxes::TakenMailbox,
    push_read::PushRow,
    push_record::{Attempt, Outcome, Tried},
};
use serde_json::json;
use tracing::Instrument as _;

use super::{
    Pusher,
    endpoints::{Endpoint, Way},
    request,
};
use crate::trace;

/// An endpoint that wants fewer calls and does not say when gets none for this long.
const PAUSE_UNTOLD: Duration = Duration::from_secs(5);
/// What a delivery carries that ran out of tries.
pub(super) const EXHAUSTED: &str = "delivery attempts exhausted";

/// Tries a row once. `None` when what it told of is gone: there is nothing to send.
pub(super) async fn attempt(
    pusher: &Pusher,
    endpoint: &Endpoint,
    mailbox: &TakenMailbox,
    row: &PushRow,
) -> Option<Tried> {
    let engine = &pusher.engine;
    let at = engine.now();
    let mut call = request::durable(&row.delivery, &endpoint.auth, &endpoint.secrets, at)?;
    let span = trace::below(row.traceparent.as_deref(), || {
        tracing::info_span!("push.attempt", delivery.seq = row.delivery.seq, attempt = row.retry_no.saturating_add(1))
    });
    trace::tell(&mut call.headers, span.as_ref(), row.traceparent.as_deref());
    let began = std::time::Instant::now();
    let answered = send(pusher, endpoint, call).instrument(span.unwrap_or_else(tracing::Span::none)).await;
    let latency = began.elapsed();
    let now = engine.now();
    let (verdict, error, wait) = judged(endpoint, &answered, now);
    note(pusher, endpoint, &answered, verdict, wait, now).await;

    let retry_no = row.retry_no.saturating_add(1);
    let error = error.map(|error| error.chars().take(500).collect::<String>());
    let (outcome, events) = outcome(endpoint, mailbox, row, verdict, retry_no, wait, error.as_deref(), now);
    let (status, answer) = match answered {
        Ok(answer) => {
            let kept = &answer.body[..answer.body.len().min(KEPT_ANSWER)];
            (i16::try_from(answer.status).ok(), (!kept.is_empty()).then(|| kept.to_vec()))
        }
        Err(_) => (None, None),
    };
    let error = match outcome {
        Outcome::Dead { reason: DeadReason::AttemptsExhausted } => Some(EXHAUSTED.to_owned()),
        _ => error,
    };
    Some(Tried {
        mailbox: mailbox.clone(),
        delivery_id: id_of(row),
        seq: row.delivery.seq,
        place: place_of(row),
        attempt: Attempt {
            id: engine.next_id(),
            at,
            latency_ms: i32::try_from(latency.as_millis()).unwrap_or(i32::MAX),
            status,
            answer,
            error,
        },
        outcome,
        pushed_seq: None,
        sender: row.delivery.message.as_ref().map(|message| AgentId::new(message.agent_id)),
        events,
    })
}

/// Posts an event once; whether it arrives is of no consequence but for what it shows of the endpoint.
pub(super) async fn post_once(pusher: &Pusher, endpoint: &Endpoint, call: request::Call) {
    let answered = send(pusher, endpoint, call).await;
    let now = pusher.engine.now();
    let (verdict, _, wait) = judged(endpoint, &answered, now);
    note(pusher, endpoint, &answered, verdict, wait, now).await;
}

/// What a call has shown of its endpoint. One that answers is there, whatever it thinks of the message.
async fn note(
    pusher: &Pusher,
    endpoint: &Endpoint,
    answered: &Result<Answer, NoAnswer>,
    verdict: Verdict,
    wait: Option<Duration>,
    now: DateTime<Utc>,
) {
    let (failed, throttles) = match verdict {
        Verdict::Failed { counts, throttles } => (counts, throttles),
        _ => (false, false),
    };
    let paused = throttles.then(|| now + delta(wait.unwrap_or(PAUSE_UNTOLD)));
    pusher.endpoints.note(endpoint, answered.is_ok() && !failed, failed, paused).await;
}

/// Why a call was not made or not answered, as it is told.
enum NoAnswer {
    Failure(Failure),
    NoProxy,
}

impl NoAnswer {
    fn text(&self) -> String {
        match self {
            Self::Failure(failure) => failure.to_string(),
            Self::NoProxy => "no proxy is configured".to_owned(),
        }
    }
}

async fn send(pusher: &Pusher, endpoint: &Endpoint, call: request::Call) -> Result<Answer, NoAnswer> {
    let client = pusher.engine.egress();
    let mut headers = call.headers;
    let target = match &endpoint.way {
        Way::Straight(target) => target,
        Way::ByProxy(proxy, auth) => {
            request::put(&mut headers, "x-forward-to", &endpoint.url);
            if let Some(auth) = auth {
                request::put(&mut headers, "x-proxy-auth", auth);
            }
            proxy
        }
        Way::NoProxy => return Err(NoAnswer::NoProxy),
        Way::Refused(refusal) => return Err(NoAnswer::Failure((*refusal).into())),
    };
    client.post(target, headers, call.body, Options::default()).await.map_err(NoAnswer::Failure)
}

/// What an answer means, what went wrong, and how long the endpoint asked to wait.
fn judged(
    endpoint: &Endpoint,
    answered: &Result<Answer, NoAnswer>,
    now: DateTime<Utc>,
) -> (Verdict, Option<String>, Option<Duration>) {
    match answered {
        Ok(answer) => {
            // What a body says counts in one mode only, and only if all of it was read.
            let is_heard = endpoint.ack_mode == AckMode::Response && !answer.is_truncated;
            let declared = if is_heard { request::declared(&answer.headers, &answer.body) } else { None };
            let said = push::Answer { status: answer.status, declared: declared.as_ref().map(|(word, _)| *word) };
            let verdict = judge(endpoint.ack_mode, said);
            let error = match verdict {
                Verdict::Delivered | Verdict::Acked => None,
                Verdict::Rejected => {
                    let why = declared.and_then(|(_, why)| why);
                    Some(why.unwrap_or_else(|| DeadReason::Rejected.error().to_owned()))
                }
                _ if (200..300).contains(&answer.status) => Some("response ack not signaled".to_owned()),
                _ => Some(format!("HTTP {}", answer.status)),
            };
            (verdict, error, retry_after(&answer.headers, now))
        }
        // A URL that is refused is not the endpoint's doing, and costs nobody a call.
        Err(failure @ NoAnswer::Failure(Failure::Refused(_)) | failure @ NoAnswer::NoProxy) => {
            (Verdict::Failed { counts: false, throttles: false }, Some(failure.text()), None)
        }
        // Our own want of room says nothing of the endpoint.
        Err(NoAnswer::Failure(Failure::Connect(error))) if error.kind() == std::io::ErrorKind::ResourceBusy => {
            (Verdict::Failed { counts: false, throttles: false }, Some(error.to_string()), None)
        }
        Err(failure) => (Verdict::Failed { counts: true, throttles: false }, Some(failure.text()), None),
    }
}

#[expect(clippy::too_many_arguments, reason = "all that decides what becomes of a delivery")]
fn outcome(
    endpoint: &Endpoint,
    mailbox: &TakenMailbox,
    row: &PushRow,
    verdict: Verdict,
    retry_no: i16,
    wait: Option<Duration>,
    error: Option<&str>,
    now: DateTime<Utc>,
) -> (Outcome, Vec<NewEvent>) {
    match verdict {
        Verdict::Delivered => (Outcome::Delivered, Vec::new()),
        Verdict::Acked => (Outcome::Acked, Vec::new()),
        Verdict::Gone => {
            let reason = error.unwrap_or("HTTP 410").to_owned();
            let data = json!({
                "node_id": endpoint.node_id.as_str(), "agent_id": mailbox.agent_id.to_string(),
                "agent_name": mailbox.agent_name, "reason": reason,
            });
            let event = NewEvent::new(event::NODE_BINDING_DISABLED, data).by(mailbox.agent_id);
            (Outcome::Disabled { retry_no, reason }, vec![event])
        }
        Verdict::Rejected => {
            let reason = DeadReason::Rejected;
            let event = given_up(mailbox, row, reason, error.unwrap_or(reason.error()));
            (Outcome::Dead { reason }, vec![event])
        }
        Verdict::Failed { .. } => {
            let failed = u32::try_from(retry_no).unwrap_or(u32::MAX);
            match (endpoint.retry.pause(failed, fastrand::u64(..)), wait) {
                (None, _) => {
                    let reason = DeadReason::AttemptsExhausted;
                    (Outcome::Dead { reason }, vec![given_up(mailbox, row, reason, EXHAUSTED)])
                }
                (Some(_), Some(wait)) => (Outcome::Retry { at: now + delta(wait), retry_no }, Vec::new()),
                (Some(pause), None) => (Outcome::Retry { at: now + delta(pause), retry_no }, Vec::new()),
            }
        }
    }
}

/// The delivery is a dead letter.
fn given_up(mailbox: &TakenMailbox, row: &PushRow, reason: DeadReason, error: &str) -> NewEvent {
    let letter = DeadLettered {
        scope: mailbox.scope,
        delivery_id: id_of(row),
        seq: row.delivery.seq,
        reason,
        error: Some(error.to_owned()),
        agent_name: Some(mailbox.agent_name.clone()),
        sender: None,
        place: place_of(row),
    };
    letter.event()
}

fn id_of(row: &PushRow) -> DeliveryId {
    let delivery = &row.delivery;
    DeliveryId { source: delivery.source_id, agent: delivery.agent_id, redrive_no: delivery.redrive_no }
}

fn place_of(row: &PushRow) -> Option<Place> {
    let message = row.delivery.message.as_ref()?;
    Some(Place {
        channel_id: ChannelId::new(message.channel_id),
        channel_name: message.channel_name.clone(),
        conversation_id: message.conversation_id.clone(),
    })
}

fn delta(pause: Duration) -> chrono::Duration {
    chrono::Duration::from_std(pause).unwrap_or_else(|_| chrono::Duration::seconds(30))
}

/// `Retry-After`: seconds, or an instant. At least a second, at most a day.
fn retry_after(headers: &HeaderMap, now: DateTime<Utc>) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let at = DateTime::parse_from_rfc2822(text).ok()?;
            (at.with_timezone(&Utc) - now).to_std().unwrap_or_default()
        }
    };
    Some(wait.clamp(Duration::from_secs(1), MAX_PAUSE))
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
