//! What is sent to an endpoint: the body and its headers, signed (contract: node.md 13.2).

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use relay_domain::{DeliveryId, delivery::Mode, push::Declared};
use relay_store::replay::StoredDelivery;
use ring::hmac;
use serde::Serialize;

use super::delivery::{DeliverySecrets, NodeAuth, standard_key};
use crate::{
    payload::{self, Data, Shown},
    render::timestamp,
};

/// A call, ready to be sent.
#[derive(Debug)]
pub(super) struct Call {
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
    data: Told<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    topic: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_ids: Option<[String; 1]>,
}

/// What a delivery tells: a message, or what came of an invocation.
#[derive(Serialize)]
#[serde(untagged)]
enum Told<'a> {
    Message(&'a Data<'a>),
    Outcome(&'a serde_json::Value),
}

/// About what a body has around its message's text, which conversations have twice.
const AROUND_TEXT: usize = 1024;
/// What the events are about that an outcome would be told by if it were not delivered.
const OUTCOME_TOPIC: &str = "agent";

/// The call for a delivery; `None` when its message, or the invocation, is gone. That of an outcome has what the event
/// without a delivery would have, too (contract: node.md 13.5).
pub(super) fn durable(
    row: &StoredDelivery,
    auth: &NodeAuth,
    secrets: &DeliverySecrets,
    now: DateTime<Utc>,
) -> Option<Call> {
    let (shown, posted);
    let (kind, data, text_bytes) = match (&row.message, &row.outcome) {
        (Some(message), _) => {
            shown = Shown::new(message, &row.agent_name);
            posted = shown.data();
            (shown.kind(), Told::Message(&posted), message.text.len())
        }
        (None, Some((kind, data))) => (&**kind, Told::Outcome(data), 0),
        (None, None) => return None,
    };
    let is_outcome = matches!(data, Told::Outcome(_));
    let id = DeliveryId { source: row.source_id, agent: row.agent_id, redrive_no: row.redrive_no };
    let delivery_id = id.to_string();
    let sent_at = timestamp(now);
    let body = Body {
        kind,
        workspace_id: row.scope.workspace_id().to_string(),
        delivery_id: &delivery_id,
        message_id: payload::message_id(&id),
        agent_id: row.agent_id.to_string(),
        agent_name: &row.agent_name,
        seq: row.seq,
        mode: Mode::from_code(row.mode).unwrap_or_default().as_str(),
        timestamp: &sent_at,
        data,
        topic: is_outcome.then_some(OUTCOME_TOPIC),
        agent_ids: is_outcome.then(|| [row.agent_id.to_string()]),
    };
    // Strings, numbers and JSON values always encode.
    let mut encoded = Vec::with_capacity(AROUND_TEXT + 2 * text_bytes);
    serde_json::to_writer(&mut encoded, &body).ok()?;
    let body = Bytes::from(encoded);
    let mut headers = common(kind, &delivery_id);
    set(&mut headers, "x-relaycast-delivery", &delivery_id);
    authenticate(&mut headers, auth, secrets, &delivery_id, &sent_at, now, &body);
    Some(Call { headers, body })
}

/// The call for an event that no delivery carries.
pub(super) fn ephemeral(
    kind: &str,
    body: &serde_json::Value,
    auth: &NodeAuth,
    secrets: &DeliverySecrets,
    now: DateTime<Utc>,
) -> Call {
    let mut random = [0; 16];
    // Without randomness the id is not unique, which costs a receiver that goes by it one event.
    let _ = getrandom::fill(&mut random);
    random[6] = (random[6] & 0x0f) | 0x40;
    random[8] = (random[8] & 0x3f) | 0x80;
    let hex = hex::encode(random);
    let uuid = format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    let webhook_id = format!("whd_{uuid}");
    // JSON values always encode.
    let body = Bytes::from(serde_json::to_vec(body).unwrap_or_default());
    let mut headers = common(kind, &webhook_id);
    authenticate(&mut headers, auth, secrets, &webhook_id, &timestamp(now), now, &body);
    Call { headers, body }
}

/// What every call carries.
fn common(kind: &str, webhook_id: &str) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(12);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    set(&mut headers, "x-relaycast-event", kind);
    set(&mut headers, "webhook-id", webhook_id);
    headers
}

fn authenticate(
    headers: &mut HeaderMap,
    auth: &NodeAuth,
    secrets: &DeliverySecrets,
    webhook_id: &str,
    sent_at: &str,
    now: DateTime<Utc>,
    body: &[u8],
) {
    match auth {
        NodeAuth::None => {}
        NodeAuth::Bearer { .. } => {
            put(headers, "authorization", &format!("Bearer {}", secrets.token.as_deref().unwrap_or_default()));
        }
        NodeAuth::StaticHeaders { .. } => {
            for (name, value) in &secrets.headers {
                put(headers, name, value);
            }
        }
        NodeAuth::HmacSha256 { signature_scheme: Some(_), .. } => {
            let seconds = now.timestamp().to_string();
            let key = secrets.secret.as_deref().and_then(standard_key).unwrap_or_default();
            let tag = sign(&key, &[webhook_id.as_bytes(), b".", seconds.as_bytes(), b".", body]);
            set(headers, "webhook-timestamp", &seconds);
            set(headers, "webhook-signature", &format!("v1,{}", STANDARD.encode(tag)));
        }
        NodeAuth::HmacSha256 { signature_header, timestamp_header, signed_payload, prefix, .. } => {
            let key = secrets.secret.as_deref().unwrap_or_default().as_bytes();
            let tag = if signed_payload == "body" {
                sign(key, &[body])
            } else {
                sign(key, &[sent_at.as_bytes(), b".", body])
            };
            put(headers, timestamp_header, sent_at);
            put(headers, signature_header, &format!("{prefix}{}", hex::encode(tag)));
        }
    }
}

fn sign(key: &[u8], parts: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    parts.iter().for_each(|part| context.update(part));
    context.sign()
}

/// Sets a header that every such call has.
fn set(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// Sets a header. What names or values cannot be was refused when the node was made.
pub(super) fn put(headers: &mut HeaderMap, name: &str, value: &str) {
    if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
        headers.insert(name, value);
    }
}

/// What an answer's JSON declares, with the reason of a refusal; `None` when it declares nothing.
pub(super) fn declared(headers: &HeaderMap, body: &[u8]) -> Option<(Declared, Option<String>)> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence != "application/json" && !essence.ends_with("+json") {
        return None;
    }
    let serde_json::Value::Object(body) = serde_json::from_slice(body).ok()? else { return None };
    let status = body.get("delivery_status").and_then(serde_json::Value::as_str);
    match status {
        _ if body.get("ack") == Some(&true.into()) => Some((Declared::Acked, None)),
        Some("acked") => Some((Declared::Acked, None)),
        Some("rejected") => {
            let why = body.get("error").and_then(serde_json::Value::as_str).unwrap_or_default();
            // Postgres takes no NUL in a text.
            let why = why.replace('\0', "");
            Some((Declared::Rejected, (!why.is_empty()).then_some(why)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers_of(auth: &NodeAuth, secrets: &DeliverySecrets) -> HeaderMap {
        let now = DateTime::from_timestamp_millis(1_777_629_601_250).unwrap();
        let mut headers = common("message.created", "del_1_2");
        authenticate(&mut headers, auth, secrets, "del_1_2", &timestamp(now), now, b"{}");
        headers
    }

    fn hmac_auth(signed_payload: &str, signature_scheme: Option<&str>) -> NodeAuth {
        NodeAuth::HmacSha256 {
            secret: String::new(),
            signature_header: "X-Relaycast-Signature".into(),
            timestamp_header: "X-Relaycast-Timestamp".into(),
            signed_payload: signed_payload.into(),
            encoding: "hex".into(),
            prefix: "sha256=".into(),
            signature_scheme: signature_scheme.map(str::to_owned),
        }
    }

    #[test]
    fn signatures_are_over_what_the_contract_says() {
        let secrets = DeliverySecrets { secret: Some("s3cret".into()), ..DeliverySecrets::default() };
        let headers = headers_of(&hmac_auth("timestamp.body", None), &secrets);
        let sent_at = headers["x-relaycast-timestamp"].to_str().unwrap().to_owned();
        let key = hmac::Key::new(hmac::HMAC_SHA256, b"s3cret");
        let expected = hex::encode(hmac::sign(&key, format!("{sent_at}.{{}}").as_bytes()));
        assert_eq!(headers["x-relaycast-signature"], format!("sha256={expected}"));
        let headers = headers_of(&hmac_auth("body", None), &secrets);
        assert_eq!(headers["x-relaycast-signature"], format!("sha256={}", hex::encode(hmac::sign(&key, b"{}"))));

        // The example of the Standard Webhooks' own libraries.
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let secrets = DeliverySecrets { secret: Some(secret.into()), ..DeliverySecrets::default() };
        let now = DateTime::from_timestamp(1_614_265_330, 0).unwrap();
        let (mut headers, id) = (HeaderMap::new(), "msg_p5jXN8AQM9LWM0D4loKWxJek");
        let auth = hmac_auth("timestamp.body", Some("standard-webhooks"));
        authenticate(&mut headers, &auth, &secrets, id, "", now, br#"{"test": 2432232314}"#);
        assert_eq!(headers["webhook-timestamp"], "1614265330");
        assert_eq!(headers["webhook-signature"], "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        assert!(!headers.contains_key("x-relaycast-signature"));
    }

    #[test]
    fn an_answer_declares_in_json_only() {
        let check = |content_type: &str, body: &str| {
            let mut headers = HeaderMap::new();
            put(&mut headers, "content-type", content_type);
            declared(&headers, body.as_bytes())
        };
        let (acked, refused) =
            (Some((Declared::Acked, None)), |why: Option<&str>| Some((Declared::Rejected, why.map(str::to_owned))));
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
