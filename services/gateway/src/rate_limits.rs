//! Rate limits: the class of each route, the headers, and the refusal.
//!
//! The extractors of `caller` charge a request once its caller is known and before its body is read, so a refusal
//! always means that nothing was done. [`add_headers`] adds the headers to the response. Node sockets and their frames
//! are not limited.

use std::{
    net::IpAddr,
    sync::{Arc, OnceLock},
};

use axum::{
    extract::{ConnectInfo, FromRequestParts, MatchedPath, Request},
    http::{HeaderName, HeaderValue, Method, request::Parts},
    middleware::Next,
    response::Response,
};
use ipnet::IpNet;
use relay_domain::{WorkspaceScope, workspaces::rate_limit::RouteClass};
use relay_engine::access::limits::{Admission, RateLimitStatus, RateLimitSubject};

use crate::{error::ApiError, state::AppState, write_timeout::PeerAddress};

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Routes whose cost differs from [`RouteClass::Plain`], or that have their own limit.
const ROUTE_CLASSES: &[(Method, &str, RouteClass)] = &[
    (Method::POST, "/v1/channels/{name}/messages", RouteClass::ChannelMessage),
    (Method::POST, "/v1/dm", RouteClass::DirectMessage),
    (Method::POST, "/v1/dm/group", RouteClass::GroupConversation),
    (Method::POST, "/v1/messages/{id}/reactions", RouteClass::Reaction),
    (Method::GET, "/v1/agents/presence", RouteClass::Presence),
    (Method::GET, "/v1/workspace", RouteClass::WorkspaceInfo),
    (Method::POST, "/v1/agents/{name}/events", RouteClass::Signal),
    (Method::POST, "/v1/messages/{id}/read", RouteClass::Signal),
];

/// Slot in which an extractor leaves the status for [`add_headers`].
#[derive(Debug, Clone, Default)]
struct ReportedStatus(Arc<OnceLock<RateLimitStatus>>);

/// Adds the rate limit headers to the response of a charged request.
pub async fn add_headers(mut request: Request, next: Next) -> Response {
    let reported = ReportedStatus::default();
    request.extensions_mut().insert(reported.clone());
    let mut response = next.run(request).await;
    if let Some(standing) = reported.0.get() {
        let headers = response.headers_mut();
        headers.insert(LIMIT, HeaderValue::from(standing.limit));
        headers.insert(REMAINING, HeaderValue::from(standing.remaining));
        headers.insert(RESET, HeaderValue::from(standing.reset_at));
    }
    response
}

/// Charges a request to the rate limits of its caller.
///
/// # Errors
/// 429 `rate_limit_exceeded`: a limit is exceeded, and nothing was done. 503 `database_overloaded`: storage cannot
/// tell what is left.
pub(crate) async fn charge_request(
    parts: &Parts,
    state: &AppState,
    scope: WorkspaceScope,
    holder: RateLimitSubject,
) -> Result<(), ApiError> {
    let class = if matches!(holder, RateLimitSubject::Observer(_)) { RouteClass::Observer } else { route_class(parts) };
    apply_admission(parts, state.engine.rate_limits().admit(scope, holder, class).await)
}

fn apply_admission(parts: &Parts, admission: Option<Admission>) -> Result<(), ApiError> {
    let (standing, outcome) = match admission {
        None => return Ok(()),
        Some(Admission::Unknown) => {
            return Err(ApiError::unavailable("database_overloaded", "Storage is unavailable, try again"));
        }
        Some(Admission::Admitted(standing)) => (standing, Ok(())),
        Some(Admission::Refused { standing, retry_after }) => (standing, Err(ApiError::rate_limited(retry_after))),
    };
    if let Some(reported) = parts.extensions.get::<ReportedStatus>() {
        let _ = reported.0.set(standing);
    }
    outcome
}

fn route_class(parts: &Parts) -> RouteClass {
    let route = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let priced = ROUTE_CLASSES.iter().find(|(method, path, _)| *path == route && *method == parts.method);
    priced.map_or(RouteClass::Plain, |(.., class)| *class)
}

/// Lookup without authentication, charged to the client's address.
#[derive(Debug, Clone, Copy)]
pub struct PublicLookup;

impl FromRequestParts<AppState> for PublicLookup {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        if let Some(address) = client_address(parts, &state.trusted_proxies) {
            apply_admission(parts, state.engine.rate_limits().admit_lookup(address))?;
        }
        Ok(Self)
    }
}

/// Returns the client's address: the peer or, if the peer is a trusted proxy, the last untrusted address of
/// `X-Forwarded-For`. Addresses to the left of it are sent by the client and prove nothing.
fn client_address(parts: &Parts, trusted: &[IpNet]) -> Option<IpAddr> {
    let ConnectInfo(PeerAddress(peer)) = parts.extensions.get::<ConnectInfo<PeerAddress>>()?;
    let is_trusted = |address: &IpAddr| trusted.iter().any(|network| network.contains(address));
    let mut client = peer.ip().to_canonical();
    let lines = parts.headers.get_all(FORWARDED_FOR).iter().collect::<Vec<_>>();
    let hops = lines.iter().rev().flat_map(|line| line.to_str().unwrap_or_default().rsplit(','));
    for hop in hops {
        if !is_trusted(&client) {
            break;
        }
        let Ok(address) = hop.trim().parse::<IpAddr>() else { break };
        client = address.to_canonical();
    }
    Some(client)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::body::Body;

    use super::*;

    #[test]
    fn the_client_is_the_last_hop_that_is_not_a_trusted_proxy() {
        let proxies: Vec<IpNet> = vec!["10.0.0.0/8".parse().unwrap(), "192.0.2.1/32".parse().unwrap()];
        for (peer, forwarded, trusted, expected) in [
            ("203.0.113.9", "198.51.100.1", &proxies[..0], "203.0.113.9"),
            ("203.0.113.9", "198.51.100.1", &proxies, "203.0.113.9"),
            ("10.0.0.1", "198.51.100.1", &proxies, "198.51.100.1"),
            ("10.0.0.1", "1.1.1.1, 198.51.100.1, 192.0.2.1", &proxies, "198.51.100.1"),
            ("10.0.0.1", "nonsense", &proxies, "10.0.0.1"),
            ("10.0.0.1", "", &proxies, "10.0.0.1"),
            ("::ffff:10.0.0.1", "2001:db8::1", &proxies, "2001:db8::1"),
        ] {
            let request = http::Request::builder()
                .header(FORWARDED_FOR, forwarded)
                .extension(ConnectInfo(PeerAddress(SocketAddr::new(peer.parse().unwrap(), 1))))
                .body(Body::empty())
                .unwrap();
            let (parts, _) = request.into_parts();
            let expected: IpAddr = expected.parse().unwrap();
            assert_eq!(client_address(&parts, trusted), Some(expected), "{peer} {forwarded}");
        }
    }

    /// Renaming a route must not silently drop its cost.
    #[test]
    fn routes_with_a_class_exist() {
        let router = include_str!("router.rs");
        // Registered by other functions than the ones checked here.
        let awaited = [RouteClass::Reaction, RouteClass::Signal];
        for (_, path, class) in ROUTE_CLASSES.iter().filter(|(.., class)| !awaited.contains(class)) {
            assert!(router.contains(&format!("\"{path}\"")), "{path} {class:?}");
        }
    }
}
