//! Signed observer tokens: `ot_live_` and a JWT; claims, signing and verification.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use jsonwebtoken::{Algorithm, Header, Validation};
use relay_domain::{
    ObserverTokenId, WorkspaceId, WorkspaceScope,
    access::token::{MAX_OBSERVER_TOKEN_LENGTH, TokenKind},
    observers::{ObserverFilters, ObserverView, ScopeSet},
};
use serde::{Deserialize, Serialize};

use super::keys::KeyRing;

const OPAQUE_DIGITS: usize = 48;

/// Claims of a token. An unknown scope or filter makes it invalid: a gateway must not ignore a limit that it does not
/// understand.
#[derive(Debug, Serialize, Deserialize)]
struct Claims {
    ws: WorkspaceId,
    jti: ObserverTokenId,
    ver: i64,
    scopes: ScopeSet,
    #[serde(default)]
    filters: ObserverFilters,
    iat: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exp: Option<f64>,
}

/// Token with a verified owner: by its signature, or by the row of its hash.
#[derive(Debug)]
pub(super) struct VerifiedToken {
    pub(super) scope: WorkspaceScope,
    pub(super) token_id: ObserverTokenId,
    pub(super) version: i64,
    pub(super) view: Arc<ObserverView>,
    pub(super) expires_at: Option<DateTime<Utc>>,
    /// Key that signed it; `None` for an opaque token.
    pub(super) kid: Option<String>,
}

/// Syntactic form of an observer token.
pub(super) enum TokenForm {
    /// JWT that names a signing key.
    Signed { kid: String },
    /// Opaque: a row may hold its hash.
    Opaque,
    /// Neither: never issued.
    Neither,
}

/// Classifies a text with an observer token's prefix, without verifying it.
pub(super) fn classify(token: &str) -> TokenForm {
    let Some(body) = token.strip_prefix(TokenKind::Observer.prefix()) else { return TokenForm::Neither };
    if body.len() == OPAQUE_DIGITS && body.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return TokenForm::Opaque;
    }
    match jsonwebtoken::decode_header(body) {
        // The header is a claim of the client: another algorithm is refused before a key is looked for.
        Ok(Header { alg: Algorithm::EdDSA, kid: Some(kid), .. }) => TokenForm::Signed { kid },
        _ => TokenForm::Neither,
    }
}

/// Signs a token. `None` when the process has no signing key yet. A token that is too long for its readers is not
/// issued either; the bound of validated filters excludes it.
pub(super) fn sign(ring: &KeyRing, known: &VerifiedToken, at: DateTime<Utc>) -> Option<String> {
    let (kid, key) = ring.signing_key()?;
    let mut header = Header::new(Algorithm::EdDSA);
    header.kid = Some(kid.clone());
    let claims = Claims {
        ws: known.scope.workspace_id(),
        jti: known.token_id,
        ver: known.version,
        scopes: known.view.scopes,
        filters: known.view.filters.clone(),
        iat: at.timestamp(),
        // Seconds, with the row's milliseconds as decimals.
        exp: known.expires_at.map(|at| at.timestamp_millis() as f64 / 1000.0),
    };
    let jwt = jsonwebtoken::encode(&header, &claims, key).ok()?;
    let token = format!("{}{jwt}", TokenKind::Observer.prefix());
    (token.len() <= MAX_OBSERVER_TOKEN_LENGTH).then_some(token)
}

/// Verifies the signature by an active key. The caller checks expiry and overrides, since both may have changed after
/// signing.
pub(super) fn verify(ring: &KeyRing, token: &str, kid: String) -> Option<VerifiedToken> {
    let body = token.strip_prefix(TokenKind::Observer.prefix())?;
    let key = ring.verifying_key(&kid)?;
    let mut validation = Validation::new(Algorithm::EdDSA);
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_aud = false;
    let claims = jsonwebtoken::decode::<Claims>(body, key, &validation).ok()?.claims;
    #[expect(clippy::cast_possible_truncation, reason = "the cast saturates, and such an instant is refused")]
    let expires_at = match claims.exp {
        None => None,
        Some(exp) => Some(DateTime::from_timestamp_millis((exp * 1000.0).round() as i64)?),
    };
    Some(VerifiedToken {
        scope: WorkspaceScope::from_verified_token(claims.ws),
        token_id: claims.jti,
        version: claims.ver,
        view: Arc::new(ObserverView { scopes: claims.scopes, filters: claims.filters }),
        expires_at,
        kid: Some(kid),
    })
}

#[cfg(test)]
mod tests {
    use relay_domain::observers::MAX_FILTER_ENTRIES;

    use super::*;
    use crate::{access::jwt, observers::keys};

    fn known(filters: ObserverFilters) -> VerifiedToken {
        VerifiedToken {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(i64::MAX)),
            token_id: ObserverTokenId::new(i64::MAX - 1),
            version: 3,
            view: Arc::new(ObserverView { scopes: ScopeSet::all(), filters }),
            expires_at: DateTime::from_timestamp_millis(1_900_000_000_123),
            kid: None,
        }
    }

    fn ring() -> KeyRing {
        jwt::install();
        KeyRing::read(&[keys::generate(None, DateTime::default()).expect("a key")], None)
    }

    fn read(ring: &KeyRing, token: &str) -> Option<VerifiedToken> {
        match classify(token) {
            TokenForm::Signed { kid } => verify(ring, token, kid),
            TokenForm::Opaque | TokenForm::Neither => None,
        }
    }

    #[test]
    fn verified_claims_equal_the_signed_ones() {
        let ring = ring();
        let filters = ObserverFilters { channel_names: Some(vec!["ops".into()]), ..Default::default() };
        let token = sign(&ring, &known(filters.clone()), DateTime::default()).expect("a token");
        let read = read(&ring, &token).expect("verified");
        let expected = known(filters);
        assert_eq!(
            (read.scope, read.token_id, read.version, &read.view, read.expires_at),
            (expected.scope, expected.token_id, 3, &expected.view, expected.expires_at)
        );
    }

    #[test]
    fn largest_filters_fit_into_a_token() {
        let words = |n: usize, length: usize| (0..n).map(|i| format!("{i:0length$}")).collect::<Vec<_>>();
        let filters = ObserverFilters {
            dm_conversation_ids: Some(words(28, 64)),
            include_dms: Some(true),
            created_after: Some(DateTime::default()),
            ..Default::default()
        };
        let filters = filters.into_validated().expect("they may be as large");
        let token = sign(&ring(), &known(filters), DateTime::default()).expect("a token");
        assert!(token.len() < MAX_OBSERVER_TOKEN_LENGTH, "{}", token.len());
        assert!(
            ObserverFilters { channel_names: Some(words(MAX_FILTER_ENTRIES, 64)), ..Default::default() }
                .into_validated()
                .is_err()
        );
    }

    #[test]
    fn forged_tokens_are_refused() {
        let (ring, other) = (ring(), ring());
        let token = sign(&ring, &known(ObserverFilters::default()), DateTime::default()).expect("a token");
        assert!(read(&ring, &token).is_some() && read(&other, &token).is_none());
        let (head, signature) = token.rsplit_once('.').expect("a signature");
        let (header, claims) = head.rsplit_once('.').expect("claims");
        let header = header.strip_prefix("ot_live_").expect("a prefix");
        let forged = sign(&other, &known(ObserverFilters::default()), DateTime::default()).expect("a token");
        let (_, foreign) = forged.rsplit_once('.').expect("a signature");
        let encode = |json: &str| base64_url(json.as_bytes());
        let kid = ring.signing_key().map(|(kid, _)| kid.clone()).expect("a key");
        let none = encode(r#"{"alg":"none","typ":"JWT"}"#);
        let hmac = encode(&format!(r#"{{"alg":"HS256","kid":"{kid}"}}"#));
        let larger = encode(r#"{"ws":"1","jti":"ot_1","ver":9,"scopes":["dms:read"],"iat":0}"#);
        for (what, token) in [
            ("another key's signature", format!("ot_live_{header}.{claims}.{foreign}")),
            ("other claims", format!("ot_live_{header}.{larger}.{signature}")),
            ("no signature", format!("ot_live_{header}.{claims}.")),
            ("a cut signature", token[..token.len() - 2].to_owned()),
            ("alg none", format!("ot_live_{none}.{claims}.")),
            ("alg none with a signature", format!("ot_live_{none}.{claims}.{signature}")),
            ("alg HS256", format!("ot_live_{hmac}.{claims}.{signature}")),
            ("no prefix", format!("{header}.{claims}.{signature}")),
            ("four parts", format!("{token}.x")),
            ("nothing", "ot_live_".into()),
            ("dots", "ot_live_..".into()),
        ] {
            assert!(read(&ring, &token).is_none(), "{what}");
        }
    }

    #[test]
    fn opaque_tokens_are_recognized_by_their_form() {
        assert!(matches!(classify(&format!("ot_live_{}", "0a".repeat(24))), TokenForm::Opaque));
        for text in ["0a".repeat(16), "0A".repeat(24), "0g".repeat(24), "0a".repeat(25)] {
            assert!(matches!(classify(&format!("ot_live_{text}")), TokenForm::Neither), "{text}");
        }
    }

    fn base64_url(bytes: &[u8]) -> String {
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        bytes
            .chunks(3)
            .flat_map(|chunk| {
                let n = (0..3).fold(0_usize, |n, i| n << 8 | usize::from(chunk.get(i).copied().unwrap_or(0)));
                (0..=chunk.len()).map(move |i| char::from(DIGITS[n >> (18 - 6 * i) & 63]))
            })
            .collect()
    }
}
