//! Every frame of a runner with wrong types, sizes and encodings.

use anyhow::{Context, Result, ensure};
use relay_testkit::wait;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};

use super::fields::Kind::{self, Any, Flag, List, Never, Number, Object, Text, Word};
use super::routes::{Hostile, SPAWN};
use crate::runner::Runner;
use crate::scene::SOON;

/// JSON pointer and type of a field in a payload, and whether the payload needs it.
type Field = (&'static str, Kind, bool);

const NEEDED: bool = true;
const OPTIONAL: bool = false;

/// A frame of a runner.
struct Request {
    kind: &'static str,
    /// A payload that is taken.
    right: &'static str,
    fields: &'static [Field],
}

const fn request(kind: &'static str, right: &'static str, fields: &'static [Field]) -> Request {
    Request { kind, right, fields }
}

const CHANNELS: [Field; 2] = [("/name", Text, NEEDED), ("/channels", List, NEEDED)];

/// All frames, in an order in which each right one succeeds. The last two end a connection.
const REQUESTS: [Request; 18] = [
    request(
        "hello",
        r#"{"client_name": "test", "client_version": "1"}"#,
        &[("/client_name", Text, OPTIONAL), ("/client_version", Text, OPTIONAL)],
    ),
    request("register_node", MANIFEST, &REGISTRATION),
    request("register_handlers", r#"{"names": ["build"]}"#, &[("/names", List, NEEDED)]),
    request(
        "handler_result",
        r#"{"invocation_id": "1", "output": null}"#,
        &[("/invocation_id", Text, NEEDED), ("/output", Any, NEEDED), ("/error", Never, OPTIONAL)],
    ),
    request(
        "spawn_agent",
        r#"{"agent": {"name": "wanted", "cli": "cat"}, "initial_task": "task", "skip_relay_prompt": true}"#,
        &[
            ("/agent", Object, NEEDED),
            ("/agent/name", Text, NEEDED),
            ("/agent/harness_config", Object, OPTIONAL),
            ("/agent/harnessConfig", Object, OPTIONAL),
            ("/agent/session_id", Text, OPTIONAL),
            ("/agent/restart_policy", Object, OPTIONAL),
            ("/initial_task", Text, OPTIONAL),
            ("/skip_relay_prompt", Flag, OPTIONAL),
            ("/invocation_id", Text, OPTIONAL),
        ],
    ),
    request(
        "send_message",
        r##"{"to": "#general", "text": "wanted"}"##,
        &[
            ("/to", Text, NEEDED),
            ("/text", Text, NEEDED),
            ("/from", Text, OPTIONAL),
            ("/thread_id", Text, OPTIONAL),
            ("/workspace_id", Text, OPTIONAL),
            ("/workspace_alias", Text, OPTIONAL),
            ("/mode", Word, OPTIONAL),
            ("/data", Object, OPTIONAL),
        ],
    ),
    request("send_input", r#"{"name": "target", "data": "k"}"#, &[("/name", Text, NEEDED), ("/data", Text, NEEDED)]),
    request(
        "resize_pty",
        r#"{"name": "target", "rows": 30, "cols": 90}"#,
        &[("/name", Text, NEEDED), ("/rows", Number, NEEDED), ("/cols", Number, NEEDED)],
    ),
    request(
        "set_model",
        r#"{"name": "target", "model": "m", "timeout_ms": 9000}"#,
        &[("/name", Text, NEEDED), ("/model", Text, NEEDED), ("/timeout_ms", Number, OPTIONAL)],
    ),
    request("subscribe_channels", r##"{"name": "target", "channels": ["#other"]}"##, &CHANNELS),
    request("unsubscribe_channels", r#"{"name": "target", "channels": ["other"]}"#, &CHANNELS),
    request("list_agents", "{}", &[]),
    request("get_status", "{}", &[]),
    request("get_crash_insights", "{}", &[]),
    request("get_metrics", r#"{"agent": "target"}"#, &[("/agent", Text, OPTIONAL)]),
    request(
        "preflight_agents",
        r#"{"agents": [{"cli": "cat"}]}"#,
        &[("/agents", List, NEEDED), ("/agents/0", Object, OPTIONAL), ("/agents/0/cli", Text, OPTIONAL)],
    ),
    request(
        "release_agent",
        r#"{"name": "target", "reason": "enough"}"#,
        &[("/name", Text, NEEDED), ("/reason", Text, OPTIONAL)],
    ),
    request("deregister_node", "{}", &[]),
];

const MANIFEST: &str = r#"{
    "manifest": {"name": "frames", "capabilities": [{"name": "build", "kind": "action"}], "max_agents": 4,
                 "tags": ["x"], "version": "1"},
    "supervision": {"argv": ["true"], "cwd": "/", "env": {"x": "y"}, "restart_policy": {"enabled": false}}
}"#;

const REGISTRATION: [Field; 19] = [
    ("/manifest", Object, NEEDED),
    ("/manifest/name", Text, NEEDED),
    ("/manifest/capabilities", List, OPTIONAL),
    ("/manifest/capabilities/0", Object, OPTIONAL),
    ("/manifest/capabilities/0/name", Text, NEEDED),
    ("/manifest/capabilities/0/kind", Text, OPTIONAL),
    ("/manifest/max_agents", Number, OPTIONAL),
    ("/manifest/tags", List, OPTIONAL),
    ("/manifest/version", Text, OPTIONAL),
    ("/supervision", Object, OPTIONAL),
    ("/supervision/argv", List, NEEDED),
    ("/supervision/argv/0", Text, NEEDED),
    ("/supervision/cwd", Text, OPTIONAL),
    ("/supervision/env", Object, OPTIONAL),
    ("/supervision/env/x", Text, OPTIONAL),
    ("/supervision/restart_policy", Object, OPTIONAL),
    ("/supervision/restart_policy/enabled", Flag, OPTIONAL),
    ("/supervision/restart_policy/max_restarts", Number, OPTIONAL),
    ("/supervision/restart_policy/cooldown_ms", Number, OPTIONAL),
];

/// A payload with another value at a place; without the value, and so without the field, for `None`.
fn with(right: &str, pointer: &str, value: Option<Value>) -> Result<Value> {
    let mut payload: Value = serde_json::from_str(right)?;
    let (parent, key) = pointer.rsplit_once('/').context("a pointer")?;
    match (payload.pointer_mut(parent).with_context(|| format!("no {parent} in {right}"))?, value) {
        (Value::Array(list), Some(value)) => list[key.parse::<usize>()?] = value,
        (Value::Array(list), None) => drop(list.remove(key.parse()?)),
        (Value::Object(fields), Some(value)) => drop(fields.insert(key.to_owned(), value)),
        (Value::Object(fields), None) => drop(fields.remove(key)),
        (other, _) => anyhow::bail!("{other} has no fields"),
    }
    Ok(payload)
}

/// Wrong payloads of a frame.
fn wrong_payloads(request: &Request) -> Result<Vec<Value>> {
    let mut payloads = vec![json!("text"), json!(7), json!(true), json!([]), json!([["x"]]), json!([{}])];
    let mut fields: Vec<(String, Kind, bool)> =
        request.fields.iter().map(|(pointer, kind, needed)| ((*pointer).to_owned(), *kind, *needed)).collect();
    if request.kind == "spawn_agent" {
        let shared = SPAWN.iter().filter(|(name, ..)| *name != "name");
        fields.extend(shared.map(|(name, kind, _)| (format!("/agent/{name}"), *kind, OPTIONAL)));
    }
    for (pointer, kind, needed) in fields {
        let null = (needed && kind != Any).then_some(Value::Null);
        // So large that no answer should repeat it.
        let large = (!matches!(kind, Text | Any)).then(|| json!("x".repeat(900 << 10)));
        for wrong in kind.wrong_values().into_iter().chain(null).chain(large) {
            payloads.push(with(request.right, &pointer, Some(wrong))?);
        }
        if needed {
            payloads.push(with(request.right, &pointer, None)?);
        }
    }
    Ok(payloads)
}

/// Returns an error unless an answer refuses a payload: the broker reads it, or a route of the listen API does.
fn check_refused(kind: &str, payload: &Value, answer: &Value) -> Result<()> {
    let shown: String = payload.to_string().chars().take(300).collect();
    let length = answer.to_string().len();
    ensure!(length < 2048, "{kind} {shown}: an answer of {length} bytes");
    let codes = ["frame_failed", "invalid_request", "invalid_mode"];
    let code = answer["payload"]["code"].as_str().unwrap_or_default();
    let is_refused = answer["type"] == "error" && codes.contains(&code) && answer["payload"]["retryable"] == false;
    ensure!(is_refused && answer["payload"]["message"].is_string(), "{kind} {shown}: {answer}");
    Ok(())
}

#[tokio::test]
async fn every_frame_of_a_runner_refuses_wrong_payloads_and_does_nothing() -> Result<()> {
    let hostile = Hostile::new("frames").await?;
    let scene = &hostile.scene;
    scene.broker.wait_connected().await?;
    let mut runner = Runner::connect(scene).await?;
    let before = super::memory(scene).await?;
    let mut count = 0;
    for request in &REQUESTS {
        for payload in wrong_payloads(request)? {
            let answer = runner.ask(request.kind, payload.clone()).await?;
            check_refused(request.kind, &payload, &answer)?;
            count += 1;
        }
        let served = runner.ask("list_agents", json!({})).await?;
        ensure!(served["type"] == "ok", "after {}: {served}", request.kind);
    }
    println!("figures hostile frames: {count} frames of {} types", REQUESTS.len() + 1);
    hostile.nothing_happened(before).await?;
    let status = scene.workspace.get("/v1/nodes").await?.success()?;
    ensure!(!status.to_string().contains("\"build\""), "a wrong manifest is registered: {status}");

    // The same payloads without a fault.
    for Request { kind, right, .. } in &REQUESTS {
        let answer = runner.ask(kind, serde_json::from_str(right)?).await?;
        let expected = if *kind == "handler_result" { json!("unknown_invocation") } else { Value::Null };
        ensure!(answer["payload"]["code"] == expected, "{kind}: {answer}");
    }
    let closed = runner.next().await;
    ensure!(closed.as_ref().is_err_and(|error| error.to_string().contains("deregistered")), "{closed:?}");
    let mut last = Runner::connect(scene).await?;
    for payload in [json!([]), json!("now"), json!(7)] {
        check_refused("shutdown", &payload, &last.ask("shutdown", payload.clone()).await?)?;
    }
    last.ask("shutdown", json!({})).await?;
    wait::until_ok("its end", SOON, || async {
        ensure!(!scene.broker.is_running());
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn texts_that_are_no_frames_are_refused_without_an_id() -> Result<()> {
    let hostile = Hostile::new("texts").await?;
    let scene = &hostile.scene;
    let before = super::memory(scene).await?;
    let mut runner = Runner::connect(scene).await?;
    let envelopes = [
        r#"{"v":2,"payload":{}}"#,
        r#"{"v":2,"type":null,"payload":{}}"#,
        r#"{"v":2,"type":["hello"],"payload":{}}"#,
        r#"{"v":2,"type":7,"payload":{}}"#,
        r#"{"type":"hello","payload":{}}"#,
        r#"{"v":null,"type":"hello","payload":{}}"#,
        r#"{"v":"2","type":"hello","payload":{}}"#,
        r#"{"v":2.5,"type":"hello","payload":{}}"#,
        r#"{"v":-2,"type":"hello","payload":{}}"#,
        r#"{"v":3,"type":"hello","payload":{}}"#,
        r#"{"v":18446744073709551618,"type":"hello","payload":{}}"#,
        r#"{"v":2,"type":"hello","request_id":7,"payload":{}}"#,
        r#"{"v":2,"type":"hello","request_id":{},"payload":{}}"#,
        r#"{"v":2,"v":2,"type":"hello","payload":{}}"#,
        r#"{"v":2,"type":"hello","payload":{"client_name":"\ud800"}}"#,
        "{\"v\":2,\"type\":\"hello\",\"payload\":{\"client_name\":\"\u{1}\"}}",
        r#"{"v":2,"type":"hello","payload":{"client_name":1e999}}"#,
        r#"{"v":2,"type":"hello","payload":{}} {}"#,
        r#"{"v":2,"type":"hello","payload":"#,
        "\u{feff}{\"v\":2,\"type\":\"hello\",\"payload\":{}}",
        r#"[2,"hello","1",{}]"#,
        "null",
        "7",
        "\"hello\"",
    ];
    let nested = format!(r#"{{"v":2,"type":"hello","payload":{}"#, r#"{"k":"#.repeat(100_000));
    let long = format!(r#"{{"v":2,"type":"hello","request_id":"1","payload":"{}"#, "x".repeat(900 << 10));
    for text in envelopes.into_iter().chain([nested.as_str(), long.as_str()]) {
        runner.send_text(text).await?;
        let answer = runner.next().await?;
        let shown: String = text.chars().take(200).collect();
        let is_refused = answer["type"] == "error" && answer["payload"]["code"] == "invalid_frame";
        ensure!(is_refused && answer.get("request_id").is_none(), "{shown}: {answer}");
    }
    for kind in ["", "HELLO", "hello ", "invoke_handler", "../api/spawn", "h\u{e9}llo", &"x".repeat(500)] {
        check_refused(kind, &Value::Null, &runner.ask(kind, json!({})).await?)?;
    }
    // They are not answered.
    let utf16: Vec<u8> = "{}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    for bytes in [utf16, br#"{"v":2,"type":"shutdown","payload":{}}"#.to_vec(), vec![0xff; 1 << 20]] {
        runner.send_message(Message::binary(bytes)).await?;
    }
    ensure!(runner.ask("hello", json!({})).await?["type"] == "ok");

    // A text that is none, and frames that are too long, cost the connection and nothing else.
    let text = |bytes: Vec<u8>| Message::Frame(Frame::message(bytes, OpCode::Data(Data::Text), true));
    let padded =
        |size: usize| Message::text(format!(r#"{{"v":2,"type":"shutdown","payload":"{}"}}"#, "x".repeat(size)));
    for message in [text(b"{\"v\":2,\"type\":\"\xff\"}".to_vec()), padded(1 << 20), padded(5 << 20)] {
        let mut runner = Runner::connect(scene).await?;
        // It may be closed before everything is sent.
        let _ = runner.send_message(message).await;
        while runner.next().await.is_ok() {}
        let mut next = Runner::connect(scene).await?;
        ensure!(next.ask("hello", json!({})).await?["type"] == "ok");
    }
    hostile.nothing_happened(before).await
}
