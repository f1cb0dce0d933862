//! Idempotency keys: repeated requests have one effect.
//!
//! The response is stored in the transaction of the effect (for messages, by the committer); this module reads it back.

use relay_domain::{WorkspaceScope, names};
use relay_store::IdempotencyKey;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{
    EngineError, EngineResult,
    core::Core,
    error::{Conflict, InvalidInput},
};

/// Idempotency key of a client with the hash of the request body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientKey {
    text: String,
    fingerprint: [u8; 32],
}

impl ClientKey {
    /// Parses the header. Bodies that differ only in white space, in the order of keys, in `data` being null or absent,
    /// or in the ignored fields are equal.
    ///
    /// # Errors
    /// When the key is not 1 to 255 visible ASCII characters.
    pub fn read(header: &str, body: &[u8], ignored_fields: &[&str]) -> EngineResult<Self> {
        let text =
            names::parse_idempotency_key(header).ok_or(EngineError::Invalid(InvalidInput::IdempotencyKey))?.to_owned();
        let canonical = serde_json::from_slice::<Value>(body).map(|mut value| {
            if let Value::Object(fields) = &mut value {
                fields.retain(|name, _| !ignored_fields.contains(&name.as_str()));
                if fields.get("data").is_some_and(Value::is_null) {
                    fields.remove("data");
                }
            }
            value.sort_all_objects();
            value.to_string()
        });
        let fingerprint = match canonical {
            Ok(text) => Sha256::digest(text),
            // Empty body, or one that is refused later.
            Err(_) => Sha256::digest(body),
        };
        Ok(Self { text, fingerprint: fingerprint.into() })
    }

    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the stored form of the key and of its request.
    #[must_use]
    pub fn stored(&self, actor: &str, operation: &str, target: &str) -> IdempotencyKey {
        IdempotencyKey { hash: self.hash(actor, operation, target), fingerprint: self.fingerprint }
    }

    /// Returns the stored form of the key. It is specific to one actor (an agent id, or `-`), operation and target.
    fn hash(&self, actor: &str, operation: &str, target: &str) -> [u8; 32] {
        let mut digest = Sha256::new();
        for part in [actor, operation, target, &self.text] {
            // The length sets the parts apart: otherwise `ab`, `c` and `a`, `bc` would have one hash.
            digest.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
            digest.update(part);
        }
        digest.finalize().into()
    }
}

/// Stored response of an earlier request.
#[derive(Debug, Clone)]
pub struct Replay {
    pub status: u16,
    pub data: Value,
}

impl Replay {
    /// Returns the record, if it is of this type.
    pub(crate) fn record<T: DeserializeOwned>(self) -> Option<T> {
        serde_json::from_value(self.data).ok()
    }
}

impl Core {
    /// Returns the response that was stored under a key in the last 24 hours.
    ///
    /// # Errors
    /// When the key was used with another body.
    pub(crate) async fn replay(&self, scope: WorkspaceScope, key: &IdempotencyKey) -> EngineResult<Option<Replay>> {
        let Some(stored) = self.store.stored_response(scope, &key.hash).await? else { return Ok(None) };
        if stored.fingerprint != key.fingerprint {
            return Err(EngineError::Conflict(Conflict::IdempotencyKeyReused));
        }
        Ok(Some(Replay { status: stored.status.unsigned_abs(), data: stored.response }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_hashes_differ_by_actor_operation_and_target() {
        let key = ClientKey::read(" k1 ", b"{}", &[]).unwrap();
        let hashes = [
            key.hash("1", "message.post", "2"),
            key.hash("12", "message.post", ""),
            key.hash("1", "dm.post", "2"),
            ClientKey::read("k2", b"{}", &[]).unwrap().hash("1", "message.post", "2"),
        ];
        for (at, hash) in hashes.iter().enumerate() {
            assert!(!hashes[..at].contains(hash));
        }
        assert_eq!(key.text(), "k1");
        assert!(ClientKey::read("a b", b"", &[]).is_err());
    }

    #[test]
    fn equal_bodies_have_equal_fingerprints() {
        let a = ClientKey::read("k", br#"{"a":1,"b":[2]}"#, &[]).unwrap();
        let b = ClientKey::read("k", br#"{ "b": [2], "a": 1 }"#, &[]).unwrap();
        let c = ClientKey::read("k", br#"{"a":1,"b":[3]}"#, &[]).unwrap();
        assert_eq!(a.fingerprint, b.fingerprint);
        assert_ne!(a.fingerprint, c.fingerprint);
        let of = |body: &[u8]| ClientKey::read("k", body, &[]).unwrap().fingerprint;
        assert_eq!(of(br#"{"text":"a"}"#), of(br#"{"data":null,"text":"a"}"#));
        assert_ne!(of(br#"{"text":"a"}"#), of(br#"{"data":{},"text":"a"}"#));
    }
}
