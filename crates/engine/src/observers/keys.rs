//! Keys that sign observer tokens: generated here and stored in Postgres, the private half encrypted when a secret is
//! configured.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use jsonwebtoken::{DecodingKey, EncodingKey};
use relay_store::SigningKeyRow;
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    rand::SystemRandom,
    signature::{Ed25519KeyPair, KeyPair as _},
};
use sha2::{Digest, Sha256};

use crate::{EngineError, EngineResult, access::secrets::MIN_SECRET_BYTES, error::Fault};

/// Secret that encrypts the private halves of signing keys. Never printed.
pub struct SealingSecret {
    key: LessSafeKey,
    /// Identifies the secret that encrypted a key.
    id: String,
}

impl std::fmt::Debug for SealingSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SealingSecret(…)")
    }
}

impl SealingSecret {
    /// Derives the key from any text of at least 32 bytes, best from a random source.
    pub fn new(text: &str) -> EngineResult<Self> {
        if text.len() < MIN_SECRET_BYTES {
            return Err(EngineError::invalid_request(format!(
                "the secret for signing keys must have at least {MIN_SECRET_BYTES} bytes"
            )));
        }
        let digest = |purpose: &str| Sha256::new().chain_update(purpose).chain_update(text).finalize();
        // Key and id are derived with labels of their own: the id is stored in the clear and says nothing about the
        // key.
        let key = UnboundKey::new(&AES_256_GCM, &digest("relay signing key seal\0"))
            .map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
        let id = hex::encode(&digest("relay signing key seal id\0")[..8]);
        Ok(Self { key: LessSafeKey::new(key), id })
    }

    fn seal(&self, kid: &str, mut private: Vec<u8>) -> EngineResult<Vec<u8>> {
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
        self.key
            // `kid` is authenticated too: a private half does not open in the row of another key.
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(kid), &mut private)
            .map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
        Ok([&nonce[..], &private].concat())
    }

    fn open(&self, kid: &str, sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, sealed) = sealed.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut bytes = sealed.to_vec();
        self.key.open_in_place(nonce, Aad::from(kid), &mut bytes).ok().map(|opened| opened.to_vec())
    }
}

/// Generates a key to be stored.
pub(super) fn generate(secret: Option<&SealingSecret>, at: DateTime<Utc>) -> EngineResult<SigningKeyRow> {
    let document =
        Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
    let pair = Ed25519KeyPair::from_pkcs8(document.as_ref()).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
    let public_key = pair.public_key().as_ref().to_vec();
    // Short, because it is part of every token.
    let kid = hex::encode(&Sha256::digest(&public_key)[..8]);
    let private = document.as_ref().to_vec();
    let private_key = match secret {
        Some(secret) => secret.seal(&kid, private)?,
        None => private,
    };
    Ok(SigningKeyRow {
        kid,
        public_key,
        private_key: Some(private_key),
        sealed_with: secret.map(|secret| secret.id.clone()),
        created_at: at,
        retired_at: None,
    })
}

/// Active keys as this process knows them.
#[derive(Default)]
pub(super) struct KeyRing {
    verifying: HashMap<String, DecodingKey>,
    signing: Option<(String, EncodingKey)>,
}

impl KeyRing {
    /// Builds the ring from the stored keys, newest first. It signs with the newest key that is encrypted with exactly
    /// our secret, or unencrypted when we have none: two gateways with different secrets each have their own.
    pub(super) fn read(rows: &[SigningKeyRow], secret: Option<&SealingSecret>) -> Self {
        let living = || rows.iter().filter(|row| row.retired_at.is_none());
        let signing =
            living().filter(|row| row.sealed_with.as_ref() == secret.map(|secret| &secret.id)).find_map(|row| {
                let stored = row.private_key.as_ref()?;
                let private = match secret {
                    Some(secret) => secret.open(&row.kid, stored)?,
                    None => stored.clone(),
                };
                Some((row.kid.clone(), EncodingKey::from_ed_der(&private)))
            });
        let verifying = living().map(|row| (row.kid.clone(), DecodingKey::from_ed_der(&row.public_key))).collect();
        Self { verifying, signing }
    }

    /// Returns the public half of an active key.
    pub(super) fn verifying_key(&self, kid: &str) -> Option<&DecodingKey> {
        self.verifying.get(kid)
    }

    /// Returns the id and private half of the key to sign with.
    pub(super) const fn signing_key(&self) -> Option<&(String, EncodingKey)> {
        self.signing.as_ref()
    }

    /// True if both rings have the same keys.
    pub(super) fn has_same_keys(&self, other: &Self) -> bool {
        // Only verifying keys decide about access. Another signing key ends none.
        self.verifying.len() == other.verifying.len()
            && self.verifying.keys().all(|kid| other.verifying.contains_key(kid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> SealingSecret {
        SealingSecret::new(&text.repeat(32)).expect("a secret")
    }

    fn signing_kid(rows: &[SigningKeyRow], secret: Option<&SealingSecret>) -> Option<String> {
        KeyRing::read(rows, secret).signing_key().map(|(kid, _)| kid.clone())
    }

    #[test]
    fn encrypted_keys_open_only_with_their_secret() {
        let (a, b) = (secret("a"), secret("b"));
        let row = generate(Some(&a), DateTime::default()).expect("a key");
        let stored = row.private_key.clone().expect("a private half");
        assert!(Ed25519KeyPair::from_pkcs8(&stored).is_err(), "what is stored is not the key");
        assert_eq!(signing_kid(std::slice::from_ref(&row), Some(&a)), Some(row.kid.clone()));
        assert_eq!(signing_kid(std::slice::from_ref(&row), Some(&b)), None);
        assert_eq!(signing_kid(std::slice::from_ref(&row), None), None);
        // Bound to its id: a stored half cannot be passed off as another key's.
        assert!(a.open("another", &stored).is_none() && a.open(&row.kid, &stored).is_some());
        assert!(SealingSecret::new("short").is_err());
        assert!(!format!("{a:?}").contains(&a.id));
    }

    #[test]
    fn active_keys_verify_and_our_newest_signs() {
        let a = secret("a");
        let key = |secret| generate(secret, DateTime::default()).expect("a key");
        let (newest, older, plain, mut retired) = (key(Some(&a)), key(Some(&a)), key(None), key(Some(&a)));
        retired.retired_at = Some(DateTime::default());
        let rows = [retired.clone(), newest.clone(), older.clone(), plain.clone()];
        let ring = KeyRing::read(&rows, Some(&a));
        assert_eq!(ring.signing_key().map(|(kid, _)| kid), Some(&newest.kid));
        for (row, lives) in [(&newest, true), (&older, true), (&plain, true), (&retired, false)] {
            assert_eq!(ring.verifying_key(&row.kid).is_some(), lives);
        }
        assert_eq!(signing_kid(&rows, None), Some(plain.kid));
        assert!(
            ring.has_same_keys(&KeyRing::read(&rows, None)) && !ring.has_same_keys(&KeyRing::read(&rows[..2], None))
        );
    }
}
