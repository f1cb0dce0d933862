//! TCP proxy between an engine process and a server that a test can cut, stall, slow down or edit.
//!
//! It runs on a separate thread, so a test that blocks its runtime does not stall it, and changes take effect at once
//! without an `await`.

mod control;
mod nats_messages;
mod pump;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use crate::ports::Port;
use control::Control;

/// Direction of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the engine process to the server.
    ToServer,
    /// From the server to the engine process.
    ToClient,
}

/// Identity of one proxied connection, unique within its proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId(u64);

/// Decision of a filter about the bytes in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Forward the buffer.
    Forward,
    /// Forward it, then cut every connection and refuse new ones until [`TcpProxy::restore`].
    ForwardThenCut,
    /// Drop it, then cut every connection and refuse new ones until [`TcpProxy::restore`].
    DropThenCut,
    /// Drop it, then reset this connection only.
    DropThenReset,
    /// Drop it, and forward nothing more in this direction, not even the end of the connection.
    DropThenStall,
}

/// Proxy with its own address in front of one server.
#[derive(Debug)]
pub struct TcpProxy {
    port: Port,
    upstream: Arc<RwLock<SocketAddr>>,
    control: Arc<Control>,
}

impl TcpProxy {
    /// Starts forwarding from a fresh loopback port to `upstream` (`host:port`).
    pub fn start(upstream: &str) -> Result<Self> {
        let upstream = Arc::new(RwLock::new(parse_address(upstream)?));
        let port = Port::free()?;
        let control = Arc::new(Control::default());
        // Bound here and not in the task: clients may connect as soon as this function returns.
        let listener = std::net::TcpListener::bind(port.address())?;
        listener.set_nonblocking(true)?;
        runtime()?.spawn(accept(listener, Arc::clone(&upstream), Arc::clone(&control)));
        Ok(Self { port, upstream, control })
    }

    /// Forwards to another server (`host:port`) from now on, and resets every connection, as an operator's proxy does
    /// in a failover.
    pub fn switch_to(&self, upstream: &str) -> Result<()> {
        // Before the reset, after which clients connect again.
        *self.upstream.write().unwrap_or_else(PoisonError::into_inner) = parse_address(upstream)?;
        self.control.reset_all();
        Ok(())
    }

    /// Returns the proxy's address, `host:port`.
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// Returns `url` with host and port of the proxy.
    pub fn through(&self, url: &str) -> Result<String> {
        self.port.replace_address(url)
    }

    /// Resets every connection and refuses new ones.
    pub fn cut(&self) {
        self.control.cut();
    }

    /// Resets every connection once; new ones are served.
    pub fn reset_all(&self) {
        self.control.reset_all();
    }

    /// Stops forwarding: connections stay open, new ones are accepted, closes are not passed on. Bytes that arrive
    /// meanwhile are forwarded by [`TcpProxy::restore`].
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
        self.set_filter(direction, move |_, chunk| {
            if chunk.len() < left {
                left -= chunk.len();
                return Verdict::Forward;
            }
            chunk.truncate(left);
            left = 0;
            Verdict::ForwardThenCut
        });
    }

    /// Applies `verdict` to the first chunk with `pattern` in `direction` and then removes the rule.
    ///
    /// For "COMMIT arrived, its answer did not": `on_pattern(ToServer, b"COMMIT", ForwardThenCut)`. A pattern that is
    /// split between two reads is not detected, which does not happen for a statement sent in one write.
    pub fn on_pattern(&self, direction: Direction, pattern: &[u8], verdict: Verdict) {
        let pattern = pattern.to_vec();
        let mut armed = true;
        self.set_filter(direction, move |_, chunk| {
            if armed && chunk.windows(pattern.len()).any(|window| window == pattern) {
                armed = false;
                return verdict;
            }
            Verdict::Forward
        });
    }

    /// Shows every chunk in `direction`, and its connection, to `filter`, which may edit it. Replaces an earlier
    /// filter.
    pub fn set_filter<F>(&self, direction: Direction, filter: F)
    where
        F: FnMut(ConnectionId, &mut Vec<u8>) -> Verdict + Send + 'static,
    {
        self.control.set_filter(direction, Some(Box::new(filter)));
    }

    /// Removes the filter of `direction`.
    pub fn clear_filter(&self, direction: Direction) {
        self.control.set_filter(direction, None);
    }

    /// Drops the NATS messages to clients for which `drop(subject)` is true; the connection stays well-formed. Applies
    /// to current and future NATS connections.
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

    /// Restores plain forwarding: filters, rules, latency, cut and blackhole end.
    pub fn restore(&self) {
        self.control.restore();
    }

    /// Returns the number of open connections.
    pub fn connection_count(&self) -> usize {
        self.control.connection_count()
    }

    /// Returns the number of bytes forwarded so far in `direction`.
    pub fn forwarded_bytes(&self, direction: Direction) -> u64 {
        self.control.forwarded_bytes(direction)
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.control.close();
    }
}

/// Returns the thread of all proxies of the process, independent of any test's runtime.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<std::io::Result<Runtime>> = OnceLock::new();
    let build =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("tcp-proxy").enable_all().build();
    RUNTIME.get_or_init(build).as_ref().map_err(|error| anyhow::anyhow!("start the proxy thread: {error}"))
}

fn parse_address(address: &str) -> Result<SocketAddr> {
    address.parse().with_context(|| format!("{address} as ip:port"))
}

async fn accept(listener: std::net::TcpListener, upstream: Arc<RwLock<SocketAddr>>, control: Arc<Control>) {
    let Ok(listener) = TcpListener::from_std(listener) else {
        return;
    };
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = control.closed() => return,
        };
        let Ok((client, _)) = accepted else { continue };
        // Before the server is chosen: a reset while the connection opens must end one that leads to the former server.
        let generation = control.generation();
        if control.refuses() {
            pump::reset(client);
            continue;
        }
        let control = Arc::clone(&control);
        let upstream = *upstream.read().unwrap_or_else(PoisonError::into_inner);
        tokio::spawn(async move {
            match TcpStream::connect(upstream).await {
                Ok(server) => pump::run_connection(client, server, control, generation).await,
                Err(_) => pump::reset(client),
            }
        });
    }
}

#[cfg(test)]
mod tests;
