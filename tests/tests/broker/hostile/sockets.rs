//! Sockets of the listen API: bounds, and frames that are not what they should be.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::{Error, Message, client::IntoClientRequest as _};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::scene::{SOON, Scene};

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Streams of keys that one agent may have.
const STREAMS: usize = 16;
const KEYS: &str = "/api/input/target/stream";

async fn connect(scene: &Scene, path: &str) -> Result<Socket, Error> {
    let mut request = scene.broker.socket_url(path).into_client_request()?;
    let key = scene.broker.key().parse().map_err(|_| Error::ConnectionClosed)?;
    request.headers_mut().insert("x-api-key", key);
    Ok(connect_async(request).await?.0)
}

/// The next frame, or the code with which the socket was closed.
async fn next(socket: &mut Socket) -> Result<Result<Value, u16>> {
    loop {
        match timeout(SOON, socket.next()).await?.context("the socket has ended")?? {
            Message::Text(text) => return Ok(Ok(serde_json::from_str(&text)?)),
            Message::Close(frame) => return Ok(Err(frame.context("a close code")?.code.into())),
            Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
        }
    }
}

#[tokio::test]
async fn frames_of_keys_are_typed_or_refused_and_the_stream_goes_on() -> Result<()> {
    let scene = Scene::new("keys").await?;
    let agent = scene.spawn("target", "cooked", &[]).await?;
    let mut socket = connect(&scene, KEYS).await?;
    assert_eq!(next(&mut socket).await?, Ok(json!({ "type": "pty_input_ready", "name": "target" })));
    let wrong = [
        Message::binary(vec![0xff, 0xfe, 0x80]),
        Message::text(r#"{"type":"pty_input"}"#),
        Message::text(r#"{"type":"pty_input","data":7}"#),
    ];
    for frame in wrong {
        socket.send(frame.clone()).await?;
        let Ok(answer) = next(&mut socket).await? else { bail!("closed after {frame}") };
        assert_eq!((&answer["code"], &answer["statusCode"]), (&json!("invalid_input"), &json!(400)), "{answer}");
    }
    // All at once: acks come in the order of the frames.
    for (keys, _) in [("ab", 2), ("é", 2), ("\r", 1)] {
        socket.feed(Message::text(keys)).await?;
    }
    socket.flush().await?;
    for bytes in [2, 2, 1] {
        let Ok(ack) = next(&mut socket).await? else { bail!("closed") };
        assert_eq!((&ack["type"], &ack["bytes_written"]), (&json!("pty_input_ack"), &json!(bytes)), "{ack}");
    }
    relay_testkit::wait::until_ok("the line", SOON, || async {
        let typed: Vec<String> = agent.messages().into_iter().map(|(_, text)| text).collect();
        ensure!(typed == ["abé"], "{typed:?}");
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn sockets_are_bounded_in_number_and_in_the_size_of_a_frame() -> Result<()> {
    let scene = Scene::new("bounded").await?;
    scene.spawn("target", "cooked", &[]).await?;
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let mut socket = connect(&scene, KEYS).await?;
        ensure!(next(&mut socket).await?.is_ok_and(|ready| ready["type"] == "pty_input_ready"));
        streams.push(socket);
    }
    match connect(&scene, KEYS).await {
        Err(Error::Http(answer)) => assert_eq!(answer.status().as_u16(), 503),
        other => bail!("one stream too many: {other:?}"),
    }
    for path in [KEYS, "/ws", "/api/fleet/ws"] {
        let mut socket = match streams.pop() {
            Some(stream) if path == KEYS => stream,
            _ => connect(&scene, path).await?,
        };
        socket.send(Message::text("x".repeat((1 << 20) + 1))).await?;
        let code = loop {
            if let Err(code) = next(&mut socket).await.with_context(|| path.to_owned())? {
                break code;
            }
        };
        assert_eq!(code, 1009, "{path}");
    }
    Ok(())
}

#[tokio::test]
async fn keys_of_a_client_that_has_left_are_not_typed_later() -> Result<()> {
    let scene = Scene::new("left").await?;
    let (wake, taken) = (scene.broker.folder().join("wake"), scene.broker.folder().join("taken"));
    let script = "stty raw -echo; while [ ! -e \"$0\" ]; do sleep 0.1; done; exec cat > \"$1\"";
    let body = json!({ "name": "target", "cli": "sh", "args": ["-c", script, wake, taken] });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    let send = async |keys: String| scene.broker.call("POST", "/api/input/target", Some(json!({ "data": keys }))).await;
    // The terminal takes a part of the first keys and nothing behind them.
    let begun = send("y".repeat(256 << 10)).await?;
    assert_eq!((begun.status, &begun.body["code"]), (504, &json!("worker_timeout")), "{}", begun.body);
    let mut socket = connect(&scene, KEYS).await?;
    ensure!(next(&mut socket).await?.is_ok_and(|ready| ready["type"] == "pty_input_ready"));
    socket.send(Message::text("z")).await?;
    socket.close(None).await?;
    // The broker ends the connection when it has given the keys up.
    while let Some(Ok(_)) = timeout(SOON, socket.next()).await? {}
    fs::write(&wake, "")?;
    relay_testkit::wait::until_ok("room for keys", SOON, || async {
        let answer = send("end".to_owned()).await?;
        ensure!(answer.status == 200, "{}", answer.body);
        anyhow::Ok(())
    })
    .await?;
    let typed = relay_testkit::wait::until_ok("the keys", SOON, || async {
        let typed = fs::read_to_string(&taken)?;
        ensure!(typed.ends_with("end"), "{} bytes", typed.len());
        anyhow::Ok(typed)
    });
    assert!(!typed.await?.contains('z'), "keys of a client that has left were typed");
    Ok(())
}

#[tokio::test]
async fn a_socket_request_without_an_upgrade_is_refused_with_a_code() -> Result<()> {
    let scene = Scene::new("plain").await?;
    for path in [KEYS, "/ws", "/api/fleet/ws", "/api/input/%FF/stream"] {
        let answer = scene.broker.call("GET", path, None).await?;
        assert!((400..500).contains(&answer.status), "{path}: {} {}", answer.status, answer.body);
        assert_eq!(answer.body["code"], "invalid_request", "{path}: {}", answer.body);
    }
    Ok(())
}
