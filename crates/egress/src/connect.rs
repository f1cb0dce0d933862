//! Asking for a host's addresses, and connecting to one. Traits, so that the guard can be tested without a packet
//! leaving the machine.

use std::{
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::Semaphore,
};

/// Lookups under way at most. The system has a thread for each, and cannot be told to give one up: names that nobody
/// answers for must not take all threads of the process.
const LOOKUPS: usize = 128;
/// How long a lookup waits for its turn.
const LOOKUP_WAITS: Duration = Duration::from_secs(3);

/// Finds the addresses of a host.
pub trait Resolve: Send + Sync + 'static {
    /// All addresses of `host`, a name.
    fn resolve(&self, host: &str) -> impl Future<Output = io::Result<Vec<IpAddr>>> + Send;
}

/// Opens connections.
pub trait Connect: Send + Sync + 'static {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Connects to exactly this address.
    fn connect(&self, address: SocketAddr) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

/// The resolver of the operating system. Clones share its bound of lookups under way.
#[derive(Debug, Clone)]
pub struct SystemResolver {
    lookups: Arc<Semaphore>,
}

impl Default for SystemResolver {
    fn default() -> Self {
        Self { lookups: Arc::new(Semaphore::new(LOOKUPS)) }
    }
}

impl SystemResolver {
    /// A lookup in its turn. It goes on when nobody waits for it any more, and keeps its place until it has ended.
    ///
    /// One that does not get its turn ends with [`io::ErrorKind::ResourceBusy`]: the address that was called is not at
    /// fault.
    async fn in_turn<T: Send + 'static>(
        &self,
        lookup: impl Future<Output = io::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        let turn = tokio::time::timeout(LOOKUP_WAITS, Arc::clone(&self.lookups).acquire_owned()).await;
        let Ok(Ok(place)) = turn else {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "the name server is busy"));
        };
        let under_way = tokio::spawn(async move {
            let found = lookup.await;
            drop(place);
            found
        });
        under_way.await.map_err(io::Error::other)?
    }
}

impl Resolve for SystemResolver {
    async fn resolve(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        // The dot at the end keeps the domains that this machine searches out of it. Names of this machine are
        // not in the DNS, and their addresses need an allowance anyhow.
        let name = if host.contains('.') { format!("{host}.") } else { host.to_owned() };
        let lookup = async move {
            let found = tokio::net::lookup_host((name, 0)).await?;
            Ok(found.map(|address| address.ip()).collect())
        };
        self.in_turn(lookup).await
    }
}

/// TCP.
#[derive(Debug, Clone, Copy, Default)]
pub struct TcpConnector;

impl Connect for TcpConnector {
    type Stream = TcpStream;

    async fn connect(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_lookup_keeps_its_place_until_it_ends_however_long_anybody_waits_for_it() {
        let resolver = SystemResolver { lookups: Arc::new(Semaphore::new(1)) };
        let (end, ended) = oneshot::channel();
        let hangs = resolver.in_turn(async { ended.await.map_err(io::Error::other) });
        assert!(tokio::time::timeout(Duration::from_secs(1), hangs).await.is_err(), "its caller has gone");
        let busy = resolver.in_turn(async { Ok(()) }).await.unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
        end.send(()).unwrap();
        resolver.in_turn(async { Ok(()) }).await.unwrap();
    }
}
