//! Secrets of the Standard Webhooks scheme: `whsec_` and the key in Base64.

use base64::{Engine as _, engine::general_purpose::STANDARD};

/// Prefix of a secret.
const PREFIX: &str = "whsec_";
/// Length of the key.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// Decodes the key of a secret; `None` if it is none of this scheme.
pub(crate) fn signing_key(secret: &str) -> Option<Vec<u8>> {
    let key = STANDARD.decode(secret.strip_prefix(PREFIX)?).ok()?;
    KEY_BYTES.contains(&key.len()).then_some(key)
}
