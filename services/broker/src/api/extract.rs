//! Bodies and the broker, as handlers take them.

use axum::{
    body::Bytes,
    extract::{
        FromRequest, FromRequestParts, Request, WebSocketUpgrade,
        rejection::{PathRejection, QueryRejection},
        ws::rejection::WebSocketUpgradeRejection,
    },
    http::{StatusCode, request::Parts},
};
use serde::de::DeserializeOwned;

use super::{
    Api, Broker,
    error::{ApiError, ApiResult},
};
use crate::unreadable_json::unreadable;

/// Body of a request as bytes; too large ones are refused.
pub(super) struct Body(Bytes);

/// Part of a path, decoded once.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(ApiError))]
pub(super) struct Path<T>(pub(super) T);

/// Fields of a query.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(ApiError))]
pub(super) struct Query<T>(pub(super) T);

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> Self {
        Self::invalid(rejection.body_text())
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        Self::invalid(rejection.body_text())
    }
}

/// Request to become a WebSocket; any other is refused as requests of this API are.
pub(crate) struct Upgrade(pub(crate) WebSocketUpgrade);

impl<S: Send + Sync> FromRequestParts<S> for Upgrade {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> ApiResult<Self> {
        let upgrade = WebSocketUpgrade::from_request_parts(parts, state).await;
        let refused = |rejection: WebSocketUpgradeRejection| {
            ApiError::new(rejection.status(), "invalid_request", rejection.body_text())
        };
        upgrade.map(Self).map_err(refused)
    }
}

impl<S: Send + Sync> FromRequest<S> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> ApiResult<Self> {
        match Bytes::from_request(request, state).await {
            Ok(bytes) => Ok(Self(bytes)),
            Err(rejection) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
                Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large", "the body is above 8 MiB"))
            }
            Err(rejection) => Err(ApiError::invalid(rejection.body_text())),
        }
    }
}

impl Body {
    /// Parses the body, an object.
    pub(super) fn parse<T: DeserializeOwned>(&self) -> ApiResult<T> {
        // A list would be taken for the values of the fields, in their order.
        if !self.0.trim_ascii_start().starts_with(b"{") {
            return Err(ApiError::invalid("the body must be a JSON object"));
        }
        serde_json::from_slice(&self.0)
            .map_err(|error| ApiError::invalid(format!("the body cannot be read: {}", unreadable(&error))))
    }

    /// Parses the body; an empty one is the default.
    pub(super) fn parse_optional<T: DeserializeOwned + Default>(&self) -> ApiResult<T> {
        if self.0.iter().all(u8::is_ascii_whitespace) { Ok(T::default()) } else { self.parse() }
    }
}

/// The broker, for handlers behind the readiness check.
pub(crate) struct Ready(pub(super) Api);

impl FromRequestParts<Api> for Ready {
    type Rejection = ApiError;

    async fn from_request_parts(_: &mut Parts, api: &Api) -> ApiResult<Self> {
        match api.broker() {
            Some(_) => Ok(Self(api.clone())),
            None => Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", "the broker is starting")),
        }
    }
}

impl Ready {
    /// State of the routes.
    pub(crate) fn api(&self) -> Api {
        self.0.clone()
    }
}

impl std::ops::Deref for Ready {
    type Target = Broker;

    fn deref(&self) -> &Broker {
        match self.0.broker() {
            Some(broker) => broker,
            // The extractor has checked it, and it is set once.
            None => unreachable!("the broker was ready"),
        }
    }
}
