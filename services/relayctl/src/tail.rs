//! `relayctl tail`: follows the events of a workspace, as server-sent events from a gateway.

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use reqwest::StatusCode;
use serde_json::Value;

use crate::output::Output;

/// Read timeout. The gateway sends something every 15 s.
const READ_TIMEOUT: Duration = Duration::from_secs(45);
/// Delay before reconnecting.
const RECONNECT_DELAY: Duration = Duration::from_secs(1);
/// Maximum size of an event; the gateway's own limit is far below.
const MAX_EVENT_BYTES: usize = 4 << 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// URL of a gateway.
    #[arg(long, env = "RELAY_BASE_URL", default_value = "http://127.0.0.1:8787")]
    gateway: String,
    /// A workspace key, or an observer token with `stream:read`.
    #[arg(long, env = "RELAY_API_KEY", hide_env_values = true)]
    token: String,
    /// Only events whose type has this prefix, such as `message.`. Repeatable.
    #[arg(long = "type")]
    types: Vec<String>,
    /// Only events that contain this text, such as a name or an id.
    #[arg(long)]
    grep: Option<String>,
    /// Start after the event with this number; 0 for all stored events. By default with the next event.
    #[arg(long)]
    since: Option<u64>,
    /// Stop after this many events.
    #[arg(long)]
    count: Option<u64>,
}

pub(crate) async fn run(arguments: Arguments, out: Output) -> Result<()> {
    // No other code in this program has chosen the crypto provider yet.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().read_timeout(READ_TIMEOUT).build().context("set up the client")?;
    let mut position = arguments.since.map(|since| since.to_string());
    let mut shown = 0;
    loop {
        match follow_stream(&client, &arguments, out, &mut position, &mut shown).await {
            Ok(true) => return Ok(()),
            // A gateway that drains ends its streams: the next connection continues behind the last event.
            Ok(false) => {}
            Err(Failure::Permanent(error)) => return Err(error),
            Err(Failure::Temporary(error)) => eprintln!("{error:#}; connecting again"),
        }
        tokio::time::sleep(RECONNECT_DELAY).await;
    }
}

enum Failure {
    /// A retry would not help.
    Permanent(anyhow::Error),
    /// A retry may help.
    Temporary(anyhow::Error),
}

/// Prints events. Returns true once enough were printed, false if the connection ended.
async fn follow_stream(
    client: &reqwest::Client,
    arguments: &Arguments,
    out: Output,
    position: &mut Option<String>,
    shown: &mut u64,
) -> Result<bool, Failure> {
    let url = format!("{}/v1/workspace/events/stream", arguments.gateway.trim_end_matches('/'));
    let mut request = client.get(&url).bearer_auth(&arguments.token);
    if let Some(position) = position {
        request = request.header("Last-Event-ID", position.as_str());
    }
    let temporary = |error: reqwest::Error| Failure::Temporary(anyhow::Error::new(error).context(format!("ask {url}")));
    let mut response = request.send().await.map_err(temporary)?;
    let status = response.status();
    if !status.is_success() {
        let body = response.text().await.unwrap_or_default();
        let error = anyhow::anyhow!("{url} answered {status}: {body}");
        return Err(if is_temporary(status) { Failure::Temporary(error) } else { Failure::Permanent(error) });
    }
    let coloured = std::io::stdout().is_terminal();
    let mut events = EventParser::default();
    while let Some(chunk) = response.chunk().await.map_err(temporary)? {
        for event in events.feed(&chunk).map_err(Failure::Temporary)? {
            // Before the filters: events that are not shown must not come again after a reconnect.
            if event.id.is_some() {
                *position = event.id;
            }
            // Without data an event only moves the position.
            let Ok(data) = serde_json::from_str::<Value>(&event.data) else { continue };
            let kind = data["type"].as_str().unwrap_or(&event.name);
            let wanted =
                arguments.types.is_empty() || arguments.types.iter().any(|prefix| kind.starts_with(prefix.as_str()));
            let mentioned = arguments.grep.as_ref().is_none_or(|text| event.data.contains(text.as_str()));
            if !wanted || !mentioned {
                continue;
            }
            println!("{}", if out.is_json() { event.data.clone() } else { format_event(kind, &data, coloured) });
            *shown += 1;
            if arguments.count.is_some_and(|count| *shown >= count) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Returns whether a retry may help. A refused token or a wrong URL stays so; a used-up rate limit or a gateway without
/// Postgres does not.
fn is_temporary(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
}

/// Formats an event: number, type, and the other fields as JSON.
fn format_event(kind: &str, data: &Value, coloured: bool) -> String {
    let seq = data["seq"].as_u64().map_or_else(|| "-".to_owned(), |seq| seq.to_string());
    let mut rest = data.clone();
    if let Some(fields) = rest.as_object_mut() {
        for known in ["type", "seq"] {
            fields.remove(known);
        }
    }
    // One colour per family of events.
    let colour = match kind.split('.').next().unwrap_or_default() {
        "message" | "thread" | "dm" => 36,
        "delivery" => 33,
        "agent" | "node" => 32,
        _ => 35,
    };
    let kind = if coloured { format!("\x1b[{colour}m{kind}\x1b[0m") } else { kind.to_owned() };
    format!("{seq:>8}  {kind}  {rest}")
}

/// Server-sent event.
#[derive(Debug, Default, PartialEq, Eq)]
struct Event {
    name: String,
    id: Option<String>,
    data: String,
}

/// Parser that splits a byte stream into events.
#[derive(Debug, Default)]
struct EventParser {
    buffered: Vec<u8>,
}

impl EventParser {
    fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Event>> {
        self.buffered.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some(end) = self.buffered.windows(2).position(|pair| pair == b"\n\n") {
            let block: Vec<u8> = self.buffered.drain(..end + 2).collect();
            // Decoded by block: a chunk may end within a character.
            let event = parse_event(&String::from_utf8_lossy(&block));
            if event != Event::default() {
                events.push(event);
            }
        }
        // A server that never ends an event must not fill the memory.
        if self.buffered.len() > MAX_EVENT_BYTES {
            bail!("an event is longer than {MAX_EVENT_BYTES} bytes");
        }
        Ok(events)
    }
}

fn parse_event(block: &str) -> Event {
    let mut event = Event::default();
    for line in block.lines() {
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut event.name),
            "id" => event.id = Some(value.to_owned()),
            "data" => {
                if !event.data.is_empty() {
                    event.data.push('\n');
                }
                event.data.push_str(value);
            }
            // Comments, and fields of later versions.
            _ => {}
        }
    }
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_complete_however_the_bytes_are_split() {
        let text = ": hello\n\nid: 7\nevent: message.created\ndata: {\"a\":\ndata: 1}\n\nid: 8\ndata: {}\n\n";
        let expected = [
            Event { name: "message.created".into(), id: Some("7".into()), data: "{\"a\":\n1}".into() },
            Event { name: String::new(), id: Some("8".into()), data: "{}".into() },
        ];
        for size in [1, 2, 3, 7, text.len()] {
            let mut events = EventParser::default();
            let got: Vec<Event> = text.as_bytes().chunks(size).flat_map(|chunk| events.feed(chunk).unwrap()).collect();
            assert_eq!(got, expected, "cut into {size} bytes");
        }
    }

    #[test]
    fn only_refusals_that_pass_are_retried() {
        for (status, expected) in [(400, false), (401, false), (404, false), (408, true), (429, true), (503, true)] {
            assert_eq!(is_temporary(StatusCode::from_u16(status).unwrap()), expected, "{status}");
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut events = EventParser::default();
        assert!(events.feed(&vec![b'x'; MAX_EVENT_BYTES + 1]).is_err());
    }

    #[test]
    fn a_line_names_number_and_type_first() {
        let data = serde_json::json!({ "type": "message.created", "seq": 7, "channel": "general" });
        assert_eq!(
            format_event("message.created", &data, false),
            "       7  message.created  {\"channel\":\"general\"}"
        );
        assert!(format_event("message.created", &data, true).contains("\x1b[36mmessage.created\x1b[0m"));
    }
}
