//! [`ApiError`]: statuses, codes and the two shapes of error bodies that published clients read.

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Map, Value, json};

use crate::{agents::AgentError, engine::EngineError, engine_link::LinkError};

/// Refused request.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: &'static str,
    message: String,
    /// Key and value that the family with a success flag names its subject by.
    flagged: Option<Option<(&'static str, String)>>,
}

pub(crate) type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), flagged: None }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// The shape with a success flag.
    pub(crate) fn flagged(self) -> Self {
        Self { flagged: Some(None), ..self }
    }

    /// The shape with a success flag, which names its subject.
    pub(crate) fn flagged_with(self, key: &'static str, value: &str) -> Self {
        Self { flagged: Some(Some((key, value.to_owned()))), ..self }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    pub(crate) fn code(&self) -> &'static str {
        self.code
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

impl From<AgentError> for ApiError {
    fn from(error: AgentError) -> Self {
        let message = error.to_string();
        let (status, code) = match error {
            AgentError::NotFound { .. } => (StatusCode::NOT_FOUND, "agent_not_found"),
            AgentError::AlreadyExists { .. } => (StatusCode::CONFLICT, "agent_already_exists"),
            AgentError::UnsupportedRuntime => (StatusCode::CONFLICT, "unsupported_runtime"),
            AgentError::Invalid(_) => (StatusCode::BAD_REQUEST, "invalid_request"),
            AgentError::SpawnFailed(_) => (StatusCode::BAD_REQUEST, "spawn_failed"),
            AgentError::CapacityExceeded { .. } => (StatusCode::CONFLICT, "capacity_exceeded"),
            AgentError::NotTaken | AgentError::PartlyTaken => (StatusCode::GATEWAY_TIMEOUT, "worker_timeout"),
            AgentError::Disappeared => (StatusCode::SERVICE_UNAVAILABLE, "worker_disappeared"),
            AgentError::Link(LinkError::Unavailable) => (StatusCode::SERVICE_UNAVAILABLE, "engine_unavailable"),
            AgentError::Link(LinkError::Refused(refused)) if refused.code == "agent_already_exists" => {
                (StatusCode::CONFLICT, "agent_already_exists")
            }
            AgentError::Link(LinkError::Refused(_)) => (StatusCode::BAD_GATEWAY, "engine_refused"),
            AgentError::Engine(error) => return error.into(),
            AgentError::State(_) => {
                // Drivers get the id only: the text names files of this machine, and is in the log under the id.
                let id = uuid::Uuid::new_v4().simple().to_string();
                tracing::error!(error.id = id, error = message, "a request failed by a fault of the broker");
                let message = format!("internal error {id}");
                return Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message);
            }
        };
        Self::new(status, code, message)
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let status = match &error {
            EngineError::Unreachable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            EngineError::TimedOut { .. } => StatusCode::GATEWAY_TIMEOUT,
            EngineError::Refused { .. } | EngineError::Unreadable(_) => StatusCode::BAD_GATEWAY,
        };
        let code = if status == StatusCode::BAD_GATEWAY { "engine_refused" } else { "engine_unavailable" };
        Self::new(status, code, error.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut body = Map::new();
        if let Some(subject) = self.flagged {
            body.insert("success".to_owned(), json!(false));
            body.insert("error".to_owned(), json!(self.message));
            if let Some((key, value)) = subject {
                body.insert(key.to_owned(), json!(value));
            }
        }
        body.insert("code".to_owned(), json!(self.code));
        body.insert("message".to_owned(), json!(self.message));
        (self.status, Json(Value::Object(body))).into_response()
    }
}

/// Answer to a wrong or missing key. Published clients read the top level, newer ones the nested object.
pub(super) fn unauthorized() -> Response {
    let (code, message) = ("unauthorized", "a valid API key is required");
    let body = json!({
        "error": { "code": code, "message": message, "retryable": false, "statusCode": 401 },
        "code": code,
        "message": message,
    });
    (StatusCode::UNAUTHORIZED, Json(body)).into_response()
}

pub(super) async fn unknown_path() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found", "no such path")
}

pub(super) async fn wrong_method() -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "this path does not take this method")
}
