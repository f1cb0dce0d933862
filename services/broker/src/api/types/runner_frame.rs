//! Frames of the runner socket `/api/fleet/ws`: JSON text, `v` 2, a type and a payload.

use serde::Deserialize;
use serde_json::{Value, json};

/// Version of the format.
pub(crate) const VERSION: u64 = 2;

/// Frame of a runner.
#[derive(Debug, PartialEq, Deserialize)]
pub(crate) struct Frame {
    pub(crate) v: u64,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default)]
    pub(crate) request_id: Option<String>,
    #[serde(default)]
    pub(crate) payload: Value,
}

/// Failure of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) retryable: bool,
}

impl Refusal {
    pub(crate) fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), retryable: false }
    }
}

/// Decodes a frame; `None` for a text that is none.
pub(crate) fn decode(text: &str) -> Option<Frame> {
    // A list would be taken for the values of the fields, in their order.
    if !text.trim_ascii_start().starts_with('{') {
        return None;
    }
    serde_json::from_str::<Frame>(text).ok().filter(|frame| frame.v == VERSION)
}

/// Encodes the answer to a request.
pub(crate) fn answer(request_id: Option<&str>, outcome: Result<Value, Refusal>) -> String {
    let (kind, payload) = match outcome {
        Ok(result) => ("ok", json!({ "result": result })),
        Err(Refusal { code, message, retryable }) => {
            ("error", json!({ "code": code, "message": message, "retryable": retryable }))
        }
    };
    let mut frame = json!({ "v": VERSION, "type": kind, "payload": payload });
    if let Some(request_id) = request_id {
        frame["request_id"] = json!(request_id);
    }
    frame.to_string()
}

/// Encodes a call of a handler.
pub(crate) fn invoke_handler(invocation_id: &str, name: &str, input: &Value) -> String {
    let payload = json!({ "invocation_id": invocation_id, "name": name, "input": input });
    json!({ "v": VERSION, "type": "invoke_handler", "payload": payload }).to_string()
}

/// Encodes the end of a call that is not waited for any more.
pub(crate) fn cancel_handler(invocation_id: &str, reason: &str) -> String {
    let payload = json!({ "invocation_id": invocation_id, "reason": reason });
    json!({ "v": VERSION, "type": "cancel_handler", "payload": payload }).to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::edits::settings;

    #[test]
    fn only_the_envelope_is_a_frame() {
        let frame = decode(r#"{"v":2,"type":"hello","request_id":"1","payload":{"a":1}}"#).expect("a frame");
        assert_eq!((frame.kind.as_str(), frame.request_id.as_deref()), ("hello", Some("1")));
        for text in [
            "",
            "[]",
            r#"[2,"hello","1",{}]"#,
            r#"{"type":"hello"}"#,
            r#"{"v":1,"type":"hello"}"#,
            r#"{"v":2,"type":3}"#,
        ] {
            assert_eq!(decode(text), None, "{text}");
        }
        assert_eq!(
            answer(Some("1"), Err(Refusal::new("frame_failed", "no"))),
            r#"{"v":2,"type":"error","payload":{"code":"frame_failed","message":"no","retryable":false},"request_id":"1"}"#
        );
        assert_eq!(answer(None, Ok(Value::Null)), r#"{"v":2,"type":"ok","payload":{"result":null}}"#);
    }

    /// Valid frames with pieces of others in them, and anything else.
    fn texts() -> impl Strategy<Value = String> {
        let pieces = [
            r#"{"v":2,"type":"hello","request_id":"1","payload":{}}"#,
            r#"{"v":2,"type":"handler_result","payload":{"invocation_id":"i","output":null}}"#,
            r#""v":2,"#,
            r#""type":"x","#,
            r#""request_id":7,"#,
            "\\u0000",
            "\\ud800",
            "1e999",
            "{",
            "}",
            "[",
            "]",
            "\"",
            ",",
            "\u{0}",
        ];
        let piece = prop_oneof![prop::sample::select(pieces.to_vec()).prop_map(str::to_owned), "\\PC{0,8}"];
        prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(settings())]

        #[test]
        fn any_text_is_a_frame_or_refused(text in texts()) {
            if let Some(frame) = decode(&text) {
                let value: Value = serde_json::from_str(&text).expect("JSON");
                prop_assert_eq!(&value["v"], VERSION);
                prop_assert_eq!(&value["type"], frame.kind.as_str());
            }
        }

        #[test]
        fn any_answer_is_one_frame(id in ".*", code in ".*", message in ".*") {
            let text = answer(Some(&id), Err(Refusal::new(&code, message.as_str())));
            let frame = decode(&text).expect("a frame");
            prop_assert_eq!(frame.request_id.as_deref(), Some(id.as_str()));
            prop_assert_eq!(&frame.payload["message"], message.as_str());
        }
    }
}
