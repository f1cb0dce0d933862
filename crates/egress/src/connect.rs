//! Resolver and connector. Both are traits, so that the policy can be tested without network traffic.

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

/// Maximum number of concurrent lookups. Each occupies a thread of the system resolver and cannot be cancelled;
/// unresponsive name servers must not block all threads of the process.
const MAX_LOOKUPS: usize = 128;
/// Maximum time that a lookup waits for its turn.
const LOOKUP_WAIT: Duration = Duration::from_secs(3);

/// Resolver of host names.
pub trait Resolve: Send + Sync + 'static {
    /// Resolves all addresses of `host`, which is a name.
    fn resolve(&self, host: &str) -> impl Future<Output = io::Result<Vec<IpAddr>>> + Send;
}

/// Connector to an address.
pub trait Connect: Send + Sync + 'static {
    /// Established connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Connects to exactly this address.
    fn connect(&self, address: SocketAddr) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

/// Resolver of the operating system. Clones share the limit of concurrent lookups.
#[derive(Debug, Clone)]
pub struct SystemResolver {
    lookups: Arc<Semaphore>,
    lookup_wait: Duration,
}

impl Default for SystemResolver {
    fn default() -> Self {
        Self { lookups: Arc::new(Semaphore::new(MAX_LOOKUPS)), lookup_wait: LOOKUP_WAIT }
    }
}

impl SystemResolver {
    /// Runs a lookup when a slot is free. The lookup continues after its caller was dropped and occupies its slot until it
    /// ends.
    ///
    /// Fails with [`io::ErrorKind::ResourceBusy`] when no slot becomes free; the called host is then not at fault.
    async fn run_bounded<T: Send + 'static>(
        &self,
        lookup: impl Future<Output = io::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        let turn = tokio::time::timeout(self.lookup_wait, Arc::clone(&self.lookups).acquire_owned()).await;
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
        // The trailing dot disables the search domains of this machine. Names of this machine are not in the DNS, and
        // their addresses need an allow rule anyway.
        let name = if host.contains('.') { format!("{host}.") } else { host.to_owned() };
        let lookup = async move {
            let found = tokio::net::lookup_host((name, 0)).await?;
            Ok(found.map(|address| address.ip()).collect())
        };
        self.run_bounded(lookup).await
    }
}

/// Connector over TCP.
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

    #[tokio::test]
    async fn a_lookup_occupies_its_slot_until_it_ends() {
        let resolver = SystemResolver { lookups: Arc::new(Semaphore::new(1)), lookup_wait: LOOKUP_WAIT };
        let impatient = SystemResolver { lookup_wait: Duration::from_millis(10), ..resolver.clone() };
        let (end, ended) = oneshot::channel();
        let hangs = resolver.run_bounded(async { ended.await.map_err(io::Error::other) });
        assert!(tokio::time::timeout(Duration::from_millis(10), hangs).await.is_err(), "its caller has gone");
        let busy = impatient.run_bounded(async { Ok(()) }).await.unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
        end.send(()).unwrap();
        resolver.run_bounded(async { Ok(()) }).await.unwrap();
    }
}
