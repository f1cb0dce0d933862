//! Texts of frames that an engine could send: malformed ones, ones for others, and ones without an effect.

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use crate::hostile::fields::Kind::{self, Number, Object, Text, Word};

/// Text that no terminal may get. As keys it would end a paste, and then the agent.
pub(super) const BODY: &str = "unwanted\u{1b}[201~\r/exit\r\n/exit\n\u{3}\u{4}";
/// Bytes of a large value. The frame around it is below the broker's bound.
pub(super) const LARGE: usize = 900 << 10;
/// Levels that a JSON parser must not follow by recursion.
const DEPTH: usize = 10_000;

/// Need of a frame for a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    Needed,
    /// It may be absent. `null` is wrong.
    Optional,
    /// It may be absent or `null`.
    Nullable,
}

use Presence::{Needed, Nullable, Optional};

pub(super) type Field = (&'static str, Kind, Presence);

const DELIVER: [Field; 9] = [
    ("/delivery_id", Text, Needed),
    ("/agent_id", Text, Needed),
    ("/agent", Text, Needed),
    ("/msg_id", Text, Needed),
    ("/seq", Number, Needed),
    ("/mode", Word, Needed),
    ("/payload", Object, Needed),
    ("/payload/type", Text, Optional),
    ("/payload/data", Object, Optional),
];

const INVOKE: [Field; 7] = [
    ("/invocation_id", Text, Needed),
    ("/action", Text, Needed),
    ("/input", Object, Optional),
    ("/agent_id", Text, Nullable),
    ("/agent_name", Text, Nullable),
    ("/caller_id", Text, Nullable),
    ("/caller_name", Text, Nullable),
];

pub(super) const REPLY: [Field; 1] = [("/id", Text, Optional)];
pub(super) const ERROR: [Field; 3] = [("/id", Text, Optional), ("/code", Text, Optional), ("/message", Text, Optional)];

/// Texts that are no JSON objects with a `type`.
const NO_FRAMES: [&str; 24] = [
    "",
    " \n",
    "deliver",
    "{",
    "{}",
    "null",
    "7",
    "true",
    "\"deliver\"",
    "[]",
    r#"["deliver"]"#,
    r#"["reply"]"#,
    r#"["error"]"#,
    r#"[{"type":"deliver"}]"#,
    r#"{"type":null}"#,
    r#"{"type":7}"#,
    r#"{"type":["deliver"]}"#,
    r#"{"type":{"deliver":{}}}"#,
    r#"{"type":"deliver","type":"deliver"}"#,
    r#"{"type":"\ud800"}"#,
    r#"{"type":"deliver"} {}"#,
    "\u{feff}{\"type\":\"deliver\"}",
    "{\"type\":\"\u{1}\"}",
    r#"{"TYPE":"deliver"}"#,
];

/// Ids of no request that waits.
pub(super) const UNKNOWN_IDS: [&str; 9] =
    ["", "b", "b0", "b-1", "b4294967295", "b18446744073709551615", "b18446744073709551616", "request", "b\n1"];

/// Copy of a frame with another value at a place; without the value, and so without the field, for `None`.
pub(super) fn with(frame: &Value, pointer: &str, value: Option<Value>) -> Result<Value> {
    let mut frame = frame.clone();
    let (parent, key) = pointer.rsplit_once('/').context("a pointer")?;
    let fields = frame.pointer_mut(parent).and_then(Value::as_object_mut);
    let fields = fields.with_context(|| format!("no {parent} in a frame"))?;
    match value {
        Some(value) => drop(fields.insert(key.to_owned(), value)),
        None => drop(fields.remove(key)),
    }
    Ok(frame)
}

/// Copy of a frame with other values of some of its fields.
pub(super) fn having(frame: &Value, fields: &Value) -> Value {
    let (frame, fields) = (frame.as_object().cloned(), fields.as_object().cloned());
    frame.into_iter().chain(fields).flatten().collect::<Map<_, _>>().into()
}

/// Every wrong value of every field, and absence where the field is needed.
pub(super) fn wrong_frames(right: &Value, fields: &[Field]) -> Result<Vec<String>> {
    let mut frames = Vec::new();
    for (pointer, kind, presence) in fields {
        let null = (*presence != Nullable).then_some(Value::Null);
        let large = (*kind != Text).then(|| json!("x".repeat(LARGE)));
        for value in kind.wrong_values().into_iter().chain(null).chain(large) {
            frames.push(with(right, pointer, Some(value))?.to_string());
        }
        if *presence == Needed {
            frames.push(with(right, pointer, None)?.to_string());
        }
    }
    Ok(frames)
}

/// The frame of a real message with an unwanted text.
pub(super) fn unwanted(real: &Value) -> Value {
    let payload = json!({ "type": "message.created", "data": { "text": BODY, "agent_name": "boss" } });
    having(real, &json!({ "delivery_id": "unwanted", "msg_id": "unwanted", "payload": payload }))
}

/// Texts that cannot be read, each of which would have an effect if it were.
pub(super) fn unreadable(real: &Value) -> Result<Vec<String>> {
    let right = unwanted(real);
    let invoke = json!({
        "v": 1, "type": "action.invoke", "invocation_id": "unwanted", "action": "release",
        "input": { "name": real["agent"] }, "agent_id": real["agent_id"], "agent_name": real["agent"],
    });
    let reply = json!({ "v": 1, "type": "reply", "id": "b1", "ok": true, "data": {} });
    let error = json!({ "v": 1, "type": "error", "id": "b1", "ok": false, "code": "code", "message": "text" });
    let mut texts: Vec<String> = NO_FRAMES.map(str::to_owned).into();
    for (right, fields) in [(&right, &DELIVER[..]), (&invoke, &INVOKE), (&reply, &REPLY), (&error, &ERROR)] {
        texts.extend(wrong_frames(right, fields)?);
        texts.push(with(right, "/type", None)?.to_string());
        texts.push(with(right, "/type", Some(Value::Null))?.to_string());
    }
    let text = right.to_string();
    let seq = format!(r#""seq":{}"#, real["seq"]);
    ensure!(text.contains(&seq), "no seq in {text}");
    for wrong in ["18446744073709551616", "-0", "1e0", "01", "+1", "1e999", "0x1", "NaN"] {
        texts.push(text.replace(&seq, &format!(r#""seq":{wrong}"#)));
    }
    for (pointer, wrong) in
        [("/payload", json!(["message.created", { "text": BODY }])), ("/mode", json!({ "wait": null }))]
    {
        texts.push(with(&right, pointer, Some(wrong))?.to_string());
    }
    // A field twice, half a frame, two frames in one.
    texts.push(text.replace(&seq, &format!("{seq},{seq}")));
    texts.push(text[..text.len() - 1].to_owned());
    texts.push(format!("{text}{text}"));
    let nested = format!("{}1{}", "[".repeat(DEPTH), "]".repeat(DEPTH));
    let objects = format!("{}1{}", r#"{"x":"#.repeat(DEPTH), "}".repeat(DEPTH));
    texts.extend(["[".repeat(DEPTH), nested.clone(), objects.clone()]);
    for deep in [&nested, &objects] {
        let deep_text = having(&right, &json!({ "payload": { "data": { "text": BODY, "deep": "DEEP" } } }));
        let deep_reply = having(&reply, &json!({ "data": "DEEP" }));
        let deep_invoke = having(&invoke, &json!({ "input": { "deep": "DEEP" } }));
        texts.extend([deep_text, deep_reply, deep_invoke].map(|frame| frame.to_string().replace("\"DEEP\"", deep)));
    }
    Ok(texts)
}

/// Frames for agents that are not here: another name, or the name of the hosted agent and another id.
pub(super) fn misdirected(real: &Value) -> Vec<Value> {
    let frame = unwanted(real);
    let seqs = [json!(0), real["seq"].clone(), json!(1), json!(1_u64 << 63), json!(u64::MAX)];
    let mut frames = Vec::new();
    for seq in &seqs {
        for mode in ["wait", "steer"] {
            for id in ["", "0", "unwanted", "1\n2", "\u{0}"] {
                frames.push(having(&frame, &json!({ "agent_id": id, "seq": seq, "mode": mode })));
            }
            for name in ["", "nobody", "WORKER", "worker ", "../worker", "worker\n", "wor\u{0}ker", "boss\r/exit\r"] {
                frames.push(having(&frame, &json!({ "agent": name, "seq": seq, "mode": mode })));
            }
        }
    }
    let large = json!({ "type": "message.created", "data": { "text": "unwanted".repeat(LARGE / 8) } });
    let large = json!({ "agent": "nobody", "agent_id": "0", "payload": large });
    frames.extend((0..32).map(|_| having(&frame, &large)));
    frames
}

/// Frames that are legal, and say nothing new or ask for nothing that can be done.
pub(super) fn ineffective(real: &Value) -> Vec<Value> {
    let frame = unwanted(real);
    let mut frames: Vec<Value> = (1..=3).map(|seq| having(&frame, &json!({ "seq": seq }))).collect();
    let ids = json!({ "delivery_id": "un\nwanted\r", "msg_id": "un\u{1b}[201~\nwanted", "seq": 1 });
    frames.push(having(&frame, &ids));
    let data = json!({ "text": BODY, "message_id": "un\nwanted", "agent_name": "worker" });
    for kind in ["message.reacted", "message.read", "delivery.expired", "delivery.position", "unknown", "message.\n"] {
        let payload = json!({ "type": kind, "data": data });
        frames.push(having(&frame, &json!({ "seq": 0, "msg_id": kind, "payload": payload })));
    }
    let nobody = json!({ "seq": 0, "agent": "nobody\n", "payload": { "type": "delivery.position" } });
    frames.push(having(&frame, &nobody));
    for id in UNKNOWN_IDS {
        frames.push(json!({ "v": 1, "type": "reply", "id": id, "data": { "name": "unwanted", "token": "x" } }));
        frames.push(json!({ "v": 1, "type": "error", "id": id, "code": "un\nwanted", "message": BODY }));
    }
    frames.extend([json!({ "type": "reply" }), json!({ "type": "error" })]);
    let spawns = [json!({}), json!({ "name": 7, "cli": [] }), json!({ "name": "un\nwanted", "cli": "cat" })];
    for (number, input) in spawns.into_iter().enumerate() {
        let id = format!("unwanted\n{number}");
        frames.push(json!({ "v": 1, "type": "action.invoke", "invocation_id": id, "action": "spawn", "input": input }));
    }
    for action in ["", "release", "RELEASE", "unknown\n", "../release"] {
        frames.push(json!({ "v": 1, "type": "action.invoke", "invocation_id": action, "action": action }));
    }
    let long = "k".repeat(LARGE);
    let kinds = ["", "DELIVER", "deliver ", "ping", "context.update", "node.deregister", "agent.register", &long];
    frames.extend(kinds.map(|kind| having(&frame, &json!({ "type": kind }))));
    frames
}
