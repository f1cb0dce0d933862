//! Idempotency keys: one request, one effect, however often it is sent.
//!
//! The stored answer is written in the transaction of the effect (for messages: by the committer); this
//! is what reads it back.

use relay_domain::{WorkspaceScope, names};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{Engine, EngineError, EngineResult};

/// A key as a client sent it, with the hash of the body that came along.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientKey {
    text: String,
    fingerprint: [u8; 32],
}

impl ClientKey {
    /// Reads the header. Bodies that differ in white space or in the order of their keys are the same.
    ///
    /// # Errors
    /// When the key is not 1 to 255 visible ASCII characters.
    pub fn read(header: &str, body: &[u8]) -> EngineResult<Self> {
        let text = names::idempotency_key(header).ok_or(EngineError::InvalidIdempotencyKey)?.to_owned();
        let canonical = serde_json::from_slice::<Value>(body).map(|mut value| {
            value.sort_all_objects();
            value.to_string()
        });
        let fingerprint = match canonical {
            Ok(text) => Sha256::digest(text),
            // No body, or one that is refused anyway.
            Err(_) => Sha256::digest(body),
        };
        Ok(Self { text, fingerprint: fingerprint.into() })
    }

    /// The key itself.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// SHA-256 of the body.
    #[must_use]
    pub const fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// What the key is stored as: it counts for one actor (an agent id, or `-`), operation and target.
    #[must_use]
    pub fn hash(&self, actor: &str, operation: &str, target: &str) -> [u8; 32] {
        let mut digest = Sha256::new();
        for part in [actor, operation, target, &self.text] {
            digest.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
            digest.update(part);
        }
        digest.finalize().into()
    }
}

/// An answer given before.
#[derive(Debug, Clone)]
pub struct Replay {
    /// Its HTTP status.
    pub status: u16,
    /// Its `data`.
    pub data: Value,
}

impl Engine {
    /// What was answered under a key in the last 24 hours.
    ///
    /// # Errors
    /// When the key was used with another body.
    pub async fn replay(
        &self,
        scope: WorkspaceScope,
        key_hash: &[u8; 32],
        fingerprint: &[u8; 32],
    ) -> EngineResult<Option<Replay>> {
        let Some(stored) = self.store().stored_response(scope, key_hash).await? else { return Ok(None) };
        if stored.fingerprint != fingerprint {
            return Err(EngineError::IdempotencyKeyReused);
        }
        Ok(Some(Replay { status: stored.status.unsigned_abs(), data: stored.response }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_counts_for_one_actor_operation_and_target() {
        let key = ClientKey::read(" k1 ", b"{}").unwrap();
        let hashes = [
            key.hash("1", "message.post", "2"),
            key.hash("12", "message.post", ""),
            key.hash("1", "dm.post", "2"),
            ClientKey::read("k2", b"{}").unwrap().hash("1", "message.post", "2"),
        ];
        for (at, hash) in hashes.iter().enumerate() {
            assert!(!hashes[..at].contains(hash));
        }
        assert_eq!(key.text(), "k1");
        assert!(ClientKey::read("a b", b"").is_err());
    }

    #[test]
    fn equal_bodies_have_equal_fingerprints() {
        let a = ClientKey::read("k", br#"{"a":1,"b":[2]}"#).unwrap();
        let b = ClientKey::read("k", br#"{ "b": [2], "a": 1 }"#).unwrap();
        let c = ClientKey::read("k", br#"{"a":1,"b":[3]}"#).unwrap();
        assert_eq!(a.fingerprint(), b.fingerprint());
        assert_ne!(a.fingerprint(), c.fingerprint());
    }
}
