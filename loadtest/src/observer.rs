//! Observers of one workspace, which check that no number is missing.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use tokio::{net::TcpStream, task::JoinSet, time::timeout};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, protocol::WebSocketConfig},
};

use crate::api::Workspace;

/// Number of concurrent connection attempts.
const AT_ONCE: usize = 64;
const UPGRADED_WITHIN: Duration = Duration::from_secs(30);

/// Counts of all observers.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) frames: AtomicU64,
    pub(crate) gaps: AtomicU64,
    pub(crate) closed: AtomicU64,
}

/// Connected observers, disconnected when dropped.
pub(crate) struct Observers {
    pub(crate) seen: Arc<Seen>,
    _readers: JoinSet<()>,
}

impl Observers {
    /// Connects `count` observers with one token, spread over the gateways.
    pub(crate) async fn connect(workspace: &Workspace, token: &str, count: usize) -> Result<Self> {
        let opened = (0..count).map(|number| open(workspace.pool(number).address(), token));
        let seen = Arc::new(Seen::default());
        let mut readers = JoinSet::new();
        let mut opened = stream::iter(opened).buffer_unordered(AT_ONCE);
        while let Some(socket) = opened.try_next().await? {
            readers.spawn(read(socket, Arc::clone(&seen)));
        }
        Ok(Self { seen, _readers: readers })
    }
}

async fn open(address: &str, token: &str) -> Result<WebSocketStream<TcpStream>> {
    let tcp = TcpStream::connect(address).await?;
    let url = format!("ws://{address}/v1/ws?token={token}");
    // Small buffers: thousands of sockets live in one process.
    let config = WebSocketConfig::default().read_buffer_size(8 * 1024).write_buffer_size(4 * 1024);
    let upgrade = tokio_tungstenite::client_async_with_config(url, tcp, Some(config));
    let (socket, _) =
        timeout(UPGRADED_WITHIN, upgrade).await.context("no answer to the upgrade")?.context("upgrade")?;
    Ok(socket)
}

async fn read(mut socket: WebSocketStream<TcpStream>, seen: Arc<Seen>) {
    let mut last = None;
    while let Some(Ok(Message::Text(text))) = socket.next().await {
        seen.frames.fetch_add(1, Ordering::Relaxed);
        let number = number_of(&text);
        if let (Some(last), Some(number)) = (last, number)
            && number != last + 1
        {
            seen.gaps.fetch_add(1, Ordering::Relaxed);
        }
        last = number.or(last);
    }
    seen.closed.fetch_add(1, Ordering::Relaxed);
}

/// Returns the number at the start of an observer frame.
fn number_of(frame: &str) -> Option<u64> {
    let digits = frame.strip_prefix(r#"{"seq":"#)?;
    digits.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_begins_with_its_number() {
        assert_eq!(number_of(r#"{"seq":17,"agent_seq":17,"type":"x"}"#), Some(17));
        assert_eq!(number_of(r#"{"type":"pong"}"#), None);
    }
}
