//! Stable address in front of the gateways.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// Forwarder on a loopback port, like a load balancer with health checks: connections go to one gateway until it
/// refuses them, then to the next. A connection ends when its gateway ends it.
#[derive(Debug)]
pub struct Front {
    url: String,
    current: Arc<AtomicUsize>,
    is_open: watch::Sender<bool>,
    accepting: AbortHandle,
}

impl Front {
    /// Starts a forwarder to these gateways, the first one preferred.
    pub async fn start(gateways: &[&str]) -> Result<Self> {
        let address = |url: &&str| url.strip_prefix("http://").map(str::to_owned).context("a gateway's URL");
        let upstreams = gateways.iter().map(address).collect::<Result<Vec<_>>>()?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let current = Arc::new(AtomicUsize::new(0));
        let is_open = watch::Sender::new(true);
        let accepting = accept(listener, upstreams, Arc::clone(&current), is_open.subscribe());
        Ok(Self { url, current, is_open, accepting: tokio::spawn(accepting).abort_handle() })
    }

    /// Holds new connections, without a byte, until [`Self::release`].
    pub fn hold(&self) {
        self.is_open.send_replace(false);
    }

    /// Connects those that wait.
    pub fn release(&self) {
        self.is_open.send_replace(true);
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the index of the gateway for new connections.
    pub fn current(&self) -> usize {
        self.current.load(Ordering::SeqCst)
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(
    listener: TcpListener,
    upstreams: Vec<String>,
    current: Arc<AtomicUsize>,
    is_open: watch::Receiver<bool>,
) {
    // Dropped with this task, which ends every connection.
    let mut connections = JoinSet::new();
    while let Ok((mut client, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        let (upstreams, current, mut is_open) = (upstreams.clone(), Arc::clone(&current), is_open.clone());
        connections.spawn(async move {
            // An error says that the front is dropped, and this task with it.
            let _ = is_open.wait_for(|is_open| *is_open).await;
            if let Some(mut server) = connect(&upstreams, &current).await {
                // Either side may disconnect; clients are expected to handle it.
                let _ = copy_bidirectional(&mut client, &mut server).await;
            }
        });
    }
}

async fn connect(upstreams: &[String], current: &AtomicUsize) -> Option<TcpStream> {
    let first = current.load(Ordering::SeqCst);
    for turn in 0..upstreams.len() {
        let index = (first + turn) % upstreams.len();
        if let Ok(server) = TcpStream::connect(&upstreams[index]).await {
            current.store(index, Ordering::SeqCst);
            return Some(server);
        }
    }
    None
}
