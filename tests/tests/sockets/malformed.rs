//! Malformed and malicious input of nodes: the right error with the request's id, a socket that stays open where
//! required (docs/protocol/node.md, "Socket" and "Frames"), and unaffected delivery.

use std::time::Duration;

use anyhow::Result;
use futures::{SinkExt as _, StreamExt as _};
use relay_testkit::client::{Agent, Api, NodeSocket};
use relay_testkit::shared;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};

const SOON: Duration = Duration::from_secs(30);

/// Workspace with a sender and a connected receiver.
struct Scene {
    key: Api,
    sender: Api,
    bob: Agent,
    socket: NodeSocket,
    node_id: String,
}

impl Scene {
    async fn new(name: &str) -> Result<Self> {
        let key = Api::create_workspace(shared().await.any_gateway(), name).await?;
        let sender = key.as_agent(&key.register_agent("ann").await?);
        let bob = key.register_agent("bob").await?;
        let as_bob = key.as_agent(&bob);
        let node = as_bob.direct_node_token().await?;
        let mut socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
        socket.register_direct(&node.node_id, &node.name).await?;
        Ok(Self { key, sender, bob, socket, node_id: node.node_id })
    }

    /// Asserts that a message arrives on the same connection, is acked, and the ack counts.
    async fn still_delivers(&mut self, seq: u64) -> Result<()> {
        let text = format!("after the storm {seq}");
        self.sender.dm("bob", &text).await?.success()?;
        let frame = self.socket.expect("deliver").await?;
        assert_eq!((frame["seq"].as_u64(), &frame["payload"]["data"]["text"]), (Some(seq), &json!(text)));
        self.socket.ack("bob", seq).await?;
        self.acked(seq).await;
        Ok(())
    }

    /// Waits until the ack floor is exactly `seq`.
    async fn acked(&self, seq: u64) {
        let path = format!("/v1/nodes/direct-{}/agents", self.bob.id);
        relay_testkit::wait::until("the ack to be stored", SOON, || async {
            let agents = self.key.get(&path).await.expect("an answer");
            agents.data()[0]["delivery_ack_seq"].as_u64() == Some(seq)
        })
        .await;
    }

    async fn send_frame(&self, text: &str) -> Result<()> {
        self.socket.send_message(Message::text(text)).await
    }

    async fn error(&mut self) -> Result<Value> {
        self.socket.expect("error").await
    }
}

/// The only keys that strict clients accept.
fn assert_error_shape(frame: &Value, id: &str, code: &str) {
    let mut keys: Vec<_> = frame.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["code", "id", "message", "ok", "type", "v"], "{frame}");
    assert_eq!((&frame["v"], &frame["type"], &frame["ok"]), (&json!(1), &json!("error"), &json!(false)), "{frame}");
    assert_eq!((frame["id"].as_str(), frame["code"].as_str()), (Some(id), Some(code)), "{frame}");
    assert!(frame["message"].as_str().is_some_and(|text| !text.is_empty() && text.len() < 2048), "{frame}");
}

#[tokio::test]
async fn an_invalid_frame_is_refused_with_its_id_and_the_socket_stays_open() -> Result<()> {
    let mut scene = Scene::new("malformed").await?;
    let long = "x".repeat(100_000);
    let node = scene.node_id.clone();
    let table: Vec<(String, &str)> = vec![
        ("not json".into(), ""),
        (String::new(), ""),
        ("{".into(), ""),
        ("[]".into(), ""),
        ("[{\"v\":1}]".into(), ""),
        ("null".into(), ""),
        ("17".into(), ""),
        ("\"delivery.ack\"".into(), ""),
        ("{}".into(), ""),
        ("{\"v\":1,\"id\":\"a\",\"type\":\"delivery.ack\",\"agent\":\"bob\",\"up_to_seq\":1".into(), ""),
        (r#"{"id":"no-v","type":"delivery.ack","agent":"bob","up_to_seq":1}"#.into(), "no-v"),
        (r#"{"v":2,"id":"v2","type":"delivery.ack","agent":"bob","up_to_seq":1}"#.into(), "v2"),
        (r#"{"v":"1","id":"vs","type":"delivery.ack","agent":"bob","up_to_seq":1}"#.into(), "vs"),
        (r#"{"v":1.5,"id":"vf","type":"delivery.ack","agent":"bob","up_to_seq":1}"#.into(), "vf"),
        (r#"{"v":null,"id":"vn","type":"delivery.ack","agent":"bob","up_to_seq":1}"#.into(), "vn"),
        (r#"{"v":1,"id":"no-type"}"#.into(), "no-type"),
        (r#"{"v":1,"id":"type-7","type":7}"#.into(), "type-7"),
        (r#"{"v":1,"id":"unknown","type":"node.explode"}"#.into(), "unknown"),
        (r#"{"v":1,"id":"ours","type":"deliver","seq":1}"#.into(), "ours"),
        (r#"{"v":1,"id":"later","type":"action.result","output":null}"#.into(), "later"),
        (format!(r#"{{"v":1,"id":"long-type","type":"{long}"}}"#), "long-type"),
        (r#"{"v":1,"id":"bare-ack","type":"delivery.ack"}"#.into(), "bare-ack"),
        (r#"{"v":1,"id":"ack-7","type":"delivery.ack","agent":7,"up_to_seq":1}"#.into(), "ack-7"),
        (r#"{"v":1,"id":"neg","type":"delivery.ack","agent":"bob","up_to_seq":-1}"#.into(), "neg"),
        (r#"{"v":1,"id":"frac","type":"delivery.ack","agent":"bob","up_to_seq":1.5}"#.into(), "frac"),
        (r#"{"v":1,"id":"over","type":"delivery.ack","agent":"bob","up_to_seq":18446744073709551616}"#.into(), "over"),
        (format!(r#"{{"v":1,"id":"text","type":"delivery.ack","agent":"bob","up_to_seq":"{long}"}}"#), "text"),
        (r#"{"v":1,"id":"reg","type":"node.register"}"#.into(), "reg"),
        (
            format!(
                r#"{{"v":1,"id":"caps","type":"node.register","name":"n","node_id":"{node}","capabilities":"all","max_agents":1,"tags":[],"version":"1"}}"#
            ),
            "caps",
        ),
        (
            format!(
                r#"{{"v":1,"id":"max","type":"node.register","name":"n","node_id":"{node}","capabilities":[],"max_agents":-1,"tags":[],"version":"1"}}"#
            ),
            "max",
        ),
        (r#"{"v":1,"id":"hb","type":"node.heartbeat","load":"high"}"#.into(), "hb"),
        (r#"{"v":1,"id":"hb-neg","type":"node.heartbeat","active_agents":-1}"#.into(), "hb-neg"),
        (r#"{"v":1,"id":"inv","type":"inventory.sync","agents":{}}"#.into(), "inv"),
        (r#"{"v":1,"id":"inv-2","type":"inventory.sync","agents":[{"name":"bob"}]}"#.into(), "inv-2"),
        (r#"{"v":1,"id":"dereg","type":"agent.deregister"}"#.into(), "dereg"),
        (r#"{"v":1,"id":"rec","type":"agent.recover","name":"bob"}"#.into(), "rec"),
        (r#"{"v":1,"id":7,"type":"node.explode"}"#.into(), ""),
        (r#"{"v":1,"id":"","type":"node.explode"}"#.into(), ""),
        (format!(r#"{{"v":1,"id":"{long}","type":"node.explode"}}"#), &long),
        (
            format!(r#"{{"v":1,"id":"deep","type":"node.explode","x":{}{}}}"#, "[".repeat(5000), "]".repeat(5000)),
            "deep",
        ),
    ];
    for (text, id) in &table {
        scene.send_frame(text).await?;
        let frame = scene.error().await?;
        assert_error_shape(&frame, id, "invalid_message");
    }
    scene.still_delivers(1).await
}

#[tokio::test]
async fn requests_forbidden_to_direct_nodes_are_refused_with_their_code() -> Result<()> {
    let mut scene = Scene::new("not-allowed").await?;
    let node = scene.node_id.clone();
    let register = |node_id: &str, provider: Value| {
        json!({ "v": 1, "id": "q", "type": "node.register", "name": "n", "node_id": node_id, "capabilities": [],
                "max_agents": 1, "tags": [], "version": "1", "provider": provider })
    };
    let table = [
        (register("node_of_somebody_else", Value::Null), "node_id_mismatch"),
        (register("", Value::Null), "node_id_mismatch"),
        (register(&node, json!({ "name": "", "instance_id": "i" })), "invalid_request"),
        (register(&node, json!({ "name": "p".repeat(129), "instance_id": "i" })), "invalid_request"),
        (json!({ "v": 1, "id": "q", "type": "node.heartbeat", "node_id": "another" }), "node_id_mismatch"),
        (json!({ "v": 1, "id": "q", "type": "agent.register", "name": "eve" }), "direct_node_capacity_exceeded"),
        (json!({ "v": 1, "id": "q", "type": "inventory.sync", "agents": [] }), "direct_node_capacity_exceeded"),
    ];
    for (frame, code) in table {
        scene.socket.send_json(&frame).await?;
        assert_error_shape(&scene.error().await?, "q", code);
    }
    // Deregistering an absent agent is answered without effect.
    for agent in ["nonsense", "1", "-1", "99999999999999999999", &"9".repeat(5000)] {
        let left = scene.socket.request(json!({ "v": 1, "type": "agent.deregister", "agent_id": agent })).await?;
        assert_eq!(left, Value::Null);
    }
    scene.still_delivers(1).await
}

#[tokio::test]
async fn invalid_requests_of_a_broker_are_refused_and_its_socket_stays_open() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "bad-broker").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let elsewhere = key.register_agent("elsewhere").await?;
    let node = key.create_broker_node("node_bad", "bad").await?;
    let other = key.create_broker_node("node_other", "other").await?;
    let mut socket = NodeSocket::connect_with_header(&key.ws_base(), &node.token).await?;

    // Before the node is registered.
    for frame in [
        json!({ "v": 1, "id": "early", "type": "agent.register", "name": "bob" }),
        json!({ "v": 1, "id": "early", "type": "inventory.sync", "agents": [] }),
        json!({ "v": 1, "id": "early", "type": "agent.deregister", "agent_id": elsewhere.id }),
        json!({ "v": 1, "id": "early", "type": "node.deregister" }),
    ] {
        socket.send_json(&frame).await?;
        assert_error_shape(&socket.expect("error").await?, "early", "invalid_request");
    }
    // Early frames are ignored without an answer.
    socket.heartbeat("node_bad").await?;
    socket.ack("elsewhere", 5).await?;

    socket.register_broker("node_bad", "bad", "i1").await?;
    let mut other_socket = NodeSocket::connect_with_header(&key.ws_base(), &other.token).await?;
    other_socket.register_broker("node_other", "other", "o1").await?;
    let rita = other_socket.register_agent("rita").await?;
    let bob = socket.register_agent("bob").await?;
    let bob_id = bob["agent_id"].as_str().unwrap_or_default().to_owned();
    let rita_id = rita["agent_id"].as_str().unwrap_or_default().to_owned();
    socket.inventory(&[(&bob_id, "bob")]).await?;

    let long = "n".repeat(129);
    let table = [
        (json!({ "type": "agent.register", "name": "" }), vec!["invalid_agent_name", "invalid_request"]),
        (json!({ "type": "agent.register", "name": "a\nb" }), vec!["invalid_agent_name", "invalid_request"]),
        (json!({ "type": "agent.register", "name": "a\u{0}b" }), vec!["invalid_message"]),
        (json!({ "type": "agent.register", "name": long }), vec!["invalid_agent_name", "invalid_request"]),
        (json!({ "type": "agent.register", "name": "eve", "session_ref": "a\u{0}b" }), vec!["invalid_message"]),
        (json!({ "type": "agent.register", "name": "rita" }), vec!["agent_already_exists"]),
        (json!({ "type": "agent.recover", "name": "nobody", "expected_agent_id": "1" }), vec!["agent_not_found"]),
        (
            json!({ "type": "agent.recover", "name": "bob", "expected_agent_id": "x" }),
            vec!["agent_recovery_not_authorized"],
        ),
        (
            json!({ "type": "agent.recover", "name": "bob", "expected_agent_id": rita_id }),
            vec!["agent_recovery_not_authorized"],
        ),
        (
            json!({ "type": "inventory.sync", "agents": [{ "agent_id": "x", "name": "bob" }] }),
            vec!["agent_identity_mismatch"],
        ),
        (
            json!({ "type": "inventory.sync", "agents": [{ "agent_id": rita_id, "name": "bob" }] }),
            vec!["agent_identity_mismatch"],
        ),
        (
            json!({ "type": "inventory.sync", "agents": [{ "agent_id": rita_id, "name": "rita" }] }),
            vec!["agent_location_conflict"],
        ),
    ];
    for (mut frame, codes) in table {
        frame["v"] = json!(1);
        frame["id"] = json!("q");
        socket.send_json(&frame).await?;
        let answer = socket.expect_where("an answer", SOON, |answer| answer["id"] == "q").await?;
        let code = codes.iter().find(|code| answer["code"] == **code);
        assert!(code.is_some(), "{frame} was answered {answer}");
        assert_error_shape(&answer, "q", code.copied().unwrap_or_default());
    }
    // Acks for agents on other nodes or of unknown agents are ignored.
    ann.dm("rita", "for rita").await?.success()?;
    other_socket.expect("deliver").await?;
    for (name, seq) in [("rita", 1), ("nobody", 1), ("", u64::MAX)] {
        socket.ack(name, seq).await?;
    }
    ann.dm("bob", "for bob").await?.success()?;
    let frame = socket.expect("deliver").await?;
    assert_eq!((frame["agent"].as_str(), frame["seq"].as_u64()), (Some("bob"), Some(1)));
    socket.ack("bob", 1).await?;
    let floor = |node: &'static str| {
        let key = key.clone();
        async move {
            let agents = key.get(&format!("/v1/nodes/{node}/agents")).await.unwrap();
            agents.data()[0]["delivery_ack_seq"].clone()
        }
    };
    relay_testkit::wait::until("bob's ack to be stored", SOON, || async { floor("bad").await == 1 }).await;
    assert_eq!(floor("other").await, 0, "another node's ack must not count");
    Ok(())
}

#[tokio::test]
async fn acks_are_clamped_to_sent_frames() -> Result<()> {
    let mut scene = Scene::new("acks").await?;
    for ack in [u64::MAX, i64::MAX.unsigned_abs(), 1, 0] {
        scene.socket.ack("bob", ack).await?;
    }
    scene.sender.dm("bob", "one").await?.success()?;
    let one = scene.socket.expect("deliver").await?;
    assert_eq!(one["seq"], 1, "an ack ahead of time settles nothing");
    // An ack beyond the sent position is clamped; a lower one later has no effect.
    for ack in [u64::MAX, 0] {
        scene.socket.ack("bob", ack).await?;
    }
    scene.acked(1).await;
    scene.sender.dm("bob", "two").await?.success()?;
    assert_eq!(scene.socket.expect("deliver").await?["seq"], 2);

    // The second was never acked: the next connection gets it again, with the same ids.
    scene.socket.abort();
    let mut socket = scene.key.as_agent(&scene.bob).direct_socket().await?;
    let again = socket.expect("deliver").await?;
    assert_eq!((&again["seq"], &again["payload"]["data"]["text"]), (&json!(2), &json!("two")));
    Ok(())
}

#[tokio::test]
async fn unversioned_frames_of_a_published_client_are_ignored_silently() -> Result<()> {
    let mut scene = Scene::new("unversioned").await?;
    for frame in [
        r#"{"type":"subscribe","channels":["general","x"]}"#,
        r#"{"type":"unsubscribe","channels":[]}"#,
        r#"{"type":"pong"}"#,
        r#"{"type":"ping"}"#,
        r#"{"v":1,"type":"pong","id":"p"}"#,
    ] {
        scene.send_frame(frame).await?;
    }
    // Answers are in the order of requests, so answers to the earlier ones would have come first.
    scene.send_frame(r#"{"v":1,"id":"mark","type":"node.explode"}"#).await?;
    assert_error_shape(&scene.error().await?, "mark", "invalid_message");
    scene.still_delivers(1).await
}

#[tokio::test]
async fn a_binary_frame_is_refused_and_the_socket_stays_open() -> Result<()> {
    let mut scene = Scene::new("binary").await?;
    for bytes in [vec![], vec![0xff; 4096], br#"{"v":1,"id":"b","type":"node.explode"}"#.to_vec()] {
        scene.socket.send_message(Message::binary(bytes)).await?;
        assert_error_shape(&scene.error().await?, "", "invalid_message");
    }
    for control in [Message::Ping(vec![1; 125].into()), Message::Pong(vec![].into())] {
        scene.socket.send_message(control).await?;
    }
    scene.still_delivers(1).await
}

#[tokio::test]
async fn a_frame_of_5_mib_closes_only_its_socket_with_1009() -> Result<()> {
    let mut scene = Scene::new("oversized").await?;
    let carol = scene.key.register_agent("carol").await?;
    let mut bystander = scene.key.as_agent(&carol).direct_socket().await?;
    // The largest accepted frame: refused for its type, not for its size.
    let frame = |bytes: usize| format!(r#"{{"v":1,"id":"big","type":"node.explode","x":"{}"}}"#, "x".repeat(bytes));
    scene.send_frame(&frame(1024 * 1024 - 100)).await?;
    assert_error_shape(&scene.error().await?, "big", "invalid_message");

    scene.sender.dm("bob", "before").await?.success()?;
    scene.socket.expect("deliver").await?;
    scene.send_frame(&frame(5 * 1024 * 1024)).await?;
    assert_eq!(scene.socket.closed(SOON).await?, Some(1009));

    scene.sender.dm("carol", "are you well?").await?.success()?;
    assert_eq!(bystander.expect("deliver").await?["seq"], 1);
    // Nothing is lost: the unacked message is sent again.
    let mut socket = scene.key.as_agent(&scene.bob).direct_socket().await?;
    assert_eq!(socket.expect("deliver").await?["seq"], 1);

    // Just above the limit, in fragments that are each below it.
    socket.send_message(Message::text(frame(1024 * 1024))).await?;
    assert_eq!(socket.closed(SOON).await?, Some(1009));
    let mut socket = scene.key.as_agent(&scene.bob).direct_socket().await?;
    for at in 0..6 {
        let opcode = OpCode::Data(if at == 0 { Data::Text } else { Data::Continue });
        let part = Frame::message(vec![b'x'; 512 * 1024], opcode, at == 5);
        socket.send_message(Message::Frame(part)).await?;
    }
    assert_eq!(socket.closed(SOON).await?, Some(1009));
    scene.sender.dm("carol", "still?").await?.success()?;
    assert_eq!(bystander.expect("deliver").await?["seq"], 2);
    Ok(())
}

#[tokio::test]
async fn invalid_utf_8_closes_only_its_socket_as_the_protocol_requires() -> Result<()> {
    let scene = Scene::new("not-utf-8").await?;
    let mut socket = scene.socket;
    let frame = Frame::message(vec![b'{', 0xff, 0xfe, b'}'], OpCode::Data(Data::Text), true);
    socket.send_message(Message::Frame(frame)).await?;
    assert_eq!(socket.closed(SOON).await?, Some(1007));
    let mut socket = scene.key.as_agent(&scene.bob).direct_socket().await?;
    scene.sender.dm("bob", "hello").await?.success()?;
    assert_eq!(socket.expect("deliver").await?["seq"], 1);
    Ok(())
}

#[tokio::test]
async fn a_flood_of_frames_is_throttled_and_fully_answered() -> Result<()> {
    const FLOOD: usize = 20_000;
    let scene = Scene::new("flood").await?;
    let eve = scene.key.register_agent("eve").await?;
    let node = scene.key.as_agent(&eve).direct_node_token().await?;
    let url = format!("{}/v1/node/ws?token={}", scene.key.ws_base(), node.token);
    let (stream, _) = tokio_tungstenite::connect_async(url).await?;
    let (mut sink, mut stream) = stream.split();
    let sending = tokio::spawn(async move {
        for n in 0..FLOOD {
            let text =
                if n % 2 == 0 { format!(r#"{{"v":1,"id":"{n}","type":"nope"}}"#) } else { format!("{n} nonsense") };
            sink.send(Message::text(text)).await?;
        }
        anyhow::Ok(sink)
    });
    let mut answered = 0;
    let mut last_id = 0;
    while answered < FLOOD {
        let message = tokio::time::timeout(Duration::from_secs(30), stream.next()).await?;
        let Some(Ok(Message::Text(text))) = message else { panic!("after {answered} answers: {message:?}") };
        let frame: Value = serde_json::from_str(&text)?;
        if frame["type"] == "error" {
            if let Some(id) = frame["id"].as_str().filter(|id| !id.is_empty()) {
                let id: usize = id.parse()?;
                assert!(id >= last_id, "answers keep the order of requests");
                last_id = id;
            }
            answered += 1;
        }
    }
    let mut sink = sending.await??;
    sink.send(Message::text(r#"{"v":1,"id":"after","type":"nope"}"#)).await?;
    let Some(Ok(Message::Text(text))) = stream.next().await else { panic!("closed after the flood") };
    assert_eq!(serde_json::from_str::<Value>(&text)?["id"], "after");
    Ok(())
}

#[tokio::test]
async fn a_slow_reader_gets_all_answers() -> Result<()> {
    const FLOOD: usize = 20_000;
    let mut scene = Scene::new("late-reader").await?;
    scene.socket.set_reading(false);
    for n in 0..FLOOD {
        scene.send_frame(&format!(r#"{{"v":1,"id":"{n}","type":"nope"}}"#)).await?;
    }
    scene.socket.set_reading(true);
    for n in 0..FLOOD {
        assert_eq!(scene.error().await?["id"], n.to_string());
    }
    scene.still_delivers(1).await
}
