//! Requests to endpoints: signed headers around the body (docs/protocol/node.md, "Push request").

use chrono::{DateTime, Utc};
use http::{HeaderMap, HeaderValue, header};
use relay_domain::{
    JsonText,
    mailboxes::{Content, StoredDelivery},
    push::{
        DeclaredOutcome,
        settings::{EndpointAuth, EndpointSecrets, SignedPayload},
    },
};
use relay_wire::{
    field::Timestamp,
    nodes::push_request::{DeliveryBody, EventCall, delivery_body},
};

use crate::{
    call::{HttpCall, set_header},
    signature::{hmac_hex, sign_standard_webhook},
};

/// Builds the request of a delivery; `None` when its message or invocation is no longer kept.
pub(super) fn delivery_call(
    row: &StoredDelivery,
    auth: &EndpointAuth,
    secrets: &EndpointSecrets,
    now: DateTime<Utc>,
) -> Option<HttpCall> {
    let DeliveryBody { kind, delivery_id, bytes } = delivery_body(row, now)?;
    let mut headers = common_headers(kind, &delivery_id);
    set_header(&mut headers, "x-relaycast-delivery", &delivery_id);
    authenticate(&mut headers, auth, secrets, &delivery_id, now, &bytes);
    Some(HttpCall { headers, body: bytes.into() })
}

/// Returns the size of a delivery's body before it is built, without what every body has. A conversation contains the
/// text twice.
pub(super) fn approximate_bytes(row: &StoredDelivery) -> usize {
    match &row.content {
        Content::Message(message) => {
            let blocks = message.blocks.as_ref().map_or(0, JsonText::byte_len);
            2 * message.text.len() + blocks + message.metadata.byte_len()
        }
        Content::Outcome { data, .. } => data.byte_len(),
        Content::Unread { .. } | Content::Dropped => 0,
    }
}

/// Builds the request of an event without a delivery.
pub(super) fn event_call(
    kind: &str,
    body: &EventCall<'_>,
    auth: &EndpointAuth,
    secrets: &EndpointSecrets,
    now: DateTime<Utc>,
) -> HttpCall {
    // Events have no delivery. Each is posted once, so a random id suffices for the signature and the header.
    let webhook_id = format!("whd_{}", uuid::Uuid::new_v4());
    // JSON values always encode.
    let body = serde_json::to_vec(body).unwrap_or_default();
    let mut headers = common_headers(kind, &webhook_id);
    authenticate(&mut headers, auth, secrets, &webhook_id, now, &body);
    HttpCall { headers, body: body.into() }
}

/// Creates the headers of every request.
fn common_headers(kind: &str, webhook_id: &str) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(12);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    set_header(&mut headers, "x-relaycast-event", kind);
    set_header(&mut headers, "webhook-id", webhook_id);
    headers
}

fn authenticate(
    headers: &mut HeaderMap,
    auth: &EndpointAuth,
    secrets: &EndpointSecrets,
    webhook_id: &str,
    now: DateTime<Utc>,
    body: &[u8],
) {
    // The queue gives no endpoint whose secrets do not suffice.
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
            let Some(secret) = &secrets.secret else { return };
            sign_standard_webhook(headers, secret, webhook_id, now, body);
        }
        EndpointAuth::HmacSha256 { signature_header, timestamp_header, signed_payload, prefix, .. } => {
            let Some(key) = secrets.secret.as_deref().map(str::as_bytes) else { return };
            let sent_at = Timestamp(now).to_string();
            let signature = match signed_payload {
                SignedPayload::Body => hmac_hex(key, &[body]),
                SignedPayload::TimestampAndBody => hmac_hex(key, &[sent_at.as_bytes(), b".", body]),
            };
            set_header(headers, timestamp_header, &sent_at);
            set_header(headers, signature_header, &format!("{prefix}{signature}"));
        }
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

    fn headers_of(auth: &EndpointAuth, secrets: &EndpointSecrets) -> HeaderMap {
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
        let secrets = EndpointSecrets { secret: Some("s3cret".into()), ..EndpointSecrets::default() };
        let headers = headers_of(&hmac_auth(SignedPayload::TimestampAndBody, None), &secrets);
        let sent_at = headers["x-relaycast-timestamp"].to_str().unwrap().to_owned();
        let expected = hmac_hex(b"s3cret", &[format!("{sent_at}.{{}}").as_bytes()]);
        assert_eq!(headers["x-relaycast-signature"], format!("sha256={expected}"));
        let headers = headers_of(&hmac_auth(SignedPayload::Body, None), &secrets);
        assert_eq!(headers["x-relaycast-signature"], format!("sha256={}", hmac_hex(b"s3cret", &[b"{}"])));

        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let secrets = EndpointSecrets { secret: Some(secret.into()), ..EndpointSecrets::default() };
        let headers = headers_of(&hmac_auth(SignedPayload::TimestampAndBody, Some("standard-webhooks")), &secrets);
        assert!(headers.contains_key("webhook-signature") && !headers.contains_key("x-relaycast-signature"));
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
