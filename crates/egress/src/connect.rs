//! Asking for a host's addresses, and connecting to one. Traits, so that the guard can be tested without a packet
//! leaving the machine.

use std::{
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

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

/// The resolver of the operating system.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    async fn resolve(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        // The dot at the end keeps the domains that this machine searches out of it. Names of this machine are
        // not in the DNS, and their addresses need an allowance anyhow.
        let name = if host.contains('.') { format!("{host}.") } else { host.to_owned() };
        let found = tokio::net::lookup_host((name, 0)).await?;
        Ok(found.map(|address| address.ip()).collect())
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
