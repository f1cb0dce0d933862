//! Malformed and hostile frames of the engine, which a proxy puts into the node socket in front of a real message.

mod texts;

use std::fs;
use std::io::Cursor;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use relay_testkit::node::FakeAgent;
use relay_testkit::proxy::{Direction, TcpProxy, Verdict};
use relay_testkit::wait;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Control, Data, OpCode};
use tokio_tungstenite::tungstenite::protocol::frame::{Frame, FrameHeader};

use crate::scene::{SOON, Scene, numbered};
use texts::{
    BODY, ERROR, LARGE, REPLY, UNKNOWN_IDS, having, ineffective, misdirected, unreadable, unwanted, with, wrong_frames,
};

/// Bound of a frame.
const MAX_FRAME: usize = 1 << 20;
/// Patterns of a message for an agent and of the reply to an agent's registration.
const MESSAGE: &str = r#""type":"deliver""#;
const REGISTERED: &str = r#""delivery_ack_seq""#;
const TEXT: OpCode = OpCode::Data(Data::Text);

fn encode(frame: Frame) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    frame.format(&mut bytes)?;
    Ok(bytes)
}

fn message(bytes: impl Into<Vec<u8>>, opcode: OpCode, is_final: bool) -> Result<Vec<u8>> {
    encode(Frame::message(bytes.into(), opcode, is_final))
}

/// Position and content of the first text frame with a pattern. A gateway writes a small frame at once, so a chunk
/// holds whole ones.
fn find_text(chunk: &[u8], pattern: &str) -> Option<(usize, Value)> {
    let mut cursor = Cursor::new(chunk);
    loop {
        let begin = usize::try_from(cursor.position()).ok()?;
        let (header, length) = FrameHeader::parse(&mut cursor).ok()??;
        let content = usize::try_from(cursor.position()).ok()?;
        let end = content.checked_add(usize::try_from(length).ok()?)?;
        let text = std::str::from_utf8(chunk.get(content..end)?).unwrap_or_default();
        if header.opcode == TEXT && text.contains(pattern) {
            return Some((begin, serde_json::from_str(text).ok()?));
        }
        cursor.set_position(end as u64);
    }
}

/// Puts bytes in front of the next frame with a pattern, once. They are made from that frame; the receiver gets a note
/// of the maker.
fn inject<T: Send + 'static>(
    proxy: &TcpProxy,
    pattern: &'static str,
    make: impl FnOnce(&Value) -> Result<(Vec<u8>, T)> + Send + 'static,
) -> oneshot::Receiver<Result<T>> {
    let (sender, receiver) = oneshot::channel();
    let mut waiting = Some((make, sender));
    proxy.set_filter(Direction::ToClient, move |_, chunk| {
        if waiting.is_some()
            && let Some((at, real)) = find_text(chunk, pattern)
            && let Some((make, sender)) = waiting.take()
        {
            let note = make(&real).map(|(bytes, note)| {
                chunk.splice(at..at, bytes);
                note
            });
            // The test may have ended.
            let _ = sender.send(note);
        }
        Verdict::Forward
    });
    receiver
}

/// Sends messages one after another, and waits until all up to the last one have come once, in order, and acked.
async fn deliver(scene: &Scene, agent: &FakeAgent, first: u32, last: u32) -> Result<()> {
    for body in numbered(first, last) {
        scene.sender.dm("worker", &body).await?.success()?;
    }
    scene.wait_for("worker", agent, &numbered(1, last), last.into()).await
}

/// Numbers of frames that the broker could not read, and that were for an agent that it does not have.
fn refusals(scene: &Scene) -> Result<(usize, usize)> {
    let log = fs::read(scene.broker.folder().join("broker.log"))?;
    let log = String::from_utf8_lossy(&log);
    let count = |reason: &str| log.matches(reason).count();
    let elsewhere = count("a frame is for an agent that is not hosted here");
    let other_id = count("a frame names another agent than the one hosted here");
    Ok((count("a frame of the engine cannot be read"), elsewhere + other_id))
}

/// Fails unless the broker has had just these connections, has queued just these messages, and is well.
async fn check(scene: &Scene, name: &str, connections: usize, messages: usize) -> Result<()> {
    let broker = &scene.broker;
    ensure!(broker.is_running(), "{}", broker.log_tail(40));
    let log = fs::read(broker.folder().join("broker.log"))?;
    ensure!(!String::from_utf8_lossy(&log).contains("panicked"), "{}", broker.log_tail(40));
    let connected = broker.events(name, "node_connected").await?;
    ensure!(connected.len() == connections, "{connected:?}");
    let queued = broker.events("worker", "delivery_queued").await?;
    ensure!(queued.len() == messages, "{queued:?}");
    ensure!(broker.events("worker", "delivery_dropped").await?.is_empty());
    let typed = scene.agent_log("worker");
    ensure!(!typed.contains("unwanted") && !typed.contains("/exit"), "{typed:?}");
    let names = broker.names().await?;
    ensure!(names == ["worker"], "{names:?}");
    Ok(())
}

#[tokio::test]
async fn malformed_and_hostile_frames_of_the_engine_have_no_effect() -> Result<()> {
    let (scene, proxy) = Scene::behind_proxy("engine-frames").await?;
    let agent = scene.spawn("worker", "cooked", &[]).await?;
    deliver(&scene, &agent, 1, 3).await?;
    check(&scene, "engine-frames", 1, 3).await?;
    let memory = super::memory(&scene).await?;
    let mut injected = inject(&proxy, MESSAGE, |real| {
        let (unreadable, misdirected, ineffective) = (unreadable(real)?, misdirected(real), ineffective(real));
        let note = (unreadable.len(), misdirected.len(), ineffective.len());
        let readable = misdirected.iter().chain(&ineffective).map(Value::to_string);
        let mut frames = Vec::new();
        for text in unreadable.into_iter().chain(readable) {
            frames.push(message(text, TEXT, true)?);
        }
        // Nothing but a text is a frame of the engine.
        let whole = unwanted(real).to_string();
        let binaries = [whole.clone().into_bytes(), vec![0xff; LARGE], Vec::new()];
        for bytes in binaries {
            frames.push(message(bytes, OpCode::Data(Data::Binary), true)?);
        }
        for bytes in [Vec::new(), vec![0xff; 125]] {
            frames.push(encode(Frame::ping(bytes.clone()))?);
            frames.push(encode(Frame::pong(bytes))?);
        }
        // A text in three parts with a ping between them.
        let text = having(&unwanted(real), &json!({ "type": "unknown" })).to_string();
        let (start, rest) = text.as_bytes().split_at(40);
        frames.push(message(start, TEXT, false)?);
        frames.push(encode(Frame::ping(whole.into_bytes()[..100].to_vec()))?);
        frames.push(message([], OpCode::Data(Data::Continue), false)?);
        frames.push(message(rest, OpCode::Data(Data::Continue), true)?);
        Ok((frames.concat(), note))
    });
    deliver(&scene, &agent, 4, 6).await?;
    let (unreadable, misdirected, ineffective) = injected.try_recv().context("nothing was injected")??;
    let after = super::memory(&scene).await?;
    println!(
        "figures engine frames: {unreadable} unreadable, {misdirected} misdirected, {ineffective} ineffective; \
         {memory} MB, then {after} MB"
    );
    assert!(after < memory + 100, "{memory} MB have grown to {after} MB");
    check(&scene, "engine-frames", 1, 6).await?;

    // Each frame was refused for its own reason.
    wait::until_ok("the lines of the log", SOON, || async {
        let refused = refusals(&scene)?;
        ensure!(refused == (unreadable, misdirected), "{refused:?}");
        anyhow::Ok(())
    })
    .await?;

    // The socket takes requests.
    let other = scene.spawn("other", "cooked", &[]).await?;
    scene.sender.dm("other", "message-1").await?.success()?;
    scene.wait_for("other", &other, &numbered(1, 1), 1).await?;
    deliver(&scene, &agent, 7, 9).await
}

#[tokio::test]
async fn hostile_replies_answer_no_registration_that_waits() -> Result<()> {
    let (scene, proxy) = Scene::behind_proxy("replies").await?;
    scene.broker.wait_connected().await?;
    let mut injected = inject(&proxy, REGISTERED, |real| {
        let mut texts = wrong_frames(real, &REPLY)?;
        texts.extend(wrong_frames(&json!({ "type": "error", "id": real["id"], "code": "x", "message": "x" }), &ERROR)?);
        let unreadable = texts.len();
        let other = with(real, "/data/name", Some(json!("unwanted")))?;
        for id in UNKNOWN_IDS {
            let error = json!({ "type": "error", "id": id, "code": "unwanted", "message": BODY });
            texts.extend([having(&other, &json!({ "id": id })), error].map(|frame| frame.to_string()));
        }
        // The right name alone is enough for a reply without an id only.
        let foreign = with(real, "/data/agent_id", Some(json!("0")))?;
        let ids = UNKNOWN_IDS.into_iter().filter(|id| !id.is_empty());
        texts.extend(ids.map(|id| having(&foreign, &json!({ "id": id })).to_string()));
        let frames = texts.into_iter().map(|text| message(text, TEXT, true));
        Ok((frames.collect::<Result<Vec<_>>>()?.concat(), unreadable))
    });
    let agent = scene.spawn("worker", "cooked", &[]).await?;
    let unreadable = injected.try_recv().context("nothing was injected")??;
    deliver(&scene, &agent, 1, 3).await?;
    let refused = wait::until_ok("the lines of the log", SOON, || async {
        let refused = refusals(&scene)?;
        ensure!(refused == (unreadable, 0), "{refused:?}");
        anyhow::Ok(())
    });
    refused.await?;
    check(&scene, "replies", 1, 3).await
}

#[tokio::test]
async fn a_reply_that_cannot_be_read_refuses_its_registration_once() -> Result<()> {
    let (scene, proxy) = Scene::behind_proxy("wrong-reply").await?;
    scene.broker.wait_connected().await?;
    let wrong = [
        ("/data/delivery_ack_seq", json!(-1)),
        ("/data/delivery_ack_seq", json!("7")),
        ("/data/agent_id", json!([])),
        ("/data/name", json!("another")),
        ("/data", json!(["7", "at_live_x", "worker", 0])),
    ];
    for (number, (pointer, value)) in wrong.into_iter().enumerate() {
        let mut injected = inject(&proxy, REGISTERED, move |real| {
            let text = with(real, pointer, Some(value))?.to_string();
            Ok((message(text, TEXT, true)?, ()))
        });
        let body = json!({ "name": "worker", "cli": "cat" });
        let refused = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
        injected.try_recv().context("nothing was injected")??;
        ensure!((refused.status, &refused.body["code"]) == (502, &json!("engine_refused")), "{}", refused.body);
        ensure!(scene.broker.names().await?.is_empty(), "{number}");
    }
    // Some engines leave the name out.
    let mut injected =
        inject(&proxy, REGISTERED, |real| Ok((message(with(real, "/data/name", None)?.to_string(), TEXT, true)?, ())));
    let agent = scene.spawn("worker", "cooked", &[]).await?;
    injected.try_recv().context("nothing was injected")??;
    deliver(&scene, &agent, 1, 3).await?;
    check(&scene, "wrong-reply", 1, 3).await
}

#[tokio::test]
async fn seqs_that_never_come_cost_one_renewal_of_the_connection_and_no_message() -> Result<()> {
    let (scene, proxy) = Scene::behind_proxy("far-seqs").await?;
    let agent = scene.spawn("worker", "cooked", &[]).await?;
    deliver(&scene, &agent, 1, 1).await?;
    let memory = super::memory(&scene).await?;
    let mut injected = inject(&proxy, MESSAGE, |real| {
        let data = json!({ "text": format!("{BODY}{}", "x".repeat(LARGE)) });
        let frame = having(&unwanted(real), &json!({ "payload": { "type": "message.created", "data": data } }));
        let far = [1 << 32, i64::MAX.cast_unsigned(), 1 << 63, u64::MAX - 1, u64::MAX];
        let seqs = far.into_iter().chain(1_000_000..1_000_150);
        let frames = seqs.map(|seq| message(having(&frame, &json!({ "seq": seq })).to_string(), TEXT, true));
        Ok((frames.collect::<Result<Vec<_>>>()?.concat(), ()))
    });
    deliver(&scene, &agent, 2, 3).await?;
    injected.try_recv().context("nothing was injected")??;
    let after = super::memory(&scene).await?;
    println!("figures far seqs: {memory} MB, then {after} MB");
    assert!(after < memory + 40, "{memory} MB have grown to {after} MB");
    wait::until_ok("the renewal", SOON, || async {
        let ended = scene.broker.events("far-seqs", "node_disconnected").await?;
        ensure!(ended.len() == 1 && ended[0]["reason"] == "a frame is missing", "{ended:?}");
        anyhow::Ok(())
    })
    .await?;
    deliver(&scene, &agent, 4, 6).await?;
    check(&scene, "far-seqs", 2, 6).await
}

#[tokio::test]
async fn receipts_for_an_agent_without_a_terminal_do_not_fill_their_queue() -> Result<()> {
    let (scene, proxy) = Scene::behind_proxy("receipts-of-reads").await?;
    let program = scene.broker.folder().join("claude");
    fs::write(&program, "#!/bin/sh\n")?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let body = json!({ "name": "clerk", "cli": program, "transport": "headless" });
    scene.broker.call("POST", "/api/spawn", Some(body)).await?.success()?;
    for count in 1..=2 {
        // Each time fewer than may wait, and more in all.
        let mut injected = inject(&proxy, MESSAGE, |real| {
            let data = json!({ "message_id": "1", "agent_name": "clerk" });
            let read = json!({ "seq": 0, "msg_id": "evt-1-1", "payload": { "type": "message.read", "data": data } });
            Ok((message(having(real, &read).to_string(), TEXT, true)?.repeat(40), ()))
        });
        scene.sender.dm("clerk", "hello").await?.success()?;
        // The message comes behind the receipts.
        wait::until_ok("the verdict", SOON, || async {
            let verdicts = scene.broker.events("clerk", "delivery_verified").await?;
            ensure!(verdicts.len() == count, "{verdicts:?}");
            anyhow::Ok(())
        })
        .await?;
        injected.try_recv().context("nothing was injected")??;
    }
    let metrics = scene.broker.call("GET", "/metrics", None).await?.body;
    let metrics = metrics.as_str().context("a page")?;
    let dropped = super::counter(metrics, "relay_node_queue_dropped_total{queue=\"reads\"}");
    assert_eq!(dropped.unwrap_or_default(), 0.0, "{metrics}");
    Ok(())
}

/// Bytes that the protocol or the bound of frames forbids.
fn forbidden() -> Result<Vec<(&'static str, Vec<u8>)>> {
    let changed = |change: fn(&mut FrameHeader)| {
        let mut frame = Frame::message(BODY, TEXT, true);
        change(frame.header_mut());
        encode(frame)
    };
    let padded = |size: usize| format!(r#"{{"type":"unknown","x":"{}"}}"#, "x".repeat(size));
    let part = |opcode| message("x".repeat(MAX_FRAME / 2), OpCode::Data(opcode), false);
    Ok(vec![
        ("utf8", message(b"{\"type\":\"\xff\"}".to_vec(), TEXT, true)?),
        ("large", message(padded(MAX_FRAME), TEXT, true)?),
        ("parts", [part(Data::Text)?, part(Data::Continue)?, part(Data::Continue)?].concat()),
        ("endless", [&[0x81, 127][..], &i64::MAX.to_be_bytes()].concat()),
        ("negative", [&[0x81, 127][..], &u64::MAX.to_be_bytes()].concat()),
        ("continued", message(BODY, OpCode::Data(Data::Continue), true)?),
        ("masked", changed(|header| header.mask = Some([1; 4]))?),
        ("reserved", changed(|header| header.rsv1 = true)?),
        ("opcode", changed(|header| header.opcode = OpCode::Data(Data::Reserved(3)))?),
        ("ping", encode(Frame::ping(vec![0; 126]))?),
        ("control", changed(|header| header.opcode = OpCode::Control(Control::Reserved(11)))?),
        ("close", vec![0x88, 1, 3]),
    ])
}

#[tokio::test]
async fn forbidden_frames_cost_the_connection_once_and_no_message() -> Result<()> {
    let case = async |name, bytes| {
        let (scene, proxy) = Scene::behind_proxy(name).await?;
        let agent = scene.spawn("worker", "cooked", &[]).await?;
        deliver(&scene, &agent, 1, 1).await?;
        let mut injected = inject(&proxy, MESSAGE, |_| Ok((bytes, ())));
        deliver(&scene, &agent, 2, 3).await?;
        injected.try_recv().context("nothing was injected")??;
        deliver(&scene, &agent, 4, 5).await?;
        let ended = scene.broker.events(name, "node_disconnected").await?;
        let reason = ended.first().and_then(|event| event["reason"].as_str()).unwrap_or_default();
        ensure!(ended.len() == 1 && reason.starts_with("the connection broke"), "{ended:?}");
        check(&scene, name, 2, 5).await
    };
    let cases = forbidden()?;
    try_join_all(cases.into_iter().map(async |(name, bytes)| case(name, bytes).await.context(name))).await?;
    Ok(())
}
