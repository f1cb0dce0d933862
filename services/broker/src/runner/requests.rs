//! Requests of a runner as calls of the listen API.

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Method, Request, StatusCode, header},
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::api::types::runner_frame::Refusal;

/// Largest answer of a route.
const MAX_ANSWER: usize = 32 << 20;

/// Maximum characters of a runner's text in a refusal or in the log.
const MAX_SHOWN: usize = 64;

/// Returns the beginning of a runner's text.
pub(super) fn truncate(text: &str) -> String {
    text.chars().take(MAX_SHOWN).collect()
}

/// Answers a request by the route that does the same.
pub(super) async fn call(routes: Router, key: &str, kind: &str, payload: &Value) -> Result<Value, Refusal> {
    let (method, path, body) = route(kind, payload)?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("x-api-key", key)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body.to_string()));
    let request = request.map_err(|error| Refusal::new("frame_failed", error.to_string()))?;
    // A router answers everything.
    let answer = routes.oneshot(request).await.unwrap_or_else(|never| match never {});
    let status = answer.status();
    let bytes = to_bytes(answer.into_body(), MAX_ANSWER).await;
    let bytes = bytes.map_err(|error| Refusal::new("internal_error", error.to_string()))?;
    // The answer before the broker is ready is plain text: then the status gives code and message.
    let body: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    if status.is_success() {
        return Ok(body);
    }
    let text = |key: &str| body[key].as_str().map(str::to_owned);
    Err(Refusal {
        code: text("code").unwrap_or_else(|| format!("http_{}", status.as_u16())),
        message: text("message").unwrap_or_else(|| reason(status)),
        retryable: status.is_server_error(),
    })
}

pub(super) fn route(kind: &str, payload: &Value) -> Result<(Method, String, Value), Refusal> {
    let name = || {
        let name = payload["name"].as_str();
        let name = name.ok_or_else(|| Refusal::new("frame_failed", format!("{kind} needs a name")))?;
        Ok::<_, Refusal>(utf8_percent_encode(name, NON_ALPHANUMERIC).to_string())
    };
    let given = payload.clone();
    Ok(match kind {
        "send_message" => (Method::POST, "/api/send".to_owned(), given),
        "send_input" => (Method::POST, format!("/api/input/{}", name()?), given),
        "release_agent" => (Method::DELETE, format!("/api/spawned/{}", name()?), given),
        "subscribe_channels" => (Method::POST, format!("/api/spawned/{}/subscribe", name()?), given),
        "unsubscribe_channels" => (Method::POST, format!("/api/spawned/{}/unsubscribe", name()?), given),
        "list_agents" => (Method::GET, "/api/spawned".to_owned(), json!({})),
        "resize_pty" => (Method::POST, format!("/api/resize/{}", name()?), given),
        "set_model" => (Method::POST, format!("/api/spawned/{}/model", name()?), given),
        "get_metrics" => {
            let agent = match &payload["agent"] {
                Value::Null => None,
                Value::String(agent) => Some(agent),
                Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                    return Err(Refusal::new("frame_failed", "agent must be a name"));
                }
            };
            let query = agent.map(|agent| format!("?agent={}", utf8_percent_encode(agent, NON_ALPHANUMERIC)));
            (Method::GET, format!("/api/metrics{}", query.unwrap_or_default()), json!({}))
        }
        "get_status" => (Method::GET, "/api/status".to_owned(), json!({})),
        "get_crash_insights" => (Method::GET, "/api/crash-insights".to_owned(), json!({})),
        "preflight_agents" => (Method::POST, "/api/preflight".to_owned(), given),
        "shutdown" => (Method::POST, "/api/shutdown".to_owned(), json!({})),
        _ => {
            return Err(Refusal::new("frame_failed", format!("{:?} is not known", truncate(kind))));
        }
    })
}

fn reason(status: StatusCode) -> String {
    status.canonical_reason().unwrap_or("refused").to_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        api::types::runner_frame,
        edits::{edited, settings},
    };

    /// The frames that the packages are tested against.
    fn recorded() -> impl Strategy<Value = Vec<u8>> {
        let lines = include_str!("../../../../runners/transcript.jsonl").lines();
        let frames: Vec<String> = lines
            .filter_map(|line| Some(serde_json::from_str::<Value>(line).ok()?.get("frame")?.to_string()))
            .collect();
        let frames: Vec<&[u8]> = frames.iter().map(String::as_bytes).collect();
        edited(&frames, &[b"{", b"}", b"\"", b"\\u0000", b"1e999"])
    }

    proptest! {
        #![proptest_config(settings())]

        /// Fuzz target of runner frames.
        #[test]
        fn edited_frames_are_frames_or_refused(bytes in recorded()) {
            let text = String::from_utf8_lossy(&bytes);
            if let Some(frame) = runner_frame::decode(&text) {
                prop_assert_eq!(frame.v, runner_frame::VERSION);
                // A name of any kind stays one part of the path.
                if let Ok((_, path, _)) = route(&frame.kind, &frame.payload) {
                    prop_assert!(path.starts_with("/api/") && path.matches('/').count() <= 4, "{}", path);
                    prop_assert!(!path.contains(".."), "{}", path);
                }
                let answered = runner_frame::answer(frame.request_id.as_deref(), Ok(frame.payload));
                let again = runner_frame::decode(&answered).map(|answered| answered.request_id);
                prop_assert_eq!(again, Some(frame.request_id));
            }
        }
    }

    #[test]
    fn names_are_encoded_and_unknown_types_refused() {
        let (_, path, _) = route("release_agent", &json!({ "name": "a b/c" })).expect("a route");
        assert_eq!(path, "/api/spawned/a%20b%2Fc");
        assert_eq!(route("release_agent", &json!({})).expect_err("no name").code, "frame_failed");
        assert_eq!(route("other", &json!({})).expect_err("unknown").code, "frame_failed");
    }
}
