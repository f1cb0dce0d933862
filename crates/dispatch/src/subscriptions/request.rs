//! Headers of calls to subscriptions (docs/protocol/rest.md, "Subscription calls"). The body is the same for each
//! attempt.

use chrono::{DateTime, Utc};
use http::{HeaderMap, header};
use relay_domain::subscriptions::{SignatureScheme, dispatch::PendingCall, secrets::SubscriptionSecrets};
use relay_wire::field::Timestamp;

use crate::{
    call::{HttpCall, set_header},
    signature::{hmac_hex, sign_standard_webhook},
};

/// Builds the request of one attempt, which takes the body.
pub(super) fn request(
    scheme: Option<SignatureScheme>,
    secrets: &SubscriptionSecrets,
    pending: &mut PendingCall,
    now: DateTime<Utc>,
) -> HttpCall {
    let mut headers = HeaderMap::new();
    // The headers of the tenant first, so that none of them replaces one of ours.
    for (name, value) in &secrets.headers {
        set_header(&mut headers, name, value);
    }
    let id = pending.delivery_id.to_string();
    set_header(&mut headers, header::CONTENT_TYPE.as_str(), "application/json");
    set_header(&mut headers, "x-relay-event", &pending.event_kind);
    // Time of the event, the same for each attempt. A standard signature has a time of its own.
    set_header(&mut headers, "x-relay-timestamp", &Timestamp(pending.created_at).to_string());
    set_header(&mut headers, "x-relay-delivery", &id);
    set_header(&mut headers, "webhook-id", &id);
    let body = pending.body.as_bytes();
    if let Some(secret) = &secrets.secret {
        match scheme.unwrap_or(SignatureScheme::Relay) {
            SignatureScheme::Relay => {
                let signature = hmac_hex(secret.as_bytes(), &[body]);
                set_header(&mut headers, "x-relay-signature", &format!("sha256={signature}"));
            }
            SignatureScheme::StandardWebhooks => sign_standard_webhook(&mut headers, secret, &id, now, body),
        }
    }
    HttpCall { headers, body: std::mem::take(&mut pending.body).into() }
}

#[cfg(test)]
mod tests {
    use relay_domain::SubscriptionDeliveryId;

    use super::*;

    fn signed(scheme: SignatureScheme, secret: &str) -> HeaderMap {
        let at = DateTime::from_timestamp(0, 0).unwrap();
        let mut pending = PendingCall {
            delivery_id: SubscriptionDeliveryId::new(7),
            event_kind: "message.created".into(),
            body: "{}".into(),
            attempts: 0,
            next_attempt_at: at,
            created_at: at,
            traceparent: None,
        };
        let secrets = SubscriptionSecrets {
            secret: Some(secret.into()),
            headers: [("X-Own".to_owned(), "a b".to_owned())].into(),
        };
        request(Some(scheme), &secrets, &mut pending, at).headers
    }

    #[test]
    fn the_relay_scheme_signs_the_body() {
        let headers = signed(SignatureScheme::Relay, "Jefe");
        assert_eq!(headers["x-relay-signature"], format!("sha256={}", hmac_hex(b"Jefe", &[b"{}"])));
        assert_eq!((&headers["x-own"], &headers["webhook-id"]), (&"a b".parse().unwrap(), &"7".parse().unwrap()));
        assert_eq!(headers["x-relay-event"], "message.created");
        assert_eq!(headers["x-relay-timestamp"], "1970-01-01T00:00:00.000Z");
        assert!(!headers.contains_key("webhook-signature"));
    }

    #[test]
    fn the_standard_scheme_signs_under_the_id_of_the_delivery() {
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let headers = signed(SignatureScheme::StandardWebhooks, secret);
        let mut expected = HeaderMap::new();
        sign_standard_webhook(&mut expected, secret, "7", DateTime::from_timestamp(0, 0).unwrap(), b"{}");
        assert_eq!(headers["webhook-signature"], expected["webhook-signature"]);
        assert_eq!(headers["webhook-timestamp"], "0");
        assert!(!headers.contains_key("x-relay-signature"));
    }
}
