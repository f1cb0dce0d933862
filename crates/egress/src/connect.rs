//! Connector to addresses. A trait, so that the policy can be tested without network traffic.

use std::{future::Future, io, net::SocketAddr};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

/// Connector to an address.
pub trait Connect: Send + Sync + 'static {
    /// Established connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Connects to exactly this address.
    fn connect(&self, address: SocketAddr) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

/// Connector over TCP.
#[derive(Debug, Clone, Copy, Default)]
pub struct TcpConnector;

impl Connect for TcpConnector {
    type Stream = TcpStream;

    async fn connect(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let stream = TcpStream::connect(address).await?;
        // A request is small and then waits for its answer: Nagle's algorithm would only delay it.
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}
