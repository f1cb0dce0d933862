//! Signatures of calls to endpoints.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use relay_testkit::receiver::Received;
use ring::hmac;

pub fn hmac_sha256(key: &[u8], data: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), data).as_ref().to_vec()
}

/// Returns the expected `webhook-signature` of a call under Standard Webhooks.
pub fn standard_signature(key: &[u8], call: &Received) -> String {
    let (id, sent_at) = (call.header("webhook-id"), call.header("webhook-timestamp"));
    let signed = [id.as_bytes(), b".", sent_at.as_bytes(), b".", &call.body].concat();
    format!("v1,{}", STANDARD.encode(hmac_sha256(key, &signed)))
}
