//! Bearer tokens: their kinds, their text form and what is stored of them.
//!
//! A token is shown once and never stored. What is stored is SHA-256 over the whole token string;
//! tokens carry 128 random bits, so that a plain hash is enough.

use std::{fmt, hash, str::FromStr};

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::ids::InvalidId;

/// Random bytes in a workspace, agent or node token.
pub const TOKEN_BYTES: usize = 16;
/// The longest text that is looked at as a token.
pub const MAX_TOKEN_LENGTH: usize = 256;
/// The longest text that is looked at as an observer token: those are signed and carry their scopes and
/// filters. They travel in URLs, of which 8 KiB pass everywhere.
pub const MAX_OBSERVER_TOKEN_LENGTH: usize = 4096;

/// What a token is for, told by its prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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

impl TokenKind {
    const ALL: [Self; 5] = [Self::Workspace, Self::Agent, Self::Node, Self::Observer, Self::Webhook];

    /// What every token of this kind starts with.
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

    /// The kind that a token claims to be. `None` when the prefix is unknown or nothing follows it.
    #[must_use]
    pub fn of(token: &str) -> Option<Self> {
        let kind = Self::ALL.into_iter().find(|kind| token.starts_with(kind.prefix()))?;
        let longest = if kind == Self::Observer { MAX_OBSERVER_TOKEN_LENGTH } else { MAX_TOKEN_LENGTH };
        (kind.prefix().len() + 1..=longest).contains(&token.len()).then_some(kind)
    }

    /// A token of this kind from fresh random bytes.
    #[must_use]
    pub fn token(self, random: [u8; TOKEN_BYTES]) -> String {
        format!("{}{}", self.prefix(), hex::encode(random))
    }
}

/// SHA-256 of a whole token string. Compares in constant time and prints nothing of itself.
#[derive(Clone, Copy)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// The hash of a token.
    #[must_use]
    pub fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }

    /// A hash as read from storage or a hint.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes, for storage.
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

/// Lower-case hex, as it travels between processes. Not for logs.
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
    fn a_token_tells_its_kind() {
        for kind in TokenKind::ALL {
            let token = kind.token([0xab; TOKEN_BYTES]);
            assert_eq!(token.len(), 8 + 32);
            assert_eq!(TokenKind::of(&token), Some(kind));
        }
        for text in ["", "rk_live_", "rk_test_00", "at_live", "AT_LIVE_00", " at_live_00", "bearer"] {
            assert_eq!(TokenKind::of(text), None, "{text:?} is no token");
        }
        let padded = |prefix: &str, length: usize| format!("{prefix}{}", "0".repeat(length - prefix.len()));
        for (prefix, length, kind) in [
            ("at_live_", MAX_TOKEN_LENGTH, Some(TokenKind::Agent)),
            ("at_live_", MAX_TOKEN_LENGTH + 1, None),
            ("ot_live_", MAX_OBSERVER_TOKEN_LENGTH, Some(TokenKind::Observer)),
            ("ot_live_", MAX_OBSERVER_TOKEN_LENGTH + 1, None),
        ] {
            assert_eq!(TokenKind::of(&padded(prefix, length)), kind, "{prefix} of {length}");
        }
    }

    #[test]
    fn the_hash_covers_the_whole_token() {
        let hash = TokenHash::of("at_live_00");
        assert_eq!(hash, TokenHash::from_bytes(*TokenHash::of("at_live_00").as_bytes()));
        assert_ne!(hash, TokenHash::of("rk_live_00"));
        assert_ne!(hash, TokenHash::of("at_live_01"));
        assert_eq!(
            hex::encode(TokenHash::of("abc").as_bytes()),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(hash.to_string().parse(), Ok(hash));
        assert!("00".parse::<TokenHash>().is_err());
        assert!(!format!("{hash:?}").contains(&hex::encode(hash.as_bytes())));
    }
}
