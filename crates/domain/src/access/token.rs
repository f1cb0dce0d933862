//! Bearer tokens: their kinds, text form and stored form.
//!
//! A token is shown once and never stored; only SHA-256 over the whole token string is. Tokens carry 128 random bits,
//! so a hash without salt or stretching is enough.

use std::{fmt, hash, str::FromStr};

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::ids::InvalidId;

/// Random bytes in a workspace, agent or node token.
pub const TOKEN_BYTES: usize = 16;
/// Maximum length of a token. Longer texts are rejected without a lookup.
pub const MAX_TOKEN_LENGTH: usize = 256;
/// Maximum length of an observer token, which is signed and carries its scopes and filters. Observer tokens travel in
/// URLs, and common proxies accept URLs of 8 KiB.
pub const MAX_OBSERVER_TOKEN_LENGTH: usize = 4096;

/// Purpose of a token, encoded in its prefix.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    serde::Serialize,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum TokenKind {
    /// `rk_live_`: administers one workspace.
    Workspace,
    /// `at_live_`: acts as one agent.
    Agent,
    /// `nt_live_`: opens the socket of one node.
    Node,
    /// `ot_live_`: reads, within scopes.
    Observer,
    /// `wh_live_`: posts through one inbound webhook.
    Webhook,
}

crate::columns::stored_name!(TokenKind);

impl TokenKind {
    /// Returns the prefix of every token of this kind.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Workspace => "rk_live_",
            Self::Agent => "at_live_",
            Self::Node => "nt_live_",
            Self::Observer => "ot_live_",
            Self::Webhook => "wh_live_",
        }
    }

    /// Returns the kind that a token claims to be, or `None` when the prefix is unknown or nothing follows it.
    #[must_use]
    pub fn from_prefix(token: &str) -> Option<Self> {
        let kind = Self::ALL.iter().copied().find(|kind| token.starts_with(kind.prefix()))?;
        let longest = if kind == Self::Observer { MAX_OBSERVER_TOKEN_LENGTH } else { MAX_TOKEN_LENGTH };
        (kind.prefix().len() + 1..=longest).contains(&token.len()).then_some(kind)
    }

    /// Formats a token of this kind from fresh random bytes.
    #[must_use]
    pub fn format_token(self, random: [u8; TOKEN_BYTES]) -> String {
        format!("{}{}", self.prefix(), hex::encode(random))
    }
}

/// Originator of a change of credentials or settings, as the event log records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ChangeOrigin {
    WorkspaceKey,
    /// The agent itself.
    Agent,
    /// A node that took the agent over.
    Node,
    /// An operator of the installation.
    Operator,
}

impl ChangeOrigin {
    /// Returns the word in events.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// SHA-256 of a whole token string. Comparison takes constant time; `Debug` prints no part of the hash.
#[derive(Clone, Copy)]
#[cfg_attr(feature = "sqlx", derive(sqlx::Type), sqlx(transparent))]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// Hashes a token.
    #[must_use]
    pub fn from_token(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }

    /// Wraps a hash that was read from storage or from a hint.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes for storage.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl PartialEq for TokenHash {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for TokenHash {}

impl hash::Hash for TokenHash {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

/// Lower-case hex, the form in messages between processes. Never log it.
impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl FromStr for TokenHash {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| InvalidId { kind: "token hash" })?;
        Ok(Self(bytes))
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reveals_its_kind() {
        for &kind in TokenKind::ALL {
            let token = kind.format_token([0xab; TOKEN_BYTES]);
            assert_eq!(token.len(), 8 + 32);
            assert_eq!(TokenKind::from_prefix(&token), Some(kind));
        }
        for text in ["", "rk_live_", "rk_test_00", "at_live", "AT_LIVE_00", " at_live_00", "bearer"] {
            assert_eq!(TokenKind::from_prefix(text), None, "{text:?} is no token");
        }
        let padded = |prefix: &str, length: usize| format!("{prefix}{}", "0".repeat(length - prefix.len()));
        for (prefix, length, kind) in [
            ("at_live_", MAX_TOKEN_LENGTH, Some(TokenKind::Agent)),
            ("at_live_", MAX_TOKEN_LENGTH + 1, None),
            ("ot_live_", MAX_OBSERVER_TOKEN_LENGTH, Some(TokenKind::Observer)),
            ("ot_live_", MAX_OBSERVER_TOKEN_LENGTH + 1, None),
        ] {
            assert_eq!(TokenKind::from_prefix(&padded(prefix, length)), kind, "{prefix} of {length}");
        }
    }

    #[test]
    fn the_hash_covers_the_whole_token() {
        let hash = TokenHash::from_token("at_live_00");
        assert_eq!(hash, TokenHash::from_bytes(*TokenHash::from_token("at_live_00").as_bytes()));
        assert_ne!(hash, TokenHash::from_token("rk_live_00"));
        assert_ne!(hash, TokenHash::from_token("at_live_01"));
        assert_eq!(
            hex::encode(TokenHash::from_token("abc").as_bytes()),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(hash.to_string().parse(), Ok(hash));
        assert!("00".parse::<TokenHash>().is_err());
        assert!(!format!("{hash:?}").contains(&hex::encode(hash.as_bytes())));
    }
}
