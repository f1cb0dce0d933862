//! Requests to endpoints: body and signed headers (docs/protocol/node.md, "Push request").

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use relay_domain::{
    DeliveryId,
    push::{
        DeclaredOutcome,
        settings::{EndpointAuth, SignedPayload},
    },
};
use relay_store::mailboxes::replay::StoredDelivery;
use relay_wire::nodes::EventCall;
use ring::hmac;
use serde::Serialize;

use super::delivery::DeliverySecrets;
use crate::{
    access::standard_webhooks::signing_key,
    messages::{
        payload::{self, MessageData, MessageView},
        render::timestamp,
    },
};

/// Request to an endpoint.
#[derive(Debug)]
pub(super) struct HttpCall {
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

#[derive(Serialize)]
struct Body<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    workspace_id: String,
    delivery_id: &'a str,
    message_id: String,
    agent_id: String,
    agent_name: &'a str,
    seq: i64,
    mode: &'static str,
    timestamp: &'a str,
    data: BodyData<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    topic: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_ids: Option<[String; 1]>,
}

/// Data of a delivery: a message, or the outcome of an invocation.
#[derive(Serialize)]
#[serde(untagged)]
enum BodyData<'a> {
    Message(&'a MessageData<'a>),
    Outcome(&'a serde_json::Value),
}

/// Bytes around the message's text, which conversations contain twice.
const BODY_OVERHEAD: usize = 1024;
/// Topic of an outcome that is sent as an event.
const OUTCOME_TOPIC: &str = "agent";

/// Builds the request of a delivery; `None` when its message or invocation is no longer kept. The request of an outcome
/// also has the fields of the event (docs/protocol/node.md, "Push request").
pub(super) fn delivery_call(
    row: &StoredDelivery,
    auth: &EndpointAuth,
    secrets: &DeliverySecrets,
    now: DateTime<Utc>,
) -> Option<HttpCall> {
    let (shown, posted);
    let (kind, data, text_bytes) = match (&row.message, &row.outcome) {
        (Some(message), _) => {
            shown = MessageView::new(message, &row.agent_name);
            posted = shown.data();
            (shown.kind(), BodyData::Message(&posted), message.text.len())
        }
        (None, Some((kind, data))) => (&**kind, BodyData::Outcome(data), 0),
        (None, None) => return None,
    };
    let is_outcome = matches!(data, BodyData::Outcome(_));
    let id = DeliveryId { source: row.source_id, agent: row.agent_id, redrive_no: row.redrive_no };
    let delivery_id = id.to_string();
    let sent_at = timestamp(now);
    let body = Body {
        kind,
        workspace_id: row.scope.workspace_id().to_string(),
        delivery_id: &delivery_id,
        message_id: payload::delivered_message_id(&id),
        agent_id: row.agent_id.to_string(),
        agent_name: &row.agent_name,
        seq: row.seq,
        mode: row.mode.as_str(),
        timestamp: &sent_at,
        data,
        topic: is_outcome.then_some(OUTCOME_TOPIC),
        agent_ids: is_outcome.then(|| [row.agent_id.to_string()]),
    };
    // Strings, numbers and JSON values always encode.
    let mut encoded = Vec::with_capacity(BODY_OVERHEAD + 2 * text_bytes);
    serde_json::to_writer(&mut encoded, &body).ok()?;
    let body = Bytes::from(encoded);
    let mut headers = common_headers(kind, &delivery_id);
    set_static_header(&mut headers, "x-relaycast-delivery", &delivery_id);
    authenticate(&mut headers, auth, secrets, &delivery_id, now, &body);
    Some(HttpCall { headers, body })
}

/// Builds the request of an event without a delivery.
pub(super) fn event_call(
    kind: &str,
    body: &EventCall<'_>,
    auth: &EndpointAuth,
    secrets: &DeliverySecrets,
    now: DateTime<Utc>,
) -> HttpCall {
    let webhook_id = format!("whd_{}", uuid::Uuid::new_v4());
    // JSON values always encode.
    let body = Bytes::from(serde_json::to_vec(body).unwrap_or_default());
    let mut headers = common_headers(kind, &webhook_id);
    authenticate(&mut headers, auth, secrets, &webhook_id, now, &body);
    HttpCall { headers, body }
}

/// Creates the headers of every request.
fn common_headers(kind: &str, webhook_id: &str) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(12);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    set_static_header(&mut headers, "x-relaycast-event", kind);
    set_static_header(&mut headers, "webhook-id", webhook_id);
    headers
}

fn authenticate(
    headers: &mut HeaderMap,
    auth: &EndpointAuth,
    secrets: &DeliverySecrets,
    webhook_id: &str,
    now: DateTime<Utc>,
    body: &[u8],
) {
    // `Endpoints` gives no endpoint whose secrets do not suffice.
    match auth {
        EndpointAuth::None => {}
        EndpointAuth::Bearer { .. } => {
            let Some(token) = &secrets.token else { return };
            set_header(headers, "authorization", &format!("Bearer {token}"));
        }
        EndpointAuth::StaticHeaders { .. } => {
            for (name, value) in &secrets.headers {
                set_header(headers, name, value);
            }
        }
        EndpointAuth::HmacSha256 { signature_scheme: Some(_), .. } => {
            let seconds = now.timestamp().to_string();
            let Some(key) = secrets.secret.as_deref().and_then(signing_key) else { return };
            let tag = sign(&key, &[webhook_id.as_bytes(), b".", seconds.as_bytes(), b".", body]);
            set_static_header(headers, "webhook-timestamp", &seconds);
            set_static_header(headers, "webhook-signature", &format!("v1,{}", STANDARD.encode(tag)));
        }
        EndpointAuth::HmacSha256 { signature_header, timestamp_header, signed_payload, prefix, .. } => {
            let Some(key) = secrets.secret.as_deref().map(str::as_bytes) else { return };
            let sent_at = timestamp(now);
            let tag = match signed_payload {
                SignedPayload::Body => sign(key, &[body]),
                SignedPayload::TimestampAndBody => sign(key, &[sent_at.as_bytes(), b".", body]),
            };
            set_header(headers, timestamp_header, &sent_at);
            set_header(headers, signature_header, &format!("{prefix}{}", hex::encode(tag)));
        }
    }
}

fn sign(key: &[u8], parts: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    parts.iter().for_each(|part| context.update(part));
    context.sign()
}

/// Sets a header with a static name.
fn set_static_header(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// Sets a header. Invalid names and values were refused when the node was enrolled.
pub(super) fn set_header(headers: &mut HeaderMap, name: &str, value: &str) {
    if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
        headers.insert(name, value);
    }
}

/// Reads the ack declared by a JSON response, with the error of a rejection; `None` without one.
pub(super) fn declared_ack(headers: &HeaderMap, body: &[u8]) -> Option<(DeclaredOutcome, Option<String>)> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence != "application/json" && !essence.ends_with("+json") {
        return None;
    }
    let serde_json::Value::Object(body) = serde_json::from_slice(body).ok()? else { return None };
    let status = body.get("delivery_status").and_then(serde_json::Value::as_str);
    match status {
        _ if body.get("ack") == Some(&true.into()) => Some((DeclaredOutcome::Acked, None)),
        Some("acked") => Some((DeclaredOutcome::Acked, None)),
        Some("rejected") => {
            let why = body.get("error").and_then(serde_json::Value::as_str).unwrap_or_default();
            // Postgres accepts no NUL in text.
            let why = why.replace('\0', "");
            Some((DeclaredOutcome::Rejected, (!why.is_empty()).then_some(why)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers_of(auth: &EndpointAuth, secrets: &DeliverySecrets) -> HeaderMap {
        let now = DateTime::from_timestamp_millis(1_777_629_601_250).unwrap();
        let mut headers = common_headers("message.created", "del_1_2");
        authenticate(&mut headers, auth, secrets, "del_1_2", now, b"{}");
        headers
    }

    fn hmac_auth(signed_payload: SignedPayload, signature_scheme: Option<&str>) -> EndpointAuth {
        EndpointAuth::HmacSha256 {
            secret: String::new(),
            signature_header: "X-Relaycast-Signature".into(),
            timestamp_header: "X-Relaycast-Timestamp".into(),
            signed_payload,
            encoding: "hex".into(),
            prefix: "sha256=".into(),
            signature_scheme: signature_scheme.map(str::to_owned),
        }
    }

    #[test]
    fn signatures_cover_the_documented_bytes() {
        let secrets = DeliverySecrets { secret: Some("s3cret".into()), ..DeliverySecrets::default() };
        let headers = headers_of(&hmac_auth(SignedPayload::TimestampAndBody, None), &secrets);
        let sent_at = headers["x-relaycast-timestamp"].to_str().unwrap().to_owned();
        let key = hmac::Key::new(hmac::HMAC_SHA256, b"s3cret");
        let expected = hex::encode(hmac::sign(&key, format!("{sent_at}.{{}}").as_bytes()));
        assert_eq!(headers["x-relaycast-signature"], format!("sha256={expected}"));
        let headers = headers_of(&hmac_auth(SignedPayload::Body, None), &secrets);
        assert_eq!(headers["x-relaycast-signature"], format!("sha256={}", hex::encode(hmac::sign(&key, b"{}"))));

        // Test vector of the Standard Webhooks libraries.
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let secrets = DeliverySecrets { secret: Some(secret.into()), ..DeliverySecrets::default() };
        let now = DateTime::from_timestamp(1_614_265_330, 0).unwrap();
        let (mut headers, id) = (HeaderMap::new(), "msg_p5jXN8AQM9LWM0D4loKWxJek");
        let auth = hmac_auth(SignedPayload::TimestampAndBody, Some("standard-webhooks"));
        authenticate(&mut headers, &auth, &secrets, id, now, br#"{"test": 2432232314}"#);
        assert_eq!(headers["webhook-timestamp"], "1614265330");
        assert_eq!(headers["webhook-signature"], "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        assert!(!headers.contains_key("x-relaycast-signature"));
    }

    #[test]
    fn acks_are_declared_in_json_only() {
        let check = |content_type: &str, body: &str| {
            let mut headers = HeaderMap::new();
            set_header(&mut headers, "content-type", content_type);
            declared_ack(&headers, body.as_bytes())
        };
        let (acked, refused) = (Some((DeclaredOutcome::Acked, None)), |why: Option<&str>| {
            Some((DeclaredOutcome::Rejected, why.map(str::to_owned)))
        });
        for (content_type, body, expected) in [
            ("application/json", r#"{"ack":true}"#, acked.clone()),
            ("application/json; charset=utf-8", r#"{"delivery_status":"acked"}"#, acked.clone()),
            ("application/problem+json", r#"{"ack":true}"#, acked),
            ("application/json", r#"{"delivery_status":"rejected"}"#, refused(None)),
            (
                "application/json",
                r#"{"delivery_status":"rejected","error":"no such room"}"#,
                refused(Some("no such room")),
            ),
            (
                "application/json",
                r#"{"delivery_status":"rejected","error":"no\u0000 such\u0000 room"}"#,
                refused(Some("no such room")),
            ),
            ("application/json", r#"{"delivery_status":"rejected","error":"\u0000"}"#, refused(None)),
            ("text/plain", r#"{"ack":true}"#, None),
            ("text/plain", r#"{"delivery_status":"rejected"}"#, None),
            ("application/json", r#"{"ack":"true"}"#, None),
            ("application/json", r#"{"ack":1}"#, None),
            ("application/json", r#"{"ack":false}"#, None),
            ("application/json", r#"{"delivery_status":"delivered"}"#, None),
            ("application/json", r#"[{"ack":true}]"#, None),
            ("application/json", r#"{"ack":tru"#, None),
            ("", r#"{"ack":true}"#, None),
        ] {
            assert_eq!(check(content_type, body), expected, "{content_type} {body}");
        }
    }
}
