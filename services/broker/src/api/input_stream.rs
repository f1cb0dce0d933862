//! `GET /api/input/{name}/stream`: keys over a WebSocket, with an ack for each frame in order.

use std::{collections::VecDeque, pin::pin};

use axum::{
    extract::ws::{Message, WebSocket},
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep_until};

use super::{
    error::ApiError,
    extract::{Path, Ready, Upgrade},
    inbound::{Inbound, MAX_READ, close_too_large, size},
};
use crate::{
    agents::{AgentError, AgentHandle},
    metric_names,
};

/// Frames that wait for earlier ones to be typed. The socket is not read beyond it.
const MAX_EARLY_BYTES: usize = 1 << 20;
const MAX_EARLY: usize = 1024;
/// Keys of a client that has left are typed within this time, or not at all.
const LEFT_PATIENCE: Duration = Duration::from_secs(10);

/// Opens the stream. An unknown or headless agent is refused after the upgrade: clients cannot read the body of a
/// refused one.
pub(super) async fn open(ready: Ready, Path(name): Path<String>, Upgrade(upgrade): Upgrade) -> Response {
    let agent = ready.services.agents.get(&name).and_then(|agent| match agent.spec.headless {
        Some(_) => Err(AgentError::UnsupportedRuntime),
        None => Ok(agent),
    });
    let place = match &agent {
        Ok(agent) => match agent.input_streams.clone().try_acquire_owned() {
            Ok(place) => Some(place),
            Err(_) => {
                let message = "16 input streams of this agent are open";
                return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_streams", message).into_response();
            }
        },
        Err(_) => None,
    };
    let closing = ready.0.inner.closing.clone();
    upgrade.max_message_size(MAX_READ).on_upgrade(async move |socket| {
        closing.run_until_cancelled_owned(serve(socket, name, agent)).await;
        // Held until the socket has ended, also by the end of the broker.
        drop(place);
    })
}

async fn serve(mut socket: WebSocket, name: String, agent: Result<AgentHandle, AgentError>) {
    let agent = match agent {
        Ok(agent) => agent,
        Err(error) => return refuse(&mut socket, error.into()).await,
    };
    let ready = json!({ "type": "pty_input_ready", "name": name });
    if send(&mut socket, &ready).await.is_err() {
        return;
    }
    let mut frames = Frames { socket, early: VecDeque::new(), early_bytes: 0, end: None };
    loop {
        let keys = match frames.next().await {
            Inbound::Frame(Message::Text(text)) => keys_of(text.as_str()),
            Inbound::Frame(Message::Binary(bytes)) => match std::str::from_utf8(&bytes) {
                Ok(_) => Ok(bytes),
                Err(_) => Err("the frame is not UTF-8"),
            },
            Inbound::Frame(_) => continue,
            Inbound::TooLarge => return close_too_large(&mut frames.socket).await,
            Inbound::Ended => return,
        };
        let answer = match keys {
            // A program that does not read is no error: the client goes on waiting for its ack.
            Ok(keys) => match frames.while_taking(agent.type_keys_unhurried(keys)).await {
                Some(Ok(count)) => json!({ "type": "pty_input_ack", "name": name, "bytes_written": count }),
                Some(Err(error)) => return refuse(&mut frames.socket, error.into()).await,
                None => return,
            },
            Err(problem) => error_frame("invalid_input", problem, 400),
        };
        // A client that has left gets no acks; what it has sent is typed all the same.
        if send(&mut frames.socket, &answer).await.is_err() && frames.end.is_none() {
            return;
        }
    }
}

/// Frames of the client in their order, some of which come while earlier ones are typed.
struct Frames {
    socket: WebSocket,
    early: VecDeque<Message>,
    early_bytes: usize,
    /// The last thing that came, and the instant.
    end: Option<(Inbound, Instant)>,
}

impl Frames {
    async fn next(&mut self) -> Inbound {
        if let Some(frame) = self.early.pop_front() {
            self.early_bytes -= size(&frame);
            early_gauge().decrement(1.0);
            return Inbound::Frame(frame);
        }
        match self.end.take() {
            Some((end, _)) => end,
            None => self.socket.recv().await.into(),
        }
    }

    /// Waits for a piece of work, and takes frames meanwhile. `None` if the client has left and the work takes too
    /// long.
    async fn while_taking<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        loop {
            let has_room = self.early_bytes < MAX_EARLY_BYTES && self.early.len() < MAX_EARLY;
            let given_up_at = self.end.as_ref().map(|(_, at)| *at + LEFT_PATIENCE);
            tokio::select! {
                outcome = &mut work => return Some(outcome),
                read = self.socket.recv(), if has_room && given_up_at.is_none() => match Inbound::from(read) {
                    Inbound::Frame(frame) => {
                        self.early_bytes += size(&frame);
                        self.early.push_back(frame);
                        early_gauge().increment(1.0);
                    }
                    end @ (Inbound::TooLarge | Inbound::Ended) => self.end = Some((end, Instant::now())),
                },
                () = sleep_until(given_up_at.unwrap_or_else(Instant::now)), if given_up_at.is_some() => return None,
            }
        }
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        early_gauge().decrement(self.early.len() as f64);
    }
}

/// Frames of all streams of keys that wait.
fn early_gauge() -> metrics::Gauge {
    metrics::gauge!(metric_names::QUEUE_ITEMS, "queue" => "key_frames")
}

/// Keys of a text frame: the `data` of a `pty_input` object, or the text itself.
fn keys_of(text: &str) -> Result<Bytes, &'static str> {
    let parsed = text.starts_with('{').then(|| serde_json::from_str::<Value>(text).ok()).flatten();
    match parsed.filter(|object| object["type"] == "pty_input") {
        Some(object) => match object["data"].as_str() {
            Some(data) => Ok(data.to_owned().into()),
            None => Err("pty_input needs data, a string"),
        },
        None => Ok(text.to_owned().into()),
    }
}

async fn refuse(socket: &mut WebSocket, error: ApiError) {
    let frame = error_frame(error.code(), error.message(), error.status().as_u16());
    if send(socket, &frame).await.is_ok() {
        // The client may have closed first.
        let _ = socket.send(Message::Close(None)).await;
    }
}

fn error_frame(code: &str, message: &str, status: u16) -> Value {
    json!({
        "type": "pty_input_error",
        "code": code,
        "message": message,
        "retryable": status >= 500,
        "statusCode": status,
    })
}

async fn send(socket: &mut WebSocket, frame: &Value) -> Result<(), axum::Error> {
    socket.send(Message::text(frame.to_string())).await
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::edits::{edited, settings};

    /// Frames of drivers.
    const RECORDED: [&[u8]; 5] = [
        br#"{"type":"pty_input","data":"ls -l\r"}"#,
        br#"{"type":"pty_input","data":"\u001b[200~\ud83c\udf89\u001b[201~"}"#,
        br#"{"type":"resize","rows":24}"#,
        "\x1b[A\x03\x04h\u{e9}llo\r".as_bytes(),
        b"{\"type\":\"pty_input\"",
    ];

    proptest! {
        #![proptest_config(settings())]

        /// Fuzz target of input frames: each is typed as its text or its data, or refused.
        #[test]
        fn edited_frames_are_typed_or_refused(bytes in edited(&RECORDED, &[b"\"data\":", b"{", b"\"", b"\\ud800", b"\x00"])) {
            let Ok(text) = std::str::from_utf8(&bytes) else { return Ok(()) };
            let object = text.starts_with('{').then(|| serde_json::from_str::<Value>(text).ok()).flatten();
            match (keys_of(text), object.filter(|object| object["type"] == "pty_input")) {
                (Ok(keys), None) => prop_assert_eq!(keys, text.as_bytes()),
                (Ok(keys), Some(object)) => prop_assert_eq!(Some(&keys[..]), object["data"].as_str().map(str::as_bytes)),
                (Err(_), object) => prop_assert!(object.is_some_and(|object| !object["data"].is_string())),
            }
        }

        /// Only an object of type `pty_input` is not typed as it is.
        #[test]
        fn any_text_is_typed_or_refused(text in prop_oneof![
            ".*",
            "\\{\"type\":\"pty_input\",\"data\":(\"[a-z\\\\u]{0,6}\"|7|null|\\{\\})\\}",
            "\\{\"type\":\"(pty_input|other)\"[,}]?.*",
        ]) {
            let object = serde_json::from_str::<Value>(&text).ok().filter(Value::is_object);
            let named = object.filter(|object| object["type"] == "pty_input" && text.starts_with('{'));
            match (keys_of(&text), named) {
                (Ok(keys), None) => prop_assert_eq!(keys, text.as_bytes()),
                (Ok(keys), Some(object)) => prop_assert_eq!(Some(&keys[..]), object["data"].as_str().map(str::as_bytes)),
                (Err(_), object) => prop_assert!(object.is_some_and(|object| !object["data"].is_string())),
            }
        }
    }

    #[test]
    fn frames_are_keys_unless_they_say_otherwise() {
        for (frame, keys) in [
            ("ls\r", Ok("ls\r")),
            (r#"{"type":"pty_input","data":"\u0003"}"#, Ok("\u{3}")),
            (r#"{"type":"other"}"#, Ok(r#"{"type":"other"}"#)),
            ("{", Ok("{")),
            (r#"{"type":"pty_input"}"#, Err("pty_input needs data, a string")),
        ] {
            assert_eq!(keys_of(frame), keys.map(|keys: &str| Bytes::from(keys.to_owned())), "{frame}");
        }
    }
}
