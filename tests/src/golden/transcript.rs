//! The lines of a deterministic test.
//!
//! `POST /v1/dm as <at_live 1> {"to":"bob"} = 201 content-type: application/json {"ok":true}` is a request with the
//! engine's answer, `/v1/node/ws engine {…}` a frame, `/hook called {…}` a call. Answers come first and in order, so
//! that their IDs have the same numbers in each run; frames and calls follow, sorted.

use std::fmt::Write as _;

use super::http::{Frame, Head, Message};
use super::mask::{self, Names};
use super::recording::Entry;

/// Headers that are the connection's and not the answer's.
const CONNECTION: [&str; 6] =
    ["connection", "content-length", "date", "sec-websocket-accept", "transfer-encoding", "upgrade"];
/// Headers of every answer; only missing and different ones are written down.
const USUAL: [(&str, &str); 6] = [
    ("access-control-allow-origin", "*"),
    (
        "access-control-expose-headers",
        "x-request-id,x-correlation-id,retry-after,idempotency-replayed,x-ratelimit-limit,x-ratelimit-remaining,x-ratelimit-reset",
    ),
    ("content-type", "application/json"),
    ("vary", "origin, access-control-request-method, access-control-request-headers"),
    ("x-correlation-id", "<hex32>"),
    ("x-request-id", "<hex32>"),
];
/// Maximum bytes of a body that are written down, if it is JSON and if it is not.
const LONGEST: [usize; 2] = [64 * 1024, 1024];
/// Refusals that say "nothing was done": on a busy machine any request may get one.
const SHED: [&str; 2] = [r#""code":"database_overloaded""#, r#""code":"workspace_busy""#];

pub(super) fn lines(entries: &[Entry]) -> Vec<String> {
    let mut names = Names::default();
    let mut lines: Vec<String> = entries
        .iter()
        .filter_map(|entry| match entry {
            Entry::Answer { request, response } if !was_shed(&response.body) => {
                Some(names.mask(&answer(request, response)).into_owned())
            }
            Entry::Answer { .. } | Entry::Frame { .. } | Entry::ServerEvent { .. } | Entry::Call { .. } => None,
        })
        .collect();
    names.complete();
    let mut rest: Vec<String> = entries.iter().filter_map(other).map(|line| names.mask(&line).into_owned()).collect();
    rest.sort();
    rest.dedup();
    lines.append(&mut rest);
    lines
}

/// Returns whether the engine refused for want of room, did nothing, and the request was sent again.
pub(super) fn was_shed(body: &[u8]) -> bool {
    let text = String::from_utf8_lossy(body);
    SHED.iter().any(|code| text.contains(code))
}

fn answer(request: &Message, response: &Message) -> String {
    let mut line = format!("{} {}", request.head.word(0), request.head.word(1));
    if let Some(token) = request.head.header("authorization") {
        let _ = write!(line, " as {}", token.trim_start_matches("Bearer "));
    }
    if let Some(key) = request.head.header("idempotency-key") {
        let _ = write!(line, " key {key}");
    }
    if !request.body.is_empty() {
        let _ = write!(line, " {}", text(&request.body));
    }
    let _ = write!(line, " = {}", response.head.word(1));
    for header in headers(&response.head) {
        let _ = write!(line, " {header};");
    }
    let kind = response.head.header("content-type").unwrap_or_default();
    if kind.starts_with("text/html") || kind.starts_with("text/javascript") {
        // For people, who are shown new wording.
        line.push_str(" a page");
    } else if !response.body.is_empty() {
        let _ = write!(line, " {}", text(&response.body));
    }
    line
}

/// Headers that are not usual, and `no name` for usual ones that are not there.
fn headers(head: &Head) -> Vec<String> {
    let usual = |name: &str, value: &str| {
        let value = mask::kind_of(value).unwrap_or_else(|| value.to_owned());
        USUAL.contains(&(name, &value)) || CONNECTION.contains(&name)
    };
    // The shared engine has no rate limits: its answers have the plan's numbers, of which nothing is used.
    let remaining = head.header("x-ratelimit-remaining");
    let is_unlimited = remaining.is_some() && remaining == head.header("x-ratelimit-limit");
    let is_plan = |name: &str| is_unlimited && name.starts_with("x-ratelimit-");
    let other = head.headers.iter().filter(|(name, value)| !usual(name, value) && !is_plan(name));
    let mut headers: Vec<String> = other.map(|(name, value)| format!("{name}: {value}")).collect();
    headers.extend(USUAL.iter().filter(|(name, _)| head.header(name).is_none()).map(|(name, _)| format!("no {name}")));
    headers.sort();
    headers
}

fn other(entry: &Entry) -> Option<String> {
    Some(match entry {
        Entry::Answer { .. } => return None,
        Entry::Frame { path, from_engine, frame } => {
            let sender = if *from_engine { "engine" } else { "client" };
            let path = path.split('?').next().unwrap_or_default();
            match frame {
                Frame::Text(text) => format!("{path} {sender} {text}"),
                Frame::Close(text) => format!("{path} {sender} closes {text}"),
            }
        }
        Entry::ServerEvent { path, text } => format!("{path} event {}", text.replace('\n', " | ")),
        Entry::Call { path, headers, body } => {
            let headers = headers.iter().filter(|(name, _)| !CONNECTION.contains(&name.as_str()));
            let headers: String = headers.map(|(name, value)| format!(" {name}: {value};")).collect();
            format!("{path} called{headers} {body}")
        }
    })
}

/// A body on one line, or its length.
fn text(body: &[u8]) -> String {
    let longest = LONGEST[usize::from(!body.starts_with(b"{"))];
    match std::str::from_utf8(body) {
        Ok(text) if body.len() <= longest => text.replace('\n', "\\n"),
        _ => format!("{} bytes", body.len()),
    }
}
