//! Tests of the proxy with an echo server.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const SOON: Duration = Duration::from_secs(30);

async fn echo_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut read, mut write) = socket.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    address
}

async fn echo(socket: &mut TcpStream, text: &str) -> std::io::Result<String> {
    socket.write_all(text.as_bytes()).await?;
    let mut answer = vec![0; text.len()];
    socket.read_exact(&mut answer).await?;
    Ok(String::from_utf8(answer).unwrap())
}

#[tokio::test]
async fn a_cut_resets_connections_and_refuses_new_ones_until_restored() {
    let proxy = TcpProxy::start(&echo_server().await).unwrap();
    let mut socket = TcpStream::connect(proxy.address()).await.unwrap();
    assert_eq!(echo(&mut socket, "one").await.unwrap(), "one");
    assert_eq!(proxy.connection_count(), 1);
    proxy.cut();
    assert!(echo(&mut socket, "two").await.is_err());
    if let Ok(mut refused) = TcpStream::connect(proxy.address()).await {
        assert!(echo(&mut refused, "three").await.is_err());
    }
    proxy.restore();
    let mut socket = TcpStream::connect(proxy.address()).await.unwrap();
    assert_eq!(echo(&mut socket, "four").await.unwrap(), "four");
}

#[tokio::test]
async fn a_reset_ends_a_connection_that_was_accepted_before_it() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut outside = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (client, _) = listener.accept().await.unwrap();
    let control = Arc::new(Control::default());
    let accepted_at = control.generation();
    // While the connection to the server opens.
    control.reset_all();
    let server = TcpStream::connect(echo_server().await).await.unwrap();
    tokio::time::timeout(SOON, pump::run_connection(client, server, control, accepted_at)).await.unwrap();
    assert!(echo(&mut outside, "late").await.is_err());
}

#[tokio::test]
async fn a_blackhole_holds_bytes_back_and_a_restore_lets_them_through() {
    let proxy = TcpProxy::start(&echo_server().await).unwrap();
    let mut socket = TcpStream::connect(proxy.address()).await.unwrap();
    assert_eq!(echo(&mut socket, "one").await.unwrap(), "one");
    proxy.blackhole();
    let waiting = tokio::time::timeout(Duration::from_millis(200), echo(&mut socket, "two")).await;
    assert!(waiting.is_err(), "nothing may come through");
    proxy.restore();
    let mut answer = [0; 3];
    tokio::time::timeout(SOON, socket.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"two");
}

#[tokio::test]
async fn a_cut_after_n_bytes_lets_exactly_those_through() {
    let proxy = TcpProxy::start(&echo_server().await).unwrap();
    let mut socket = TcpStream::connect(proxy.address()).await.unwrap();
    assert_eq!(echo(&mut socket, "one").await.unwrap(), "one");
    proxy.cut_after(Direction::ToClient, 4);
    socket.write_all(b"123456").await.unwrap();
    let mut answer = Vec::new();
    assert!(socket.read_to_end(&mut answer).await.is_err(), "reset, not closed");
    assert_eq!(proxy.forwarded_bytes(Direction::ToClient), 7);
}

#[tokio::test]
async fn a_pattern_reaches_the_server_and_its_answer_does_not_come_back() {
    let proxy = TcpProxy::start(&echo_server().await).unwrap();
    let mut socket = TcpStream::connect(proxy.address()).await.unwrap();
    proxy.on_pattern(Direction::ToServer, b"COMMIT", Verdict::ForwardThenCut);
    assert_eq!(echo(&mut socket, "begin").await.unwrap(), "begin");
    assert!(echo(&mut socket, "COMMIT").await.is_err());
    assert_eq!(proxy.forwarded_bytes(Direction::ToServer), 11);
    assert_eq!(proxy.forwarded_bytes(Direction::ToClient), 5);
}

#[tokio::test]
async fn latency_delays_each_way() {
    let proxy = TcpProxy::start(&echo_server().await).unwrap();
    proxy.set_latency(Duration::from_millis(50));
    let mut socket = TcpStream::connect(proxy.address()).await.unwrap();
    let started = Instant::now();
    echo(&mut socket, "slow").await.unwrap();
    assert!(started.elapsed() >= Duration::from_millis(100));
}

#[test]
fn a_url_is_pointed_at_the_proxy() {
    let proxy = TcpProxy::start("127.0.0.1:9").unwrap();
    let url = proxy.through("postgres://u:p@127.0.0.1:5432/relay").unwrap();
    assert_eq!(url, format!("postgres://u:p@{}/relay", proxy.address()));
}
