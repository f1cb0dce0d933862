//! Signatures of calls.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use chrono::{DateTime, Utc};
use http::HeaderMap;
use relay_domain::subscriptions::secrets::standard_webhooks_key;
use ring::hmac;

use crate::call::set_header;

/// Computes the HMAC-SHA-256 of the joined parts, in hexadecimal.
pub(crate) fn hmac_hex(key: &[u8], parts: &[&[u8]]) -> String {
    hex::encode(hmac_sha256(key, parts))
}

fn hmac_sha256(key: &[u8], parts: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    parts.iter().for_each(|part| context.update(part));
    context.sign()
}

/// Signs a call by the Standard Webhooks scheme: id, time and body. `webhook-id` must be `id`. Without a valid key
/// nothing is set; the queues give no endpoint whose secret does not suffice.
pub(crate) fn sign_standard_webhook(headers: &mut HeaderMap, secret: &str, id: &str, now: DateTime<Utc>, body: &[u8]) {
    let Some(key) = standard_webhooks_key(secret) else { return };
    let seconds = now.timestamp().to_string();
    let tag = hmac_sha256(&key, &[id.as_bytes(), b".", seconds.as_bytes(), b".", body]);
    set_header(headers, "webhook-timestamp", &seconds);
    set_header(headers, "webhook-signature", &format!("v1,{}", STANDARD.encode(tag)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_those_of_the_published_test_vectors() {
        // RFC 4231, test case 2.
        let tag = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(hmac_hex(b"Jefe", &[b"what do ya want ", b"for nothing?"]), tag);

        // Test vector of the Standard Webhooks libraries.
        let now = DateTime::from_timestamp(1_614_265_330, 0).unwrap();
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let (mut headers, id) = (HeaderMap::new(), "msg_p5jXN8AQM9LWM0D4loKWxJek");
        sign_standard_webhook(&mut headers, secret, id, now, br#"{"test": 2432232314}"#);
        assert_eq!(headers["webhook-timestamp"], "1614265330");
        assert_eq!(headers["webhook-signature"], "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        let mut headers = HeaderMap::new();
        sign_standard_webhook(&mut headers, "s3cret", id, now, b"{}");
        assert!(headers.is_empty());
    }
}
