//! `GET /api/input/{name}/stream`: keys over a WebSocket, with an ack for each frame in order.

use axum::{
    extract::{
        Path,
        ws::{Message, WebSocket, WebSocketUpgrade},
    },
    response::Response,
};
use bytes::Bytes;
use serde_json::{Value, json};

use super::{error::ApiError, extract::Ready};
use crate::agents::{AgentError, AgentHandle};

const MAX_FRAME: usize = 1 << 20;

/// Opens the stream. An unknown or headless agent is refused after the upgrade: clients cannot read the body of a refused one.
pub(super) async fn open(ready: Ready, Path(name): Path<String>, upgrade: WebSocketUpgrade) -> Response {
    let agent = ready.services.agents.get(&name).and_then(|agent| match agent.spec.headless {
        Some(_) => Err(AgentError::UnsupportedRuntime),
        None => Ok(agent),
    });
    let closing = ready.0.inner.closing.clone();
    upgrade.max_message_size(MAX_FRAME).on_upgrade(async move |socket| {
        closing.run_until_cancelled_owned(serve(socket, name, agent)).await;
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
    while let Some(Ok(message)) = socket.recv().await {
        let keys = match message {
            Message::Text(text) => keys_of(text.as_str()),
            Message::Binary(bytes) => match std::str::from_utf8(&bytes) {
                Ok(_) => Ok(bytes),
                Err(_) => Err("the frame is not UTF-8"),
            },
            Message::Ping(_) | Message::Pong(_) => continue,
            Message::Close(_) => return,
        };
        let answer = match keys {
            Ok(keys) => match agent.type_keys(keys).await {
                Ok(count) => json!({ "type": "pty_input_ack", "name": name, "bytes_written": count }),
                Err(error) => return refuse(&mut socket, error.into()).await,
            },
            Err(problem) => error_frame("invalid_input", problem, 400),
        };
        if send(&mut socket, &answer).await.is_err() {
            return;
        }
    }
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
