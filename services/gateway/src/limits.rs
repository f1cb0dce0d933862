//! Request budgets at the edge: which route costs what, the headers that tell, and the refusal.
//!
//! The extractors of `caller` charge a request as soon as its caller is known, before its body is read, so
//! that a refusal always means that nothing was done. [`tell`] adds the headers to whatever is answered.
//! Node sockets and what comes over them are not limited.

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
use relay_domain::{WorkspaceScope, rate::Family};
use relay_engine::limits::{Admission, Holder, Standing};

use crate::{error::ApiError, state::AppState, stuck::Peer};

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Routes that are priced otherwise than [`Family::Plain`], or have a budget of their own.
const PRICED: &[(Method, &str, Family)] = &[
    (Method::POST, "/v1/channels/{name}/messages", Family::ChannelMessage),
    (Method::POST, "/v1/dm", Family::DirectMessage),
    (Method::POST, "/v1/dm/group", Family::GroupConversation),
    (Method::POST, "/v1/messages/{id}/reactions", Family::Reaction),
    (Method::GET, "/v1/agents/presence", Family::Presence),
    (Method::GET, "/v1/workspace", Family::WorkspaceInfo),
    (Method::POST, "/v1/agents/{name}/events", Family::Signal),
    (Method::POST, "/v1/messages/{id}/read", Family::Signal),
];

/// Where a handler's extractor leaves the standing for [`tell`].
#[derive(Debug, Clone, Default)]
struct Told(Arc<OnceLock<Standing>>);

/// Puts the headers onto every answer to a request that was charged.
pub async fn tell(mut request: Request, next: Next) -> Response {
    let told = Told::default();
    request.extensions_mut().insert(told.clone());
    let mut response = next.run(request).await;
    if let Some(standing) = told.0.get() {
        let headers = response.headers_mut();
        headers.insert(LIMIT, HeaderValue::from(standing.limit));
        headers.insert(REMAINING, HeaderValue::from(standing.remaining));
        headers.insert(RESET, HeaderValue::from(standing.reset_at));
    }
    response
}

/// Charges a request to its caller.
///
/// # Errors
/// 429 `rate_limit_exceeded`: a budget is used up, and nothing was done. 503 `database_overloaded`: storage does not
/// say what is left.
pub(crate) async fn charge(
    parts: &Parts,
    state: &AppState,
    scope: WorkspaceScope,
    holder: Holder,
) -> Result<(), ApiError> {
    let family = if matches!(holder, Holder::Observer(_)) { Family::Observer } else { family(parts) };
    settle(parts, state.engine.admit(scope, holder, family).await)
}

fn settle(parts: &Parts, admission: Option<Admission>) -> Result<(), ApiError> {
    let (standing, outcome) = match admission {
        None => return Ok(()),
        Some(Admission::Unknown) => {
            return Err(ApiError::unavailable("database_overloaded", "Storage is unavailable, try again"));
        }
        Some(Admission::Admitted(standing)) => (standing, Ok(())),
        Some(Admission::Refused { standing, retry_after }) => (standing, Err(ApiError::rate_limited(retry_after))),
    };
    if let Some(told) = parts.extensions.get::<Told>() {
        let _ = told.0.set(standing);
    }
    outcome
}

fn family(parts: &Parts) -> Family {
    let route = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let priced = PRICED.iter().find(|(method, path, _)| *path == route && *method == parts.method);
    priced.map_or(Family::Plain, |(.., family)| *family)
}

/// A look-up that anybody may make: charged to the client's address.
#[derive(Debug, Clone, Copy)]
pub struct PublicLookup;

impl FromRequestParts<AppState> for PublicLookup {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        if let Some(address) = client_address(parts, &state.trusted_proxies) {
            settle(parts, state.engine.admit_lookup(address))?;
        }
        Ok(Self)
    }
}

/// Who asks: the peer, or, if the peer is a trusted proxy, the last address of `X-Forwarded-For` that is
/// none. What stands to the left of it is the client's own word.
fn client_address(parts: &Parts, trusted: &[IpNet]) -> Option<IpAddr> {
    let ConnectInfo(Peer(peer)) = parts.extensions.get::<ConnectInfo<Peer>>()?;
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
    fn the_client_is_the_last_hop_that_is_no_proxy() {
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
                .extension(ConnectInfo(Peer(SocketAddr::new(peer.parse().unwrap(), 1))))
                .body(Body::empty())
                .unwrap();
            let (parts, _) = request.into_parts();
            let expected: IpAddr = expected.parse().unwrap();
            assert_eq!(client_address(&parts, trusted), Some(expected), "{peer} {forwarded}");
        }
    }

    /// A route that is renamed must not lose its price in silence.
    #[test]
    fn priced_routes_exist() {
        let router = include_str!("router.rs");
        // Come with other parts of the API.
        let awaited = [Family::Reaction, Family::Signal];
        for (_, path, family) in PRICED.iter().filter(|(.., family)| !awaited.contains(family)) {
            assert!(router.contains(&format!("\"{path}\"")), "{path} {family:?}");
        }
    }
}
