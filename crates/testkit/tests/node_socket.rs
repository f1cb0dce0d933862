//! The node socket client against a scripted server.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use relay_testkit::client::{ConnectError, NodeSocket};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;

const SOON: Duration = Duration::from_secs(30);

type Peer = WebSocketStream<TcpStream>;

async fn pair() -> (NodeSocket, Peer) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("ws://{}", listener.local_addr().unwrap());
    let accept = async {
        let (socket, _) = listener.accept().await.unwrap();
        tokio_tungstenite::accept_async(socket).await.unwrap()
    };
    let (socket, peer) = tokio::join!(NodeSocket::connect(&base, "nt_live_x"), accept);
    (socket.unwrap(), peer)
}

async fn heard(peer: &mut Peer) -> Value {
    let message = peer.next().await.unwrap().unwrap();
    serde_json::from_str(message.to_text().unwrap()).unwrap()
}

async fn say(peer: &mut Peer, frame: Value) {
    peer.send(Message::text(frame.to_string())).await.unwrap();
}

fn deliver(seq: u64) -> Value {
    json!({ "v": 1, "type": "deliver", "agent": "ada", "seq": seq })
}

#[tokio::test]
async fn a_request_finds_its_reply_and_keeps_what_came_before() {
    let (mut socket, mut peer) = pair().await;
    let engine = tokio::spawn(async move {
        let request = heard(&mut peer).await;
        assert_eq!((&request["type"], &request["max_agents"]), (&json!("node.register"), &json!(1)));
        say(&mut peer, deliver(1)).await;
        let reply = json!({ "v": 1, "id": request["id"], "type": "reply", "ok": true, "data": { "x": 1 } });
        say(&mut peer, reply).await;
        peer
    });
    assert_eq!(socket.register_direct("node_1", "direct-1").await.unwrap(), json!({ "x": 1 }));
    assert_eq!(socket.next_frame(SOON).await.unwrap()["seq"], 1);
    engine.await.unwrap();
}

#[tokio::test]
async fn durable_frames_are_acked_on_hand_out_when_asked() {
    let (mut socket, mut peer) = pair().await;
    socket.auto_ack(true);
    say(&mut peer, deliver(0)).await;
    say(&mut peer, deliver(7)).await;
    for _ in 0..2 {
        socket.expect("deliver").await.unwrap();
    }
    let ack = heard(&mut peer).await;
    assert_eq!(ack, json!({ "v": 1, "type": "delivery.ack", "agent": "ada", "up_to_seq": 7 }));
}

#[tokio::test]
async fn the_close_code_is_reported_and_earlier_frames_are_kept() {
    let (mut socket, mut peer) = pair().await;
    say(&mut peer, deliver(1)).await;
    let close = CloseFrame { code: 4001.into(), reason: "superseded".into() };
    peer.close(Some(close)).await.unwrap();
    let drained = tokio::spawn(async move { while peer.next().await.is_some() {} });
    assert_eq!(socket.closed(SOON).await.unwrap(), Some(4001));
    assert_eq!(socket.next_frame(SOON).await.unwrap()["seq"], 1);
    assert!(socket.next_frame(SOON).await.is_err());
    drained.await.unwrap();
}

#[tokio::test]
async fn a_refused_upgrade_reports_its_status() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("ws://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut request = [0; 4096];
        let _ = socket.read(&mut request).await.unwrap();
        let refusal = "HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno";
        socket.write_all(refusal.as_bytes()).await.unwrap();
    });
    match NodeSocket::connect_with_header(&base, "bad").await {
        Err(ConnectError::Refused { status, .. }) => assert_eq!(status, 401),
        other => panic!("{other:?}"),
    }
}
