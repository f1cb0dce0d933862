//! OIDC issuer of operator tokens: fetches and caches its keys, and verifies JWTs.

use std::{net::IpAddr, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use jsonwebtoken::{
    Algorithm, DecodingKey, Validation,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, JwkSet, KeyAlgorithm, PublicKeyUse},
};
use serde::Deserialize;
use serde_json::Value;
use tokio::{sync::Mutex, time::Instant};

use crate::{
    EngineError, EngineResult,
    access::jwt,
    error::{BadCredential, Dependency},
};

const MAX_JWT_BYTES: usize = 16 * 1024;
const MAX_DOCUMENT_BYTES: usize = 256 * 1024;
const MAX_KEYS: usize = 64;
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which keys are used before they are fetched again, unless the issuer sets `max-age`.
const DEFAULT_MAX_AGE: Duration = Duration::from_secs(300);
/// Bounds of `max-age`.
const MAX_AGE_SECONDS: (u64, u64) = (60, 3600);
/// Time for which keys are still used while they cannot be fetched again.
const MAX_STALENESS: Duration = Duration::from_secs(3600);
/// Bounds the fetches that unknown key ids and an unavailable issuer cause.
const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(5);
/// Tolerated clock difference to the issuer.
const LEEWAY_SECONDS: u64 = 30;

#[derive(Debug, Clone)]
pub struct IssuerConfig {
    /// Required `iss`. Its discovery document names the location of the keys.
    pub issuer: String,
    /// Required `aud`. Grant it to operators only: every JWT with it is an operator's.
    pub audience: String,
    /// URL of the keys, for an issuer without discovery.
    pub jwks_url: Option<String>,
}

type Http = Client<HttpsConnector<HttpConnector>, Empty<Bytes>>;

pub(super) struct Issuer {
    config: IssuerConfig,
    http: Http,
    cache: Mutex<KeyCache>,
}

#[derive(Default)]
struct KeyCache {
    keys: Option<FetchedKeys>,
    fetch_attempted_at: Option<Instant>,
}

struct FetchedKeys {
    keys: Vec<Key>,
    fetched_at: Instant,
    fresh_for: Duration,
}

#[derive(Clone)]
struct Key {
    kid: Option<String>,
    algorithm: Algorithm,
    public: DecodingKey,
}

impl Issuer {
    pub(super) fn new(config: IssuerConfig) -> EngineResult<Self> {
        for url in [Some(&config.issuer), config.jwks_url.as_ref()].into_iter().flatten() {
            check_url(url).map_err(|why| EngineError::invalid_request(format!("{url}: {why}")))?;
        }
        jwt::install();
        let connector = HttpsConnectorBuilder::new()
            .with_native_roots()
            .map_err(|error| EngineError::invalid_request(format!("no root certificates: {error}")))?
            // `check_url` admits http on the loopback interface only, also for the URL that discovery names.
            .https_or_http()
            .enable_http1()
            .build();
        Ok(Self { config, http: Client::builder(TokioExecutor::new()).build(connector), cache: Mutex::default() })
    }

    /// Verifies signature, issuer, audience and lifetime of a JWT.
    pub(super) async fn verify(&self, token: &str) -> EngineResult<()> {
        // Before anything is parsed: the caller is not authenticated yet.
        if token.len() > MAX_JWT_BYTES {
            return Err(EngineError::Unauthenticated(BadCredential::NotAnOperator));
        }
        let header = jsonwebtoken::decode_header(token)
            .map_err(|_| EngineError::Unauthenticated(BadCredential::NotAnOperator))?;
        let key = self
            .find_key(header.kid.as_deref())
            .await?
            .ok_or(EngineError::Unauthenticated(BadCredential::NotAnOperator))?;
        // The key determines the algorithm; the token must name the same one.
        let mut validation = Validation::new(key.algorithm);
        validation.set_issuer(&[&self.config.issuer]);
        validation.set_audience(&[&self.config.audience]);
        // A claim that is not required is checked only if the token has it.
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        validation.validate_nbf = true;
        validation.leeway = LEEWAY_SECONDS;
        jsonwebtoken::decode::<Value>(token, &key.public, &validation).map_err(|error| {
            tracing::debug!(error = &error as &dyn std::error::Error, "operator token refused");
            EngineError::Unauthenticated(BadCredential::NotAnOperator)
        })?;
        Ok(())
    }

    /// Finds the key of this id; without an id, the only key there is.
    async fn find_key(&self, kid: Option<&str>) -> EngineResult<Option<Key>> {
        // Held during a fetch: callers that arrive meanwhile wait for its keys instead of asking the issuer as well.
        let mut cache = self.cache.lock().await;
        let found = |cache: &KeyCache| cache.keys.as_ref().and_then(|keys| keys.find(kid));
        let is_fresh = cache.keys.as_ref().is_some_and(|keys| keys.fetched_at.elapsed() < keys.fresh_for);
        // An unknown id may be that of a new key, so it leads to a fetch even while the keys are fresh.
        if is_fresh && let Some(key) = found(&cache) {
            return Ok(Some(key));
        }
        if cache.fetch_attempted_at.is_none_or(|at| at.elapsed() >= MIN_FETCH_INTERVAL) {
            // Set before the fetch: an attempt whose caller gives up counts as well.
            cache.fetch_attempted_at = Some(Instant::now());
            match self.fetch().await {
                Ok(keys) => cache.keys = Some(keys),
                Err(error) => tracing::warn!(error, "failed to fetch the keys of the OIDC issuer"),
            }
        }
        match &cache.keys {
            Some(keys) if keys.fetched_at.elapsed() < MAX_STALENESS => Ok(found(&cache)),
            _ => Err(EngineError::DependencyUnavailable(Dependency::Issuer)),
        }
    }

    async fn fetch(&self) -> Result<FetchedKeys, String> {
        let url = match &self.config.jwks_url {
            Some(url) => url.clone(),
            None => self.discover().await?,
        };
        let (document, max_age) = self.get_document(&url).await?;
        let set: JwkSet = serde_json::from_slice(&document).map_err(|error| error.to_string())?;
        let keys: Vec<Key> = set.keys.iter().take(MAX_KEYS).filter_map(usable_key).collect();
        Ok(FetchedKeys { keys, fetched_at: Instant::now(), fresh_for: max_age.unwrap_or(DEFAULT_MAX_AGE) })
    }

    async fn discover(&self) -> Result<String, String> {
        #[derive(Deserialize)]
        struct Discovery {
            issuer: String,
            jwks_uri: String,
        }
        let url = format!("{}/.well-known/openid-configuration", self.config.issuer.trim_end_matches('/'));
        let (document, _) = self.get_document(&url).await?;
        let found: Discovery = serde_json::from_slice(&document).map_err(|error| error.to_string())?;
        if found.issuer != self.config.issuer {
            return Err(format!("the discovery document is of another issuer: {}", found.issuer));
        }
        // A document may name any URL; it gets the same check as a configured one.
        check_url(&found.jwks_uri)?;
        Ok(found.jwks_uri)
    }

    /// Fetches a document and its `max-age`. Redirects are not followed.
    async fn get_document(&self, url: &str) -> Result<(Bytes, Option<Duration>), String> {
        let fetched = async {
            let response = self.http.get(url.parse().map_err(|_| "no URL")?).await.map_err(|e| e.to_string())?;
            if response.status() != http::StatusCode::OK {
                return Err(format!("{url} answered {}", response.status()));
            }
            let header = response.headers().get(http::header::CACHE_CONTROL);
            let max_age = header.and_then(|value| max_age(value.to_str().ok()?));
            let body = Limited::new(response.into_body(), MAX_DOCUMENT_BYTES).collect().await;
            Ok((body.map_err(|error| error.to_string())?.to_bytes(), max_age))
        };
        tokio::time::timeout(FETCH_TIMEOUT, fetched).await.unwrap_or_else(|_| Err(format!("{url} is unavailable")))
    }
}

impl FetchedKeys {
    fn find(&self, kid: Option<&str>) -> Option<Key> {
        match (kid, &self.keys[..]) {
            (Some(kid), keys) => keys.iter().find(|key| key.kid.as_deref() == Some(kid)).cloned(),
            (None, [only]) => Some(only.clone()),
            (None, _) => None,
        }
    }
}

/// Converts a key if it is for signatures with a supported algorithm.
#[expect(clippy::wildcard_enum_match_arm, reason = "jsonwebtoken may add kinds of keys")]
fn usable_key(jwk: &Jwk) -> Option<Key> {
    let (algorithm, named) = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => (Algorithm::RS256, KeyAlgorithm::RS256),
        AlgorithmParameters::EllipticCurve(params) if params.curve == EllipticCurve::P256 => {
            (Algorithm::ES256, KeyAlgorithm::ES256)
        }
        AlgorithmParameters::OctetKeyPair(params) if params.curve == EllipticCurve::Ed25519 => {
            (Algorithm::EdDSA, KeyAlgorithm::EdDSA)
        }
        // Passed over, not an error: an issuer may publish such keys for other uses.
        _ => return None,
    };
    if jwk.common.key_algorithm.is_some_and(|declared| declared != named)
        || jwk.common.public_key_use.as_ref().is_some_and(|declared| *declared != PublicKeyUse::Signature)
    {
        return None;
    }
    Some(Key { kid: jwk.common.key_id.clone(), algorithm, public: DecodingKey::from_jwk(jwk).ok()? })
}

/// Reads `max-age` of a `Cache-Control` header, within bounds.
fn max_age(header: &str) -> Option<Duration> {
    let seconds = header.split(',').find_map(|part| part.trim().strip_prefix("max-age=")?.parse::<u64>().ok())?;
    Some(Duration::from_secs(seconds.clamp(MAX_AGE_SECONDS.0, MAX_AGE_SECONDS.1)))
}

/// Returns whether a host is this machine by name or address, an IPv6 one with or without brackets.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Accepts https, and http on the loopback interface: keys must not travel in clear text.
pub(crate) fn check_url(url: &str) -> Result<(), String> {
    let parsed: http::Uri = url.parse().map_err(|_| "not a URL".to_owned())?;
    let host = parsed.host().unwrap_or_default();
    match parsed.scheme_str() {
        Some("https") if !host.is_empty() => Ok(()),
        Some("http") if is_loopback(host) => Ok(()),
        _ => Err("must be an https URL".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_https_or_local() {
        for (url, fits) in [
            ("https://id.example.com/realm", true),
            ("http://127.0.0.1:9/", true),
            ("http://[::1]:9/", true),
            ("http://localhost:9", true),
            ("http://id.example.com", false),
            ("http://127.0.0.1.example.com", false),
            ("ftp://127.0.0.1", false),
            ("id.example.com", false),
            ("", false),
        ] {
            assert_eq!(check_url(url).is_ok(), fits, "{url}");
        }
    }

    #[test]
    fn max_age_is_clamped_to_a_minute_and_an_hour() {
        for (header, seconds) in [
            ("public, max-age=600", Some(600)),
            ("max-age=0", Some(60)),
            ("max-age=999999999", Some(3600)),
            ("no-store", None),
            ("max-age=x", None),
        ] {
            assert_eq!(max_age(header), seconds.map(Duration::from_secs), "{header}");
        }
    }
}
