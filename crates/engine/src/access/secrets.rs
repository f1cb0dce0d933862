//! Encryption and signatures with the installation's own keys.
//!
//! Encryption protects secrets that must be read again (of nodes and event subscriptions); signatures protect file
//! URLs. The id of the key is stored with its output: the first configured key is used for new values, the others
//! remain readable, so that keys can be rotated.

use std::{fmt, str::FromStr, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use relay_store::{Store, subscriptions::definitions::EncryptedSecret};
use relay_stream::FrameKeys;
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    hkdf, hmac,
};

use crate::{EngineError, EngineResult, error::Fault};

/// Minimum length of a configured secret.
pub(crate) const MIN_SECRET_BYTES: usize = 32;
const MAX_KEY_ID_BYTES: usize = 32;
/// Id of the key that is generated into Postgres when none is configured.
const GENERATED_KEY_ID: &str = "own1";

/// Configured keys: `id:base64` of 32 bytes each, separated by commas. The first one encrypts and signs.
#[derive(Clone, Default)]
pub struct KeyList(Vec<(String, [u8; 32])>);

impl KeyList {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Prints ids, never keys.
impl fmt::Debug for KeyList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(id, _)| id)).finish()
    }
}

impl FromStr for KeyList {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut keys: Vec<(String, [u8; 32])> = Vec::new();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (id, key) = entry.split_once(':').ok_or("a key is written as id:base64")?;
            let fits = !id.is_empty() && id.len() <= MAX_KEY_ID_BYTES && id.bytes().all(|b| b.is_ascii_alphanumeric());
            if !fits {
                return Err("the id of a key has 1 to 32 letters and digits");
            }
            if keys.iter().any(|(known, _)| known == id) {
                return Err("two keys have the same id");
            }
            let key = STANDARD.decode(key).ok().and_then(|bytes| bytes.try_into().ok());
            keys.push((id.to_owned(), key.ok_or("a key is 32 bytes in base64")?));
        }
        Ok(Self(keys))
    }
}

struct Key {
    id: String,
    sealing: LessSafeKey,
    signing: hmac::Key,
    /// Secret of the codes that messages on NATS carry.
    frames: [u8; 32],
}

#[derive(Clone)]
pub(crate) struct Secrets {
    /// Never empty. The first one encrypts and signs.
    keys: Arc<[Key]>,
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|key| &key.id)).finish()
    }
}

impl Secrets {
    /// Loads the configured keys and the generated one. Without a configured key, one is generated and stored in
    /// Postgres, so that all processes share it.
    ///
    /// # Errors
    /// When the system has no randomness.
    pub(crate) async fn load(store: &Store, configured: &KeyList) -> EngineResult<Self> {
        let mut known = configured.0.clone();
        if known.is_empty() {
            let mut fresh = [0; 32];
            getrandom::fill(&mut fresh).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
            // Another process may have stored its own key first. The read below returns the one that all of them use.
            store.insert_secret_key(GENERATED_KEY_ID, &fresh).await?;
        }
        add_generated(store, &mut known).await?;
        Ok(Self::from_keys(&known))
    }

    /// Keys of the codes that messages on NATS carry.
    pub(crate) fn frame_keys(&self) -> FrameKeys {
        FrameKeys::new(self.keys.iter().map(|key| key.frames))
    }

    #[cfg(test)]
    pub(crate) fn for_test(id: &str) -> Self {
        Self::from_keys(&[(id.to_owned(), [7; 32])])
    }

    #[cfg(test)]
    pub(crate) fn for_test_keys(ids: &[&str]) -> Self {
        let keys: Vec<_> = ids.iter().map(|id| ((*id).to_owned(), [id.as_bytes()[0]; 32])).collect();
        Self::from_keys(&keys)
    }

    fn from_keys(keys: &[(String, [u8; 32])]) -> Self {
        Self { keys: keys.iter().filter_map(|(id, material)| Key::derive(id, material)).collect() }
    }

    /// Encrypts bytes for one place, named by `context`: they cannot be decrypted for another.
    ///
    /// # Errors
    /// When the system has no randomness.
    pub(crate) fn seal(&self, context: &str, plain: &[u8]) -> EngineResult<EncryptedSecret> {
        let key = self.keys.first().ok_or(EngineError::Internal(Fault::NoRandomness))?;
        // Random: processes share the key without a common counter.
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
        let mut sealed = plain.to_vec();
        key.sealing
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(context.as_bytes()), &mut sealed)
            .map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
        Ok(EncryptedSecret { key_id: key.id.clone(), bytes: [&nonce[..], &sealed].concat() })
    }

    /// Ids of the keys that no longer encrypt.
    pub(crate) fn former_keys(&self) -> Vec<&str> {
        self.keys.iter().skip(1).map(|key| key.id.as_str()).collect()
    }

    /// Decrypts bytes for a place. `None` when they belong to another place, were changed, or their key is unknown.
    pub(crate) fn open(&self, context: &str, sealed: &EncryptedSecret) -> Option<Vec<u8>> {
        let key = self.keys.iter().find(|key| key.id == sealed.key_id)?;
        let (nonce, rest) = sealed.bytes.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut rest = rest.to_vec();
        let plain = key.sealing.open_in_place(nonce, Aad::from(context.as_bytes()), &mut rest).ok()?;
        Some(plain.to_vec())
    }

    /// Id of the key that encrypts and signs.
    pub(crate) fn current_key_id(&self) -> &str {
        self.keys.first().map_or(GENERATED_KEY_ID, |key| &key.id)
    }

    /// Returns the signature by a known key; `None` if it has been removed.
    pub(crate) fn sign(&self, key_id: &str, bytes: &[u8]) -> Option<[u8; 32]> {
        let key = self.keys.iter().find(|key| key.id == key_id)?;
        hmac::sign(&key.signing, bytes).as_ref().try_into().ok()
    }

    pub(crate) fn verify(&self, key_id: &str, bytes: &[u8], tag: &[u8]) -> bool {
        let key = self.keys.iter().find(|key| key.id == key_id);
        key.is_some_and(|key| hmac::verify(&key.signing, bytes, tag).is_ok())
    }
}

/// Loads the keys of the codes that messages on NATS carry, without generating one.
///
/// # Errors
/// When Postgres is unavailable.
pub async fn load_frame_keys(store: &Store, configured: &KeyList) -> EngineResult<FrameKeys> {
    let mut known = configured.0.clone();
    add_generated(store, &mut known).await?;
    Ok(Secrets::from_keys(&known).frame_keys())
}

/// Adds the keys that were generated into Postgres behind the configured ones.
async fn add_generated(store: &Store, known: &mut Vec<(String, [u8; 32])>) -> EngineResult<()> {
    for row in store.secret_keys().await? {
        if !known.iter().any(|(other, _)| *other == row.key_id) {
            known.push((row.key_id, row.key));
        }
    }
    Ok(())
}

/// Length of a derived secret, for HKDF.
struct FrameSecret;

impl hkdf::KeyType for FrameSecret {
    fn len(&self) -> usize {
        32
    }
}

impl Key {
    /// Derives one key for each use from the stored one. Never `None` for 32 bytes.
    fn derive(id: &str, material: &[u8; 32]) -> Option<Self> {
        let base = hkdf::Salt::new(hkdf::HKDF_SHA256, b"relay").extract(material);
        let sealing = UnboundKey::from(base.expand(&[b"sealing"], &AES_256_GCM).ok()?);
        let signing = hmac::Key::from(base.expand(&[b"signing"], hmac::HMAC_SHA256).ok()?);
        let mut frames = [0; 32];
        base.expand(&[b"frames"], FrameSecret).ok()?.fill(&mut frames).ok()?;
        Some(Self { id: id.to_owned(), sealing: LessSafeKey::new(sealing), signing, frames })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(ids: &[&str]) -> Secrets {
        Secrets::for_test_keys(ids)
    }

    #[test]
    fn former_keys_still_decrypt_after_a_rotation() {
        let old = secrets(&["a"]).seal("row 1", b"top secret").unwrap();
        assert!(!old.bytes.windows(3).any(|bytes| bytes == b"top"), "not in clear");
        let both = secrets(&["b", "a"]);
        assert_eq!(both.open("row 1", &old).as_deref(), Some(&b"top secret"[..]));
        assert_eq!(both.seal("row 1", b"x").unwrap().key_id, "b", "the first key seals");
        assert_eq!(secrets(&["b"]).open("row 1", &old), None, "its key is no longer configured");
    }

    #[test]
    fn encrypted_bytes_open_in_their_own_context_only() {
        let secrets = secrets(&["a"]);
        let sealed = secrets.seal("row 1", b"secret").unwrap();
        assert_eq!(secrets.open("row 2", &sealed), None);
        assert_ne!(secrets.seal("row 1", b"secret").unwrap().bytes, sealed.bytes, "a nonce is never used twice");
        for at in 0..sealed.bytes.len() {
            let mut changed = sealed.clone();
            changed.bytes[at] ^= 1;
            assert_eq!(secrets.open("row 1", &changed), None, "byte {at}");
        }
        assert_eq!(secrets.open("row 1", &EncryptedSecret { bytes: vec![1, 2], ..sealed }), None);
    }

    #[test]
    fn signature_verifies_only_its_key_and_bytes() {
        let secrets = secrets(&["a", "b"]);
        let key = secrets.current_key_id();
        let tag = secrets.sign(key, b"bytes").unwrap();
        assert!(secrets.verify(key, b"bytes", &tag));
        assert!(!secrets.verify("b", b"bytes", &tag));
        assert!(!secrets.verify("c", b"bytes", &tag));
        assert!(!secrets.verify(key, b"byte", &tag));
        assert!(!secrets.verify(key, b"bytes", &tag[..31]));
    }

    #[test]
    fn key_lists_are_validated() {
        let key = STANDARD.encode([7; 32]);
        let list: KeyList = format!("k2:{key}, k1:{key}").parse().unwrap();
        assert_eq!(list.0.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["k2", "k1"]);
        assert!(!format!("{list:?}").contains(&key));
        for text in ["k1", "k1:", "k1:AAAA", &format!(":{key}"), &format!("a b:{key}"), &format!("k:{key},k:{key}")] {
            assert!(text.parse::<KeyList>().is_err(), "{text}");
        }
        assert!("".parse::<KeyList>().is_ok_and(|list| list.0.is_empty()));
    }
}
