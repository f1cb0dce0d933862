//! HTTP/1 server of the processes: the accept loop, the timeouts of its connections, and their graceful end.
//!
//! `axum::serve` gives hyper no timer, so a silent connection would stay open for ever. [`serve`] is called by the
//! gateway for its clients and by every process for its metrics page.

mod body;
mod file_limit;
mod hyper_timer;
mod phase;
mod read_gate;
mod stream;

use std::{error::Error, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{body::Body, extract::Request, http::StatusCode, response::Response};
pub use body::GuardedBody;
pub use file_limit::raise_file_limit;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_timer::NeverEndingTimer;
use hyper_util::rt::TokioIo;
use phase::Phase;
pub use read_gate::ReadGate;
use stream::GuardedStream;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

/// Bytes of a connection that are read ahead of its requests' handlers, which is the limit of a head. hyper's own is
/// 400 KiB.
const MAX_BUFFER_BYTES: usize = 64 * 1024;
/// Pause after a failed accept. It fails above all for lack of file descriptors, which come back as connections end.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Times after which a connection ends.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// From the connection, or from the first byte of a later request, to the end of the request's head.
    pub head: Duration,
    /// Between two requests. Longer than the 60 s after which common proxies close idle connections, because a proxy
    /// must not send a request into a connection that closes.
    pub idle: Duration,
    /// While the peer accepts no bytes.
    pub write: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { head: Duration::from_secs(10), idle: Duration::from_secs(75), write: Duration::from_secs(40) }
    }
}

/// Serves connections until `stop`, then finishes the requests in flight.
///
/// `accept` decides about each connection: it returns the handler of its requests and a value that is dropped with the
/// connection, also if that is upgraded. `None` closes it. Requests have the [`ReadGate`] of their connection as an
/// extension. A handler that fails closes the connection without an answer.
pub async fn serve<A, H, G, F, E>(listener: TcpListener, timeouts: Timeouts, accept: A, stop: CancellationToken)
where
    A: Fn(SocketAddr) -> Option<(H, G)>,
    H: Fn(Request) -> F + Send + 'static,
    G: Send + Unpin + 'static,
    F: Future<Output = Result<Response, E>> + Send + 'static,
    E: Into<Box<dyn Error + Send + Sync>> + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        let (socket, peer) = tokio::select! {
            // The stop first: otherwise the loop would not end while clients keep connecting.
            biased;
            () = stop.cancelled() => break,
            accepted = accept_next(&listener) => accepted,
            Some(_) = connections.join_next() => continue,
        };
        // The branch above may not be reached while connections keep coming.
        while connections.try_join_next().is_some() {}
        let Some((handler, guard)) = accept(peer) else { continue };
        connections.spawn(serve_connection(socket, timeouts, handler, guard, stop.clone()));
    }
    // Before the wait: new clients are refused at once, and connect to another process.
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn accept_next(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok((socket, peer)) => {
                // Frames and responses are small and latency matters.
                // An error means that the connection has ended, which its first read finds.
                let _ = socket.set_nodelay(true);
                return (socket, peer);
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::error!(%error, "accept failed, retrying");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Returns whether the connection failed that was to be accepted, as opposed to the listener.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(error.kind(), Kind::ConnectionRefused | Kind::ConnectionAborted | Kind::ConnectionReset)
}

async fn serve_connection<H, G, F, E>(
    socket: TcpStream,
    timeouts: Timeouts,
    handler: H,
    guard: G,
    stop: CancellationToken,
) where
    H: Fn(Request) -> F + Send + 'static,
    G: Send + Unpin + 'static,
    F: Future<Output = Result<Response, E>> + Send + 'static,
    E: Into<Box<dyn Error + Send + Sync>> + 'static,
{
    let phase = Arc::new(Phase::default());
    let gate = ReadGate::default();
    let stream = GuardedStream::new(socket, timeouts, Arc::clone(&phase), (gate.clone(), guard));
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(gate.clone());
        let in_progress = phase.start_request();
        let answer = handler(request.map(Body::new));
        async move {
            let response = answer.await?;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                in_progress.upgrade();
                return Ok::<_, E>(response);
            }
            // Until the body was sent: a slow answer is no pause between requests.
            Ok(response.map(|body| GuardedBody::wrap(body, in_progress)))
        }
    });
    let connection = http1::Builder::new()
        .timer(NeverEndingTimer)
        // Never fires, with this timer: it only makes hyper read an idle connection at once.
        .header_read_timeout(timeouts.head + timeouts.idle)
        .max_buf_size(MAX_BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(error = &error as &dyn Error, "connection ended");
    }
}
