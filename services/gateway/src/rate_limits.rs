//! Rate limits: the class of each route, the headers, and the refusal.
//!
//! The extractors of `caller` charge a request once its caller is known and before its body is read, so a refusal
//! always means that nothing was done. The posts of a batch are charged one by one ([`PostCharges`]).
//! [`ReportedStatus`] adds the headers to the response. Node sockets and their frames are not limited, apart from
//! posts.

use std::sync::{Arc, Mutex, PoisonError};

use axum::{
    extract::{FromRequestParts, MatchedPath, Request},
    http::{Extensions, HeaderName, HeaderValue, Method, request::Parts},
    response::Response,
};
use relay_domain::{WorkspaceScope, workspaces::rate_limit::RouteClass};
use relay_engine::access::limits::{Admission, RateLimitStatus, RateLimitSubject, RateLimits};

use crate::{
    connections::{ClientAddress, ConnectionPermits},
    error::ApiError,
    state::AppState,
};

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// Routes whose cost differs from [`RouteClass::Plain`], or that have their own limit.
const ROUTE_CLASSES: &[(Method, &str, RouteClass)] = &[
    (Method::POST, "/v1/channels/{name}/messages", RouteClass::ChannelMessage),
    (Method::POST, "/v1/dm", RouteClass::DirectMessage),
    (Method::POST, "/v1/to/{address}", RouteClass::DirectMessage),
    (Method::POST, "/v1/dm/group", RouteClass::GroupConversation),
    (Method::POST, "/v1/messages/{id}/reactions", RouteClass::Reaction),
    (Method::GET, "/v1/agents/presence", RouteClass::Presence),
    (Method::GET, "/v1/workspace", RouteClass::WorkspaceInfo),
    (Method::POST, "/v1/agents/{name}/events", RouteClass::Signal),
    (Method::POST, "/v1/messages/{id}/read", RouteClass::Signal),
];

/// Slot of a request in which an extractor leaves the status for the headers of the response.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReportedStatus(Arc<Mutex<Option<RateLimitStatus>>>);

impl ReportedStatus {
    /// Adds an empty slot to a request.
    pub(crate) fn attach(request: &mut Request) -> Self {
        let reported = Self::default();
        request.extensions_mut().insert(reported.clone());
        reported
    }

    /// Adds the rate limit headers to the response of a charged request.
    pub(crate) fn add_headers(&self, mut response: Response) -> Response {
        if let Some(standing) = self.get() {
            let headers = response.headers_mut();
            headers.insert(LIMIT, HeaderValue::from(standing.limit));
            headers.insert(REMAINING, HeaderValue::from(standing.remaining));
            headers.insert(RESET, HeaderValue::from(standing.reset_at));
        }
        response
    }

    fn set(&self, status: RateLimitStatus) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
    }

    fn get(&self) -> Option<RateLimitStatus> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Charges a request to the rate limits of its caller, and counts it until its answer.
///
/// # Errors
/// 503 `too_many_connections`: the caller or its family of workspaces has too many requests in progress.
/// 429 `rate_limit_exceeded`: a limit is exceeded, and nothing was done. 503 `database_overloaded`: storage cannot
/// tell what is left.
pub(crate) async fn charge_request(
    parts: &Parts,
    state: &AppState,
    scope: WorkspaceScope,
    holder: RateLimitSubject,
) -> Result<(), ApiError> {
    // The permit first: a request that is refused for it costs no units of the rate limit.
    let family = state.engine.workspaces().family(scope).await;
    ConnectionPermits::acquire_request(parts, state, (family, scope), holder.clone())?;
    let class = if matches!(holder, RateLimitSubject::Observer(_)) { RouteClass::Observer } else { route_class(parts) };
    apply_admission(parts, state.engine.rate_limits().admit(scope, holder, class).await)
}

fn apply_admission(parts: &Parts, admission: Option<Admission>) -> Result<(), ApiError> {
    let (standing, outcome) = read_admission(admission);
    if let (Some(standing), Some(reported)) = (standing, parts.extensions.get::<ReportedStatus>()) {
        reported.set(standing);
    }
    outcome
}

fn read_admission(admission: Option<Admission>) -> (Option<RateLimitStatus>, Result<(), ApiError>) {
    match admission {
        None => (None, Ok(())),
        Some(Admission::Unknown) => (None, Err(ApiError::storage_unavailable())),
        Some(Admission::Admitted(standing)) => (Some(standing), Ok(())),
        Some(Admission::Refused { standing, retry_after }) => {
            (Some(standing), Err(ApiError::rate_limited(retry_after)))
        }
    }
}

/// Charges of the posts of one batch, in their order. After a refusal the later posts are refused as well, so that the
/// accepted ones are the first of the batch.
pub(crate) struct PostCharges {
    limits: RateLimits,
    scope: WorkspaceScope,
    subject: RateLimitSubject,
    reported: Option<ReportedStatus>,
    refusal: Option<ApiError>,
}

impl PostCharges {
    /// Starts the charges of a caller. With the parts of a request its answer reports the last charge.
    pub(crate) fn new(
        limits: RateLimits,
        scope: WorkspaceScope,
        subject: RateLimitSubject,
        reported: Option<&Extensions>,
    ) -> Self {
        let reported = reported.and_then(|extensions| extensions.get::<ReportedStatus>().cloned());
        Self { limits, scope, subject, reported, refusal: None }
    }

    /// Charges the next post.
    ///
    /// # Errors
    /// 429 `rate_limit_exceeded`, 503 `database_overloaded`: it may not be posted.
    pub(crate) async fn charge(&mut self, class: RouteClass) -> Result<(), ApiError> {
        if let Some(refusal) = &self.refusal {
            return Err(refusal.clone());
        }
        let admission = self.limits.admit(self.scope, self.subject.clone(), class).await;
        let (standing, outcome) = read_admission(admission);
        if let (Some(standing), Some(reported)) = (standing, &self.reported) {
            reported.set(standing);
        }
        self.refusal = outcome.as_ref().err().cloned();
        outcome
    }
}

fn route_class(parts: &Parts) -> RouteClass {
    let route = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let priced = ROUTE_CLASSES.iter().find(|(method, path, _)| *path == route && *method == parts.method);
    priced.map_or(RouteClass::Plain, |(.., class)| *class)
}

/// Charges the creation of a workspace by an anonymous client to its address.
///
/// # Errors
/// 429 `rate_limit_exceeded`: nothing was created.
pub(crate) fn charge_creation(parts: &Parts, state: &AppState) -> Result<(), ApiError> {
    match ClientAddress::of_parts(parts).limited_ip() {
        Some(address) => apply_admission(parts, state.engine.rate_limits().admit_creation(address)),
        None => Ok(()),
    }
}

/// Lookup without authentication, charged to the client's address.
#[derive(Debug, Clone, Copy)]
pub struct PublicLookup;

impl FromRequestParts<AppState> for PublicLookup {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        if let Some(address) = ClientAddress::of_parts(parts).ip() {
            apply_admission(parts, state.engine.rate_limits().admit_lookup(address))?;
        }
        Ok(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
