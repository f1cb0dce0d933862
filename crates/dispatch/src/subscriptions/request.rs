//! Calls to subscriptions (docs/protocol/rest.md, "Subscription calls").

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use chrono::{DateTime, Utc};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use relay_domain::{
    WorkspaceScope,
    messages::Message,
    subscriptions::{EventFilter, SignatureScheme, call::mentions_name},
};
use relay_store::{
    events::{Event, EventBody},
    subscriptions::dispatch::{LeasedSubscription, PendingCall},
};
use relay_wire::{field::ToValue as _, subscriptions::SubscriptionCall};
use ring::hmac;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    access::standard_webhooks::signing_key,
    messages::{payload::payload, render::timestamp},
    subscriptions::definitions::SubscriptionSecrets,
};

/// Builds the data of an event as nodes get it: one flat object. `message` is the version that the event refers to.
pub(super) fn event_data(event: &Event, message: Option<&Message>) -> Map<String, Value> {
    #[derive(Deserialize)]
    struct Payload {
        data: Map<String, Value>,
    }
    let mut data = match &event.body {
        EventBody::Data(Value::Object(data)) => data.clone(),
        EventBody::Data(_) => Map::new(),
        EventBody::Message(id) => match message {
            // The recipient of a direct message follows from the conversation; a subscription is no mailbox.
            Some(message) => {
                let read: Option<Payload> = serde_json::from_str(payload(message, "").get()).ok();
                let mut data = read.map(|payload| payload.data).unwrap_or_default();
                data.remove("to");
                data
            }
            // Retention has dropped it: only its id is still known.
            None => Map::from_iter([("id".to_owned(), Value::from(id.to_string()))]),
        },
    };
    let mut add = |key: &str, value: Option<Value>| {
        if let (Some(value), false) = (value, data.contains_key(key)) {
            data.insert(key.to_owned(), value);
        }
    };
    add("channel_id", event.channel_id.map(|id| Value::from(id.to_string())));
    add("channel_name", event.channel_name.as_deref().map(Value::from));
    add("conversation_id", event.conversation_id.as_deref().map(Value::from));
    data
}

/// True if the filter matches an event.
pub(super) fn matches_filter(filter: &EventFilter, channel_name: Option<&str>, data: &Map<String, Value>) -> bool {
    let text = || {
        let text = data.get("text").or_else(|| data.get("message")?.get("text"));
        text.and_then(Value::as_str).unwrap_or_default()
    };
    filter.channel.as_deref().is_none_or(|channel| channel_name == Some(channel))
        && filter.mentions.as_deref().is_none_or(|name| mentions_name(text(), name))
}

/// Builds the body, which is the same for each attempt.
pub(super) fn call_body(scope: WorkspaceScope, kind: &str, at: DateTime<Utc>, data: Map<String, Value>) -> String {
    SubscriptionCall { kind, workspace_id: scope.workspace_id(), timestamp: at.into(), data }.to_value().to_string()
}

/// Builds the headers of one attempt.
pub(super) fn call_headers(
    leased: &LeasedSubscription,
    secrets: &SubscriptionSecrets,
    waiting: &PendingCall,
    now: DateTime<Utc>,
) -> HeaderMap {
    let mut headers = HeaderMap::new();
    // Names and values were checked when the subscription was created; invalid headers are left out.
    let mut set = |name: &str, value: &str| {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            headers.insert(name, value);
        }
    };
    for (name, value) in &secrets.headers {
        set(name, value);
    }
    let id = waiting.delivery_id.to_string();
    set(header::CONTENT_TYPE.as_str(), "application/json");
    set("x-relay-event", &waiting.event_kind);
    set("x-relay-timestamp", &timestamp(waiting.created_at));
    set("x-relay-delivery", &id);
    set("webhook-id", &id);
    let Some(secret) = &secrets.secret else { return headers };
    match leased.signature_scheme.unwrap_or(SignatureScheme::Relay) {
        SignatureScheme::Relay => {
            let tag = sign(secret.as_bytes(), &[waiting.body.as_bytes()]);
            set("x-relay-signature", &format!("sha256={}", hex::encode(tag)));
        }
        SignatureScheme::StandardWebhooks => {
            // `serve` leaves a subscription whose secret is no such key.
            let Some(key) = signing_key(secret) else { return headers };
            let seconds = now.timestamp().to_string();
            let signed = [id.as_bytes(), b".", seconds.as_bytes(), b".", waiting.body.as_bytes()];
            set("webhook-timestamp", &seconds);
            set("webhook-signature", &format!("v1,{}", STANDARD.encode(sign(&key, &signed))));
        }
    }
    headers
}

/// Parses `Retry-After`: seconds or a date (RFC 9110, 10.2.3).
pub(super) fn retry_after(headers: &HeaderMap, now: DateTime<Utc>) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let at = DateTime::parse_from_rfc2822(text).ok()?;
    Some((at.with_timezone(&Utc) - now).to_std().unwrap_or_default())
}

fn sign(key: &[u8], parts: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    parts.iter().for_each(|part| context.update(part));
    context.sign()
}

#[cfg(test)]
mod tests {
    use relay_domain::{SubscriptionDeliveryId, SubscriptionId, WorkspaceId};

    use serde_json::json;

    use super::*;

    fn leased(scheme: SignatureScheme) -> LeasedSubscription {
        LeasedSubscription {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(1)),
            id: SubscriptionId::new(2),
            epoch: 1,
            events: vec!["*".into()],
            filter: None,
            url: "https://example.org".into(),
            signature_scheme: Some(scheme),
            secret: None,
            event_cursor: None,
            failures: 0,
            failing_since: None,
        }
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).unwrap()
    }

    fn signed(scheme: SignatureScheme, secret: &str, id: i64, body: &str, now: i64) -> HeaderMap {
        let waiting = PendingCall {
            delivery_id: SubscriptionDeliveryId::new(id),
            event_kind: "message.created".into(),
            body: body.into(),
            attempts: 0,
            next_attempt_at: at(0),
            created_at: at(0),
            traceparent: None,
        };
        let secrets = SubscriptionSecrets {
            secret: Some(secret.into()),
            headers: [("X-Own".to_owned(), "a b".to_owned())].into(),
        };
        call_headers(&leased(scheme), &secrets, &waiting, at(now))
    }

    #[test]
    fn the_relay_scheme_signs_the_body() {
        // RFC 4231, test case 2.
        let headers = signed(SignatureScheme::Relay, "Jefe", 7, "what do ya want for nothing?", 0);
        let tag = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(headers["x-relay-signature"], format!("sha256={tag}"));
        assert_eq!((&headers["x-own"], &headers["webhook-id"]), (&"a b".parse().unwrap(), &"7".parse().unwrap()));
        assert_eq!(headers["x-relay-event"], "message.created");
        assert!(!headers.contains_key("webhook-signature"));
    }

    #[test]
    fn the_standard_scheme_signs_id_time_and_body() {
        let key = b"a key of exactly 32 bytes length";
        let secret = format!("whsec_{}", STANDARD.encode(key));
        let headers = signed(SignatureScheme::StandardWebhooks, &secret, 7, "{}", 1_614_265_330);
        let expected = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), b"7.1614265330.{}");
        assert_eq!(headers["webhook-signature"], format!("v1,{}", STANDARD.encode(expected)));
        assert_eq!(headers["webhook-timestamp"], "1614265330");
        assert!(!headers.contains_key("x-relay-signature"));
    }

    #[test]
    fn filters_compare_channels_and_look_for_mentions() {
        let flat = Map::from_iter([("text".to_owned(), json!("hi @bob"))]);
        let nested = Map::from_iter([("message".to_owned(), json!({ "text": "hi @bob" }))]);
        let filter = |channel: Option<&str>, mentions: Option<&str>| EventFilter {
            channel: channel.map(str::to_owned),
            mentions: mentions.map(str::to_owned),
        };
        for (filter, channel, passed) in [
            (filter(None, None), None, true),
            (filter(Some("dev"), None), Some("dev"), true),
            (filter(Some("dev"), None), Some("ops"), false),
            (filter(Some("dev"), None), None, false),
            (filter(None, Some("bob")), None, true),
            (filter(None, Some("ann")), None, false),
            (filter(Some("dev"), Some("bob")), Some("ops"), false),
        ] {
            for data in [&flat, &nested] {
                assert_eq!(matches_filter(&filter, channel, data), passed, "{filter:?} {channel:?}");
            }
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        for (text, seconds) in [
            ("7", Some(7)),
            ("Thu, 01 Jan 1970 00:01:40 GMT", Some(40)),
            ("Thu, 01 Jan 1970 00:00:00 GMT", Some(0)),
            ("soon", None),
            ("-1", None),
        ] {
            let headers = HeaderMap::from_iter([(header::RETRY_AFTER, text.parse().unwrap())]);
            assert_eq!(retry_after(&headers, at(60)), seconds.map(Duration::from_secs), "{text}");
        }
    }
}
