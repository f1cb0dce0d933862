//! `verify`: the verification rules by themselves. One JSON object on each line of stdin, one answer on each line of
//! stdout, without any clock: for judging a recorded session, and for programs in other languages.

use std::{
    io::{BufRead as _, Write as _},
    time::Duration,
};

use anyhow::{Context as _, Result};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use relay_verification::{
    Channel, RequiredChannels, Timestamp,
    ack_file::AckFile,
    attempt::{Attempt, AttemptEffect, AttemptRules},
    channel::{INJECTED_METHOD, SIGNAL_WINDOW},
    cleaning::Cleaner,
    delivery::{AgentCondition, Delivery, DeliveryEffect, DeliveryRules, UnverifiedPolicy},
    echo::{EchoMonitor, ExpectedEcho, MatchDetail},
    level::{Level, Proof},
    sanitise::{TypingMode, sanitise_body},
    strategy::{Learned, Strategy},
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::clock;

/// A request. An `id` beside it is repeated in the answer.
#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Request {
    Echo {
        injected: InjectedMessage,
        output: Vec<Chunk>,
        window_ms: Option<u64>,
    },
    AckFile {
        agent: String,
        delivery_id: String,
        event_id: String,
        path: String,
        content: String,
    },
    Attempt {
        cli: Option<String>,
        channels: Vec<Channel>,
        signals: Vec<Signal>,
    },
    Delivery {
        max_retries: u32,
        attempt_signals: Vec<Vec<Signal>>,
    },
    Clean {
        output: Vec<Chunk>,
    },
    Sanitise {
        text: String,
        #[serde(default)]
        paste: bool,
    },
}

#[derive(Debug, Deserialize)]
struct InjectedMessage {
    sender: String,
    event_id: String,
    body: String,
    line: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Signal {
    at_ms: i64,
    channel: Channel,
}

/// One read of the terminal.
#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    at_ms: i64,
    #[serde(flatten)]
    content: Content,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text { text: String },
    Bytes { b64: String },
    Repeated { repeat: String, times: usize },
    Parts { parts: Vec<Content> },
}

/// Longest read that a request may describe.
const MAX_CHUNK: usize = 64 << 20;

pub(crate) fn verify() -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line.context("read a request")?;
        if line.trim().is_empty() {
            continue;
        }
        // Flushed each time: a caller may wait for the answer before it writes its next request.
        writeln!(stdout, "{}", answer_line(&line)).and_then(|()| stdout.flush()).context("write an answer")?;
    }
    Ok(())
}

fn answer_line(line: &str) -> Value {
    let parsed: Result<Value, _> = serde_json::from_str(line);
    let id = parsed.as_ref().ok().and_then(|request| request.get("id").cloned());
    let answered = parsed.and_then(serde_json::from_value).map_err(|error| error.to_string()).and_then(answer);
    let mut answer =
        answered.unwrap_or_else(|message| json!({ "error": { "code": "invalid_request", "message": message } }));
    if let Some(id) = id {
        answer["id"] = id;
    }
    answer
}

fn answer(request: Request) -> Result<Value, String> {
    match request {
        Request::Echo { injected, output, window_ms } => echo(&injected, &output, window_ms),
        Request::AckFile { agent, delivery_id, event_id, path, content } => {
            let judged = AckFile::new(&agent, &delivery_id, &event_id).judge(&path, content.as_bytes());
            Ok(json!({ "accepted": judged.is_ok(), "reason": judged.err().map(|rejection| rejection.as_str()) }))
        }
        Request::Attempt { cli, channels, signals } => Ok(attempt(cli.as_deref(), &channels, &signals)),
        Request::Delivery { max_retries, attempt_signals } => Ok(delivery(max_retries, &attempt_signals)),
        Request::Clean { output } => {
            let (mut cleaner, mut text) = (Cleaner::new(), String::new());
            for chunk in &output {
                cleaner.clean(&chunk.content.bytes()?, &mut text);
            }
            Ok(json!({ "text": text }))
        }
        Request::Sanitise { text, paste } => {
            let mode = if paste { TypingMode::BracketedPaste } else { TypingMode::Keys };
            Ok(json!({ "text": sanitise_body(&text, mode) }))
        }
    }
}

fn echo(injected: &InjectedMessage, output: &[Chunk], window_ms: Option<u64>) -> Result<Value, String> {
    let window = window_ms.map_or(SIGNAL_WINDOW, Duration::from_millis);
    let began = Timestamp::from_millis(0);
    let expected = ExpectedEcho::new(&injected.sender, &injected.event_id, &injected.body, &injected.line);
    let (mut cleaner, mut monitor, mut watch, mut found) = (Cleaner::new(), EchoMonitor::new(), None, None);
    for chunk in output {
        // The injection begins at 0: output before it goes through the cleaner and proves nothing.
        if chunk.at_ms >= 0 && watch.is_none() {
            watch = monitor.begin(&expected, began, began + window);
        }
        let mut text = String::new();
        cleaner.clean(&chunk.content.bytes()?, &mut text);
        // `or` evaluates its argument in any case: each read has to go through the monitor.
        found = found.or(monitor.on_text(&text, Timestamp::from_millis(chunk.at_ms)).into_iter().next());
    }
    // The event id may be the last text of all, which no later text delimits.
    let found = found.or_else(|| monitor.end(watch?));
    Ok(match found {
        Some(echo) => {
            let method = match echo.detail {
                MatchDetail::Exact => "exact",
                MatchDetail::Tokens => "tokens",
            };
            json!({ "verified": true, "level": "L1", "method": method, "at_ms": echo.at.as_millis() })
        }
        None => json!({ "verified": false, "level": "L0" }),
    })
}

fn attempt(cli: Option<&str>, channels: &[Channel], signals: &[Signal]) -> Value {
    let mut required = RequiredChannels {
        echo: channels.contains(&Channel::Echo),
        file: channels.contains(&Channel::File),
        mcp: channels.contains(&Channel::Mcp),
        api: channels.contains(&Channel::Api),
    };
    if let Some(cli) = cli {
        required = Strategy::builtin(cli).rules(required, &Learned::new(), Level::Echoed).attempt.required;
    }
    let began = Timestamp::from_millis(0);
    let mut attempt = Attempt::new(AttemptRules { required, echo_window: SIGNAL_WINDOW }, began);
    attempt.enter_written(began);
    let shown = |proof: Proof| {
        json!({
            "at_ms": clock::millis(proof.elapsed),
            "level": proof.level().as_str(),
            "method": proof.channel.method(),
        })
    };
    let (mut ack, mut upgrades, mut ignored) = (Value::Null, Vec::new(), Vec::new());
    for signal in signals {
        for effect in attempt.signal(Timestamp::from_millis(signal.at_ms), signal.channel) {
            match effect {
                AttemptEffect::Acknowledge(proof) => ack = shown(proof),
                AttemptEffect::Upgrade(proof) => upgrades.push(shown(proof)),
                AttemptEffect::Ignore(_) => ignored.push(json!([signal.at_ms, signal.channel])),
                AttemptEffect::TimeOut => {}
            }
        }
    }
    json!({
        "outcome": if ack.is_null() { "timeout" } else { "acked" },
        "ack": ack,
        "upgrades": upgrades,
        "final_level": attempt.level().as_str(),
        "final_method": attempt.strongest().map_or(INJECTED_METHOD, |proof| proof.channel.method()),
        "ignored": ignored,
    })
}

fn delivery(max_retries: u32, attempt_signals: &[Vec<Signal>]) -> Value {
    let required = RequiredChannels { echo: true, file: true, mcp: true, api: false };
    let rules = DeliveryRules {
        attempt: AttemptRules { required, echo_window: SIGNAL_WINDOW },
        max_reinjections: max_retries,
        policy: UnverifiedPolicy::Failed,
        minimum: Level::Echoed,
    };
    let mut delivery = Delivery::new(rules);
    let mut events = Vec::new();
    let mut began = Timestamp::from_millis(0);
    for number in 0..=max_retries {
        if !delivery.begin_attempt(began) {
            break;
        }
        delivery.enter_written(began);
        events.push(json!({ "at_ms": began.as_millis(), "event": "injected", "attempt": number + 1 }));
        for signal in attempt_signals.get(number as usize).into_iter().flatten() {
            let at = Timestamp::from_millis(began.as_millis() + signal.at_ms);
            for effect in delivery.signal(at, signal.channel) {
                if let DeliveryEffect::Verified { proof, attempt } = effect {
                    let method = proof.channel.method();
                    let at_ms = at.as_millis();
                    events.push(json!({ "at_ms": at_ms, "event": "ack", "attempt": attempt, "method": method }));
                }
            }
        }
        let ends = began + SIGNAL_WINDOW;
        let rested = AgentCondition {
            is_echo_reliable: true,
            at_prompt_since: Some(began),
            is_output_held: false,
            is_message_visible: false,
            is_write_stalled: false,
        };
        for effect in delivery.tick(ends, &rested) {
            if let DeliveryEffect::Failed(_) = effect {
                events.push(json!({ "at_ms": ends.as_millis(), "event": "failed", "attempt": number + 1 }));
            }
        }
        began = ends;
    }
    let is_acked = events.iter().any(|event| event["event"] == "ack");
    json!({ "outcome": if is_acked { "acked" } else { "failed" }, "events": events })
}

impl Content {
    fn bytes(&self) -> Result<Vec<u8>, String> {
        let too_large = || "a chunk is above 64 MiB".to_owned();
        match self {
            Self::Text { text } => Ok(text.clone().into_bytes()),
            Self::Bytes { b64 } => BASE64_STANDARD.decode(b64).map_err(|error| error.to_string()),
            Self::Repeated { repeat, times } => {
                let length = repeat.len().checked_mul(*times).filter(|length| *length <= MAX_CHUNK);
                length.map(|_| repeat.repeat(*times).into_bytes()).ok_or_else(too_large)
            }
            Self::Parts { parts } => {
                let mut joined = Vec::new();
                for part in parts {
                    joined.extend(part.bytes()?);
                    if joined.len() > MAX_CHUNK {
                        return Err(too_large());
                    }
                }
                Ok(joined)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(request: Value) -> Value {
        answer_line(&request.to_string())
    }

    #[test]
    fn only_output_after_the_injection_counts_as_an_echo() {
        let line = "Relay message from bob [evt_1]: hello there";
        let injected = json!({ "sender": "bob", "event_id": "evt_1", "body": "hello there", "line": line });
        let wrapped = "Relay message \r\n from bob [evt_1]: hello\r\n there ";
        let request = |at_ms: i64| {
            json!({ "op": "echo", "id": 7, "injected": injected, "output": [
                { "at_ms": at_ms, "text": wrapped }, { "at_ms": at_ms + 1, "parts": [{ "repeat": "x", "times": 3 }] },
            ] })
        };
        let found = json!({ "verified": true, "level": "L1", "method": "exact", "at_ms": 40, "id": 7 });
        assert_eq!(ask(request(40)), found);
        assert_eq!(ask(request(-40)), json!({ "verified": false, "level": "L0", "id": 7 }));
        assert_eq!(ask(request(15_000))["verified"], false);
    }

    #[test]
    fn an_attempt_has_one_ack_and_upgrades() {
        let signals = json!([
            { "at_ms": 10, "channel": "activity" }, { "at_ms": 300, "channel": "echo" },
            { "at_ms": 400, "channel": "echo" }, { "at_ms": 500, "channel": "file" },
        ]);
        let judged = ask(json!({ "op": "attempt", "channels": ["echo", "file"], "signals": signals }));
        assert_eq!(judged["ack"], json!({ "at_ms": 300, "level": "L1", "method": "echo" }));
        assert_eq!(judged["upgrades"], json!([{ "at_ms": 500, "level": "L2", "method": "file" }]));
        assert_eq!((&judged["final_level"], &judged["ignored"]), (&json!("L2"), &json!([[10, "activity"]])));
    }

    #[test]
    fn a_delivery_is_typed_again_until_it_fails() {
        let silent = ask(json!({ "op": "delivery", "max_retries": 3, "attempt_signals": [[], [], [], []] }));
        let events = silent["events"].as_array().expect("events");
        let times: Vec<_> = events.iter().filter_map(|event| event["at_ms"].as_i64()).collect();
        assert_eq!(
            (times.as_slice(), &silent["outcome"]),
            ([0, 15_000, 30_000, 45_000, 60_000].as_slice(), &json!("failed"))
        );
        let late = json!([[], [{ "at_ms": 100, "channel": "mcp" }]]);
        let acked = ask(json!({ "op": "delivery", "max_retries": 3, "attempt_signals": late }));
        assert_eq!(acked["events"][2], json!({ "at_ms": 15_100, "event": "ack", "attempt": 2, "method": "mcp" }));
    }

    #[test]
    fn a_wrong_line_is_answered_too() {
        assert_eq!(answer_line("no json")["error"]["code"], "invalid_request");
        assert_eq!(ask(json!({ "op": "other", "id": "a" }))["id"], "a");
        let content = r#"{"delivery_id":"d","event_id":"e","status":"received"}"#;
        let file = ask(json!({ "op": "ack_file", "agent": "ada", "delivery_id": "d", "event_id": "e",
            "path": ".agent-relay/ada/acks/d", "content": content }));
        assert_eq!(file, json!({ "accepted": true, "reason": null }));
        let clean = ask(json!({ "op": "clean", "output": [{ "b64": "G1szMW1oaQ==" }] }));
        assert_eq!(clean, json!({ "text": "hi" }));
        assert_eq!(ask(json!({ "op": "sanitise", "text": "a\tb\r" })), json!({ "text": "a    b\n" }));
    }
}
