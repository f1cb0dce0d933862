//! Message authentication codes: proof that a message on NATS was published by a process of this installation.
//!
//! [`FrameKeys`] signs everything that a receiver would act on without reading a row. The code covers the subject, the
//! body and every header that the receiver believes, so that a captured message is worthless for another agent, seq,
//! location or gateway. A message without a valid code is a wake-up: its receiver reads Postgres.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_nats::HeaderMap;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use relay_domain::metric_names::NATS_UNVERIFIED;
use ring::hmac;
use subtle::ConstantTimeEq as _;
use tokio::time::Instant;

/// Header with the code of a message.
pub(crate) const MAC: &str = "Relay-Mac";

const KEY_ID_BYTES: usize = 4;
const TAG_BYTES: usize = 32;
/// Interval of log messages about refused codes: an attacker must not fill the log.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Use of a message, as in the label `kind` of [`NATS_UNVERIFIED`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageKind {
    Delivery,
    Event,
    Hint,
    /// Message of a stream that recovery reads back.
    Logged,
}

impl MessageKind {
    const fn label(self) -> &'static str {
        match self {
            Self::Delivery => "delivery",
            Self::Event => "event",
            Self::Hint => "hint",
            Self::Logged => "logged",
        }
    }
}

/// Keys of the installation that sign messages. The first one signs, all verify. Cheap to clone.
#[derive(Clone)]
pub struct FrameKeys(Arc<Inner>);

struct Inner {
    keys: Vec<FrameKey>,
    refused: Mutex<RefusedCount>,
}

struct FrameKey {
    id: [u8; KEY_ID_BYTES],
    key: hmac::Key,
}

/// Refused messages since the last log message.
#[derive(Default)]
struct RefusedCount {
    count: u64,
    logged_at: Option<Instant>,
}

/// Prints ids, never keys.
impl fmt::Debug for FrameKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.keys.iter().map(|key| &key.id)).finish()
    }
}

/// Parts of a message that its code covers.
pub(crate) struct CoveredParts<'a> {
    /// Subject on which it is published, without [`crate::subjects::LIVE_PREFIX`].
    pub(crate) subject: &'a str,
    /// Headers that the receiver believes, in a fixed order.
    pub(crate) fields: &'a [&'a str],
    pub(crate) body: &'a [u8],
}

/// Headers that a receiver believes, and all headers of the message. One that is absent counts as empty.
#[derive(Clone, Copy)]
pub(crate) struct HeaderFields<'a> {
    pub(crate) headers: &'a HeaderMap,
    pub(crate) names: &'static [&'static str],
}

impl<'a> HeaderFields<'a> {
    fn values(self) -> Vec<&'a str> {
        self.names.iter().map(|name| self.headers.get(*name).map_or("", |value| value.as_str())).collect()
    }
}

impl FrameKeys {
    /// Creates the keys from secrets of 32 bytes. Without any, nothing verifies.
    pub fn new(secrets: impl IntoIterator<Item = [u8; 32]>) -> Self {
        let keys = secrets.into_iter().map(|secret| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
            let mut id = [0; KEY_ID_BYTES];
            // Derived from the key: all processes find the same id, and it reveals nothing of the key.
            id.copy_from_slice(&hmac::sign(&key, b"id").as_ref()[..KEY_ID_BYTES]);
            FrameKey { id, key }
        });
        Self(Arc::new(Inner { keys: keys.collect(), refused: Mutex::default() }))
    }

    /// Returns the code of a message, or an empty one without a key.
    pub(crate) fn sign(&self, covered: &CoveredParts<'_>) -> String {
        let Some(key) = self.0.keys.first() else { return String::new() };
        let mut code = [0; KEY_ID_BYTES + TAG_BYTES];
        let (id, tag) = code.split_at_mut(KEY_ID_BYTES);
        id.copy_from_slice(&key.id);
        tag.copy_from_slice(key.tag(covered).as_ref());
        URL_SAFE_NO_PAD.encode(code)
    }

    /// Returns the code of a message with headers.
    pub(crate) fn sign_headers(&self, subject: &str, fields: HeaderFields<'_>, body: &[u8]) -> String {
        self.sign(&CoveredParts { subject, fields: &fields.values(), body })
    }

    /// Returns whether a process of this installation has published the message with these headers; counts it if not.
    pub(crate) fn verify_headers(
        &self,
        kind: MessageKind,
        subject: &str,
        fields: HeaderFields<'_>,
        body: &[u8],
    ) -> bool {
        let code = fields.headers.get(MAC).map(|value| value.as_str());
        self.verify(kind, code, &CoveredParts { subject, fields: &fields.values(), body })
    }

    /// Returns whether a process of this installation has published the message; counts it if not.
    pub(crate) fn verify(&self, kind: MessageKind, code: Option<&str>, covered: &CoveredParts<'_>) -> bool {
        let verified = code.is_some_and(|code| self.is_valid(code, covered));
        if !verified {
            self.refuse(kind);
        }
        verified
    }

    fn is_valid(&self, code: &str, covered: &CoveredParts<'_>) -> bool {
        let mut decoded = [0; KEY_ID_BYTES + TAG_BYTES];
        if URL_SAFE_NO_PAD.decode_slice(code, &mut decoded) != Ok(decoded.len()) {
            return false;
        }
        let (id, tag) = decoded.split_at(KEY_ID_BYTES);
        // Ids are public, so only the tag is compared in constant time.
        let key = self.0.keys.iter().find(|key| key.id == id);
        key.is_some_and(|key| key.tag(covered).as_ref().ct_eq(tag).into())
    }

    /// Counts a message that is only a wake-up.
    pub(crate) fn refuse(&self, kind: MessageKind) {
        metrics::counter!(NATS_UNVERIFIED, "kind" => kind.label()).increment(1);
        let mut refused = self.0.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.count += 1;
        if refused.logged_at.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            let count = std::mem::take(&mut refused.count);
            refused.logged_at = Some(Instant::now());
            // Receivers of other messages do not wait for the line to be written.
            drop(refused);
            tracing::warn!(
                count,
                kind = kind.label(),
                "nats messages without a valid code were received, their rows are read from postgres: another version is \
                 running, RELAY_SECRET_KEYS differ between processes, or something else publishes to nats"
            );
        }
    }
}

impl FrameKey {
    /// Each part is preceded by its length, so that no two messages have the same encoding.
    fn tag(&self, covered: &CoveredParts<'_>) -> hmac::Tag {
        let mut context = hmac::Context::with_key(&self.key);
        let fields = covered.fields.iter().map(|field| field.as_bytes());
        for part in [covered.subject.as_bytes()].into_iter().chain(fields).chain([covered.body]) {
            context.update(&(part.len() as u64).to_le_bytes());
            context.update(part);
        }
        context.sign()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: CoveredParts<'static> =
        CoveredParts { subject: "d.7.1.2", fields: &["dlv_1", "7", ""], body: b"body" };

    #[test]
    fn a_code_is_valid_for_its_own_message_only() {
        let keys = FrameKeys::new([[1; 32]]);
        let code = keys.sign(&MESSAGE);
        assert!(keys.is_valid(&code, &MESSAGE));
        for (name, changed) in [
            ("another agent", CoveredParts { subject: "d.7.1.3", ..MESSAGE }),
            ("another seq", CoveredParts { fields: &["dlv_1", "8", ""], ..MESSAGE }),
            ("shifted fields", CoveredParts { fields: &["dlv_1", "", "7"], ..MESSAGE }),
            ("joined fields", CoveredParts { fields: &["dlv_17", "", ""], ..MESSAGE }),
            ("another body", CoveredParts { body: b"bodies", ..MESSAGE }),
            ("body as a field", CoveredParts { fields: &["dlv_1", "7", "", "body"], body: b"", ..MESSAGE }),
        ] {
            assert!(!keys.is_valid(&code, &changed), "{name}");
        }
        for at in 0..code.len() {
            let mut bytes = code.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            assert!(!keys.is_valid(&String::from_utf8(bytes).unwrap(), &MESSAGE), "character {at}");
        }
        for malformed in ["", "AAAA", &code[1..], &format!("{code}AAAA"), "!"] {
            assert!(!keys.is_valid(malformed, &MESSAGE), "{malformed}");
        }
    }

    #[test]
    fn the_first_key_signs_and_all_verify() {
        let (old, new) = (FrameKeys::new([[1; 32]]), FrameKeys::new([[2; 32], [1; 32]]));
        assert!(new.is_valid(&old.sign(&MESSAGE), &MESSAGE));
        assert!(!old.is_valid(&new.sign(&MESSAGE), &MESSAGE));
        let none = FrameKeys::new([]);
        assert!(!none.is_valid(&none.sign(&MESSAGE), &MESSAGE) && !none.is_valid(&old.sign(&MESSAGE), &MESSAGE));
    }
}
