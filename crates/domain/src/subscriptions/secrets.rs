//! Secrets of subscriptions and of push endpoints: the key of the Standard Webhooks scheme, and
//! [`SubscriptionSecrets`].

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use super::SignatureScheme;

/// Prefix of a secret of the Standard Webhooks scheme; the key in Base64 follows.
const PREFIX: &str = "whsec_";
/// Length of the key.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// Decodes the key of a secret; `None` if it is none of the Standard Webhooks scheme.
#[must_use]
pub fn standard_webhooks_key(secret: &str) -> Option<Vec<u8>> {
    let key = STANDARD.decode(secret.strip_prefix(PREFIX)?).ok()?;
    KEY_BYTES.contains(&key.len()).then_some(key)
}

/// Secret part of a subscription; stored encrypted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubscriptionSecrets {
    /// Secret that signs calls.
    pub secret: Option<String>,
    /// Values of the headers that calls carry.
    pub headers: BTreeMap<String, String>,
}

impl SubscriptionSecrets {
    /// Returns whether calls can be signed as the subscription demands.
    #[must_use]
    pub fn suffice_for(&self, scheme: Option<SignatureScheme>) -> bool {
        match scheme {
            None => true,
            Some(SignatureScheme::Relay) => self.secret.as_deref().is_some_and(|secret| !secret.is_empty()),
            Some(SignatureScheme::StandardWebhooks) => self.secret.as_deref().and_then(standard_webhooks_key).is_some(),
        }
    }
}
