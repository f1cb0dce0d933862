//! A TCP proxy between an engine process and a server, to be cut, stalled, slowed or edited by a test.
//!
//! It runs on a thread of its own, so a test that blocks its runtime does not stall it, and controls take effect
//! at once without an `await`.

mod control;
mod nats_messages;
mod pump;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use crate::ports::Port;
use control::Control;

/// Which way bytes flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the engine process to the server.
    ToServer,
    /// From the server to the engine process.
    ToClient,
}

/// What a filter lets happen to the bytes it was shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Forward what is in the buffer now.
    Forward,
    /// Forward it, then cut every connection and refuse new ones until [`TcpProxy::restore`].
    ForwardThenCut,
    /// Drop it, then cut every connection and refuse new ones until [`TcpProxy::restore`].
    DropThenCut,
    /// Forward it, then reset this connection only.
    ForwardThenReset,
    /// Drop it, then reset this connection only.
    DropThenReset,
}

/// A proxy with an address of its own in front of one server.
#[derive(Debug)]
pub struct TcpProxy {
    port: Port,
    control: Arc<Control>,
}

impl TcpProxy {
    /// Starts forwarding from a fresh loopback port to `upstream` (`host:port`).
    pub fn start(upstream: &str) -> Result<Self> {
        let upstream: SocketAddr = upstream.parse().with_context(|| format!("{upstream} as ip:port"))?;
        let port = Port::free()?;
        let control = Arc::new(Control::default());
        let listener = std::net::TcpListener::bind(port.address())?;
        listener.set_nonblocking(true)?;
        let accepting = Arc::clone(&control);
        runtime()?.spawn(async move { accept(listener, upstream, accepting).await });
        Ok(Self { port, control })
    }

    /// `host:port` that clients connect to.
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// `url` with its host and port replaced by the proxy's.
    pub fn through(&self, url: &str) -> Result<String> {
        let mut url = url::Url::parse(url).with_context(|| format!("parse {url}"))?;
        url.set_host(Some("127.0.0.1"))?;
        url.set_port(Some(self.port.number())).map_err(|()| anyhow::anyhow!("{url} takes no port"))?;
        // Url prints an empty path as nothing for unknown schemes and as "/" for known ones; both are fine here.
        Ok(url.to_string())
    }

    /// Resets every connection and refuses new ones.
    pub fn cut(&self) {
        self.control.cut();
    }

    /// Resets every connection once; new ones are served.
    pub fn reset_all(&self) {
        self.control.reset_all();
    }

    /// Half-open: connections stay, new ones are accepted, nothing is forwarded, no end is passed on.
    /// Bytes that arrive meanwhile wait and are forwarded by [`TcpProxy::restore`].
    pub fn blackhole(&self) {
        self.control.blackhole();
    }

    /// Delays each chunk, in each direction, by `delay`.
    pub fn set_latency(&self, delay: Duration) {
        self.control.set_latency(delay);
    }

    /// Cuts (as [`TcpProxy::cut`]) once `bytes` more have passed in `direction`, all connections together.
    pub fn cut_after(&self, direction: Direction, bytes: usize) {
        let mut left = bytes;
        self.set_filter(direction, move |chunk| {
            if chunk.len() < left {
                left -= chunk.len();
                return Verdict::Forward;
            }
            chunk.truncate(left);
            left = 0;
            Verdict::ForwardThenCut
        });
    }

    /// Once a chunk with `pattern` passes in `direction`, `verdict` happens to it and the rule is gone.
    ///
    /// For "COMMIT arrived, its answer did not": `on_pattern(ToServer, b"COMMIT", ForwardThenCut)`; a pattern that
    /// is split between two reads is not seen, which for a statement sent in one write does not happen.
    pub fn on_pattern(&self, direction: Direction, pattern: &[u8], verdict: Verdict) {
        let pattern = pattern.to_vec();
        let mut armed = true;
        self.set_filter(direction, move |chunk| {
            if armed && chunk.windows(pattern.len()).any(|window| window == pattern) {
                armed = false;
                return verdict;
            }
            Verdict::Forward
        });
    }

    /// Shows every chunk in `direction` to `filter`, which may edit it. Replaces an earlier filter.
    pub fn set_filter<F>(&self, direction: Direction, filter: F)
    where
        F: FnMut(&mut Vec<u8>) -> Verdict + Send + 'static,
    {
        self.control.set_filter(direction, Some(Box::new(filter)));
    }

    /// Removes the filter of `direction`.
    pub fn clear_filter(&self, direction: Direction) {
        self.control.set_filter(direction, None);
    }

    /// Drops the NATS messages to the clients for which `drop(subject)` says so; the connection stays well-formed.
    /// Applies to connections made after this call or before, as long as they speak NATS.
    pub fn drop_nats_messages<F>(&self, drop: F)
    where
        F: FnMut(&str) -> bool + Send + 'static,
    {
        self.control.set_nats_rule(Some(Box::new(drop)));
    }

    /// Ends [`TcpProxy::drop_nats_messages`].
    pub fn keep_nats_messages(&self) {
        self.control.set_nats_rule(None);
    }

    /// Back to plain forwarding: filters, rules, latency, cut and blackhole end.
    pub fn restore(&self) {
        self.control.restore();
    }

    /// Open connections right now.
    pub fn connection_count(&self) -> usize {
        self.control.connection_count()
    }

    /// Bytes forwarded so far in `direction`.
    pub fn forwarded_bytes(&self, direction: Direction) -> u64 {
        self.control.forwarded_bytes(direction)
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.control.close();
    }
}

/// One thread for all proxies of the process, independent of any test's runtime.
fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<std::io::Result<Runtime>> = OnceLock::new();
    let build =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("tcp-proxy").enable_all().build();
    RUNTIME.get_or_init(build).as_ref().map_err(|error| anyhow::anyhow!("start the proxy thread: {error}"))
}

async fn accept(listener: std::net::TcpListener, upstream: SocketAddr, control: Arc<Control>) {
    let Ok(listener) = TcpListener::from_std(listener) else {
        return;
    };
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = control.closed() => return,
        };
        let Ok((client, _)) = accepted else { continue };
        if control.refuses() {
            pump::reset(client);
            continue;
        }
        let control = Arc::clone(&control);
        tokio::spawn(async move {
            match TcpStream::connect(upstream).await {
                Ok(server) => pump::connection(client, server, control).await,
                Err(_) => pump::reset(client),
            }
        });
    }
}

#[cfg(test)]
mod tests;
