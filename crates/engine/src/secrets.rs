//! What the engine seals and signs with keys of its own.
//!
//! Sealing keeps what must be read again later (the secrets of nodes and event subscriptions); signing makes
//! addresses that only we can have minted (uploads and downloads of files). Each key has an id, which is
//! kept with what it sealed or signed: the first configured key is used from now on, the others stay
//! readable, so that keys can be changed without anything being lost.

use std::{fmt, str::FromStr, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use relay_store::{Store, subscriptions::Sealed};
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    hkdf, hmac,
};

use crate::{EngineError, EngineResult};

/// The longest id of a key.
const MAX_KEY_ID: usize = 32;
/// The id of the key that the engine makes for itself when none is configured.
const OWN_KEY: &str = "own1";

/// Keys as configured: `id:base64` of 32 bytes each, separated by commas. New things are sealed and signed
/// with the first one.
#[derive(Clone, Default)]
pub struct KeyList(Vec<(String, [u8; 32])>);

/// Shows ids, never keys.
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
            let fits = !id.is_empty() && id.len() <= MAX_KEY_ID && id.bytes().all(|b| b.is_ascii_alphanumeric());
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
}

/// The keys in use.
#[derive(Clone)]
pub(crate) struct Secrets {
    /// The first one seals and signs. Never empty.
    keys: Arc<[Key]>,
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|key| &key.id)).finish()
    }
}

impl Secrets {
    /// The configured keys, and those that the engine made for itself before. Without a configured one, it
    /// makes one and keeps it in Postgres, so that all processes have the same.
    ///
    /// # Errors
    /// When Postgres is away or there is no randomness.
    pub(crate) async fn load(store: &Store, configured: &KeyList) -> EngineResult<Self> {
        let mut known = configured.0.clone();
        if known.is_empty() {
            let mut fresh = [0; 32];
            getrandom::fill(&mut fresh).map_err(|_| EngineError::NoRandomness)?;
            store.keep_secret_key(OWN_KEY, &fresh).await?;
        }
        for (id, key) in store.secret_keys().await? {
            if let Ok(key) = key.try_into()
                && !known.iter().any(|(other, _)| *other == id)
            {
                known.push((id, key));
            }
        }
        Ok(Self::of(&known))
    }

    #[cfg(test)]
    pub(crate) fn for_test(id: &str) -> Self {
        Self::of(&[(id.to_owned(), [7; 32])])
    }

    /// Keys of these ids.
    #[cfg(test)]
    pub(crate) fn for_test_of(ids: &[&str]) -> Self {
        let keys: Vec<_> = ids.iter().map(|id| ((*id).to_owned(), [id.as_bytes()[0]; 32])).collect();
        Self::of(&keys)
    }

    fn of(keys: &[(String, [u8; 32])]) -> Self {
        Self { keys: keys.iter().filter_map(|(id, material)| Key::of(id, material)).collect() }
    }

    /// Seals bytes for one place, told by `context`: they cannot be opened as those of another.
    ///
    /// # Errors
    /// When there is no randomness.
    pub(crate) fn seal(&self, context: &str, plain: &[u8]) -> EngineResult<Sealed> {
        let key = self.keys.first().ok_or(EngineError::NoRandomness)?;
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(|_| EngineError::NoRandomness)?;
        let mut sealed = plain.to_vec();
        key.sealing
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(context.as_bytes()), &mut sealed)
            .map_err(|_| EngineError::NoRandomness)?;
        Ok(Sealed { key_id: key.id.clone(), bytes: [&nonce[..], &sealed].concat() })
    }

    /// The ids of keys that seal nothing any more.
    pub(crate) fn former_keys(&self) -> Vec<&str> {
        self.keys.iter().skip(1).map(|key| key.id.as_str()).collect()
    }

    /// Opens what was sealed for that place. `None` when it was sealed for another, was changed, or its key
    /// is no longer known.
    pub(crate) fn open(&self, context: &str, sealed: &Sealed) -> Option<Vec<u8>> {
        let key = self.keys.iter().find(|key| key.id == sealed.key_id)?;
        let (nonce, rest) = sealed.bytes.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut rest = rest.to_vec();
        let plain = key.sealing.open_in_place(nonce, Aad::from(context.as_bytes()), &mut rest).ok()?;
        Some(plain.to_vec())
    }

    /// The id of the key and the signature of some bytes.
    pub(crate) fn sign(&self, bytes: &[u8]) -> EngineResult<(&str, [u8; 32])> {
        let key = self.keys.first().ok_or(EngineError::NoRandomness)?;
        let tag = hmac::sign(&key.signing, bytes);
        let tag = tag.as_ref().try_into().map_err(|_| EngineError::NoRandomness)?;
        Ok((&key.id, tag))
    }

    /// Whether that key signed these bytes so.
    pub(crate) fn verify(&self, key_id: &str, bytes: &[u8], tag: &[u8]) -> bool {
        let key = self.keys.iter().find(|key| key.id == key_id);
        key.is_some_and(|key| hmac::verify(&key.signing, bytes, tag).is_ok())
    }
}

impl Key {
    /// A key for sealing and one for signing follow from the one that is kept. Always there for 32 bytes.
    fn of(id: &str, material: &[u8; 32]) -> Option<Self> {
        let base = hkdf::Salt::new(hkdf::HKDF_SHA256, b"relay").extract(material);
        let sealing = UnboundKey::from(base.expand(&[b"sealing"], &AES_256_GCM).ok()?);
        let signing = hmac::Key::from(base.expand(&[b"signing"], hmac::HMAC_SHA256).ok()?);
        Some(Self { id: id.to_owned(), sealing: LessSafeKey::new(sealing), signing })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(ids: &[&str]) -> Secrets {
        Secrets::for_test_of(ids)
    }

    #[test]
    fn what_was_sealed_is_read_after_the_keys_have_changed() {
        let old = secrets(&["a"]).seal("row 1", b"top secret").unwrap();
        assert!(!old.bytes.windows(3).any(|bytes| bytes == b"top"), "not in clear");
        let both = secrets(&["b", "a"]);
        assert_eq!(both.open("row 1", &old).as_deref(), Some(&b"top secret"[..]));
        assert_eq!(both.seal("row 1", b"x").unwrap().key_id, "b", "the first key seals");
        assert_eq!(secrets(&["b"]).open("row 1", &old), None, "its key is gone");
    }

    #[test]
    fn sealed_bytes_count_for_their_place_only() {
        let secrets = secrets(&["a"]);
        let sealed = secrets.seal("row 1", b"secret").unwrap();
        assert_eq!(secrets.open("row 2", &sealed), None);
        assert_ne!(secrets.seal("row 1", b"secret").unwrap().bytes, sealed.bytes, "a nonce is never used twice");
        for at in 0..sealed.bytes.len() {
            let mut changed = sealed.clone();
            changed.bytes[at] ^= 1;
            assert_eq!(secrets.open("row 1", &changed), None, "byte {at}");
        }
        assert_eq!(secrets.open("row 1", &Sealed { bytes: vec![1, 2], ..sealed }), None);
    }

    #[test]
    fn a_signature_counts_for_its_key_and_bytes() {
        let secrets = secrets(&["a", "b"]);
        let (key, tag) = secrets.sign(b"bytes").unwrap();
        assert!(secrets.verify(key, b"bytes", &tag));
        assert!(!secrets.verify("b", b"bytes", &tag));
        assert!(!secrets.verify("c", b"bytes", &tag));
        assert!(!secrets.verify(key, b"byte", &tag));
        assert!(!secrets.verify(key, b"bytes", &tag[..31]));
    }

    #[test]
    fn a_list_of_keys_is_checked() {
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
