//! The shapes of what the engine sent to clients whose every run differs.
//!
//! Each JSON object becomes a line with the route or frame, its place in the body, and its keys in order. Each of its
//! values becomes a line with its kind. So a line does not depend on what else happened to be in the same answer, and
//! a value that may be null has two lines.

use std::collections::BTreeSet;

use serde_json::Value;

use super::http::{Frame, Message};
use super::mask;
use super::recording::Entry;
use super::transcript::was_shed;
use crate::access::ROUTES;

/// Keys whose strings are words of the protocol, not data.
const WORDS: [&str; 14] = [
    "type",
    "code",
    "kind",
    "role",
    "mode",
    "status",
    "injection_mode",
    "reason",
    "adapter",
    "delivery_adapter",
    "ack_mode",
    "activity_status",
    "ordering",
    "content_type",
];

pub(super) fn lines(entries: &[Entry]) -> Vec<String> {
    let mut lines = BTreeSet::new();
    for entry in entries {
        match entry {
            // While a gateway starts or ends, which some of these tests make it do, it answers 503.
            Entry::Answer { response, .. } if was_shed(&response.body) || response.head.word(1) == "503" => {}
            Entry::Answer { request, response } => answer(request, response, &mut lines),
            Entry::Frame { path, from_engine: true, frame } => {
                let path = path.split('?').next().unwrap_or_default();
                match frame {
                    Frame::Text(text) => body(path, text, &mut lines),
                    Frame::Close(reason) => {
                        lines.insert(format!("{path} closes {reason}"));
                    }
                }
            }
            Entry::ServerEvent { path, text } => {
                let path = path.split('?').next().unwrap_or_default();
                let data = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect::<String>();
                body(path, &data, &mut lines);
            }
            Entry::Call { path, body: text, .. } => body(path, text, &mut lines),
            Entry::Frame { .. } => {}
        }
    }
    lines.into_iter().collect()
}

fn answer(request: &Message, response: &Message, lines: &mut BTreeSet<String>) {
    let (method, target) = (request.head.word(0), request.head.word(1));
    let route = template(method, target.split('?').next().unwrap_or_default());
    let prefix = format!("{method} {route} {}", response.head.word(1));
    let replayed = response.head.header("idempotency-replayed").map_or("", |_| " replayed");
    lines.insert(format!("{prefix}{replayed} {}", response.head.header("content-type").unwrap_or("no content")));
    if response.head.header("content-type").is_some_and(|kind| kind.starts_with("application/json")) {
        body(&prefix, &String::from_utf8_lossy(&response.body), lines);
    }
}

/// The route that a path takes: fixed segments win over parameters.
fn template(method: &str, path: &str) -> String {
    let segments: Vec<&str> = path.split('/').collect();
    let fits = |route: &&str| {
        let parts: Vec<&str> = route.split('/').collect();
        parts.len() == segments.len() && parts.iter().zip(&segments).all(|(a, b)| a.starts_with('{') || a == b)
    };
    let routes = ROUTES.iter().filter(|(of, ..)| *of == method).map(|(_, route, ..)| *route).filter(fits);
    routes.min_by_key(|route| route.matches('{').count()).map_or_else(|| "(no route)".to_owned(), str::to_owned)
}

fn body(prefix: &str, text: &str, lines: &mut BTreeSet<String>) {
    match serde_json::from_str::<Value>(text) {
        Ok(value) => {
            // Spaces or escapes that a parser does not show.
            let written = value.to_string();
            if written != text {
                lines.insert(format!("{prefix} is not written as expected"));
            }
            // Of a frame: its type, and that of what it carries.
            let kinds = [&value["type"], &value["event"], &value["payload"]["type"]];
            let kinds = kinds.into_iter().filter_map(Value::as_str).map(|kind| format!(" {kind}"));
            within(&format!("{prefix}{}", kinds.collect::<String>()), "", &value, lines);
        }
        Err(_) => {
            lines.insert(format!("{prefix} is no JSON"));
        }
    }
}

/// Adds the lines of a value at a place.
fn within(prefix: &str, place: &str, value: &Value, lines: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            let keys: Vec<&str> = fields.keys().map(String::as_str).collect();
            lines.insert(format!("{prefix} {place}{{{}}}", keys.join(" ")));
            for (key, value) in fields {
                if (value.is_object() || value.is_array()) && !is_free(key) {
                    within(prefix, &format!("{place}{key}."), value, lines);
                } else {
                    lines.insert(format!("{prefix} {place}{key} {}", leaf(key, value)));
                }
            }
        }
        Value::Array(items) => {
            let place = place.trim_end_matches('.');
            lines.insert(format!("{prefix} {place}[]"));
            for item in items {
                if item.is_object() || item.is_array() {
                    within(prefix, &format!("{place}[]."), item, lines);
                } else {
                    lines.insert(format!("{prefix} {place}[] {}", leaf("", item)));
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            if place.is_empty() {
                lines.insert(format!("{prefix} {}", leaf("", value)));
            }
        }
    }
}

/// Returns whether the content below this key is the tenants' own.
fn is_free(key: &str) -> bool {
    matches!(key, "metadata" | "input" | "output" | "payload_schema" | "input_schema" | "output_schema" | "blocks")
}

fn leaf(key: &str, value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) if number.is_f64() => "0.0".to_owned(),
        Value::Number(_) => "0".to_owned(),
        Value::String(text) if WORDS.contains(&key) => format!("{text:?}"),
        Value::String(text) => mask::kind_of(text).unwrap_or_else(|| "text".to_owned()),
        Value::Array(_) => "list".to_owned(),
        Value::Object(_) => "object".to_owned(),
    }
}
