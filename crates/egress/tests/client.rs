//! The client against receivers on this machine that misbehave.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use relay_egress::{Answer, CallLimits, CallOptions, Client, Failure, Policy, SystemResolver, Tenant};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// Behaviour of a server after it has read a request.
#[derive(Clone, Copy)]
enum Then {
    /// Writes this, and reads the next request.
    Answer(&'static str),
    /// Writes this, then a body of so many bytes.
    Large(&'static str, usize),
    /// Writes this and hangs up.
    Last(&'static str),
    /// Keeps the connection open and silent.
    Hang(&'static str),
    /// A head without an end.
    EndlessHead,
}

struct Receiver {
    url: String,
    connections: Arc<AtomicUsize>,
}

async fn receiver(then: Then) -> Receiver {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/in?a=b", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connections);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counter.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(serve(stream, then));
        }
    });
    Receiver { url, connections }
}

async fn serve(mut stream: TcpStream, then: Then) -> std::io::Result<()> {
    while let Some(request) = read_request(&mut stream).await {
        assert!(request.starts_with("POST /in?a=b HTTP/1.1\r\n"), "{request}");
        match then {
            Then::Answer(text) => stream.write_all(text.as_bytes()).await?,
            Then::Large(head, bytes) => {
                stream.write_all(head.as_bytes()).await?;
                stream.write_all(&vec![b'x'; bytes]).await?;
            }
            Then::Last(text) => return stream.write_all(text.as_bytes()).await,
            Then::Hang(text) => {
                stream.write_all(text.as_bytes()).await?;
                std::future::pending::<()>().await;
            }
            Then::EndlessHead => {
                stream.write_all(b"HTTP/1.1 200 OK\r\n").await?;
                loop {
                    stream.write_all(b"x-padding: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n").await?;
                }
            }
        }
    }
    Ok(())
}

/// One request with the body `{}`, or `None` when the caller has hung up.
async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut read = Vec::new();
    while !read.ends_with(b"\r\n\r\n{}") {
        let mut chunk = [0; 4096];
        match stream.read(&mut chunk).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => read.extend_from_slice(&chunk[..count]),
        }
    }
    Some(String::from_utf8(read).unwrap())
}

fn client() -> Client {
    let allow = vec!["127.0.0.1".parse().unwrap()];
    Client::new(Policy { strict: true, allow }, CallLimits::default(), SystemResolver::new(&[]))
}

async fn post(client: &Client, to: &Receiver, options: CallOptions) -> Result<Answer, Failure> {
    let target = client.policy().check_url(&to.url)?;
    client.post(&target, HeaderMap::new(), Bytes::from_static(b"{}"), options).await
}

const SOON: CallOptions = CallOptions { timeout: Some(Duration::from_millis(300)), tenant: Tenant(0) };

#[tokio::test]
async fn an_answer_is_returned_and_its_connection_reused() {
    let receiver = receiver(Then::Answer("HTTP/1.1 202 Accepted\r\nX-A: b\r\nContent-Length: 3\r\n\r\nyes")).await;
    let client = client();
    for _ in 0..10 {
        let answer = post(&client, &receiver, CallOptions::default()).await.unwrap();
        assert_eq!((answer.status, &answer.body[..], answer.is_truncated), (202, &b"yes"[..], false));
        assert_eq!(answer.headers["x-a"], "b");
    }
    assert_eq!(receiver.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_redirect_is_an_answer() {
    let target = receiver(Then::Answer("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")).await;
    let head = format!("HTTP/1.1 301 Moved\r\nLocation: {}\r\nContent-Length: 0\r\n\r\n", target.url);
    let redirecting = receiver(Then::Answer(head.leak())).await;
    let answer = post(&client(), &redirecting, CallOptions::default()).await.unwrap();
    assert_eq!(answer.status, 301);
    assert_eq!(target.connections.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn silence_and_dripping_end_at_the_timeout() {
    for text in ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"] {
        let receiver = receiver(Then::Hang(text)).await;
        assert!(matches!(post(&client(), &receiver, SOON).await, Err(Failure::Timeout)), "{text:?}");
    }
}

#[tokio::test]
async fn broken_answers_are_failures() {
    for text in ["", "nonsense\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"] {
        let receiver = receiver(Then::Last(text)).await;
        let failure = post(&client(), &receiver, CallOptions::default()).await.unwrap_err();
        assert!(matches!(failure, Failure::Protocol(_)), "{text:?}: {failure:?}");
    }
}

#[tokio::test]
async fn heads_and_bodies_are_read_up_to_a_limit() {
    let endless = receiver(Then::EndlessHead).await;
    let failure = post(&client(), &endless, CallOptions::default()).await.unwrap_err();
    assert!(matches!(failure, Failure::TooLarge), "{failure:?}");
    let large = receiver(Then::Large("HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n", 10_000_000)).await;
    let answer = post(&client(), &large, CallOptions::default()).await.unwrap();
    assert_eq!((answer.body.len(), answer.is_truncated), (CallLimits::default().body_bytes, true));
}

#[tokio::test]
async fn a_connection_closed_by_the_server_is_not_reused() {
    let text = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    let receiver = receiver(Then::Last(text)).await;
    let client = client();
    for _ in 0..5 {
        assert_eq!(post(&client, &receiver, CallOptions::default()).await.unwrap().status, 200);
    }
    assert_eq!(receiver.connections.load(Ordering::SeqCst), 5);
}

#[tokio::test]
async fn a_refused_connection_is_a_connect_failure() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    drop(listener);
    let client = client();
    let target = client.policy().check_url(&url).unwrap();
    let posted = client.post(&target, HeaderMap::new(), Bytes::new(), CallOptions::default()).await;
    assert!(matches!(posted, Err(Failure::Connect(_))));
}
