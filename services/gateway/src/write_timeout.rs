//! Write timeout of accepted connections: a peer that stops reading loses its connection.
//!
//! Sockets of nodes and observers have shorter timeouts and report why they close. This one covers all other long
//! responses, above all server-sent events. Used by `main`.
//!

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    extract::connect_info::Connected,
    serve::{IncomingStream, Listener},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// Time without progress after which a write fails. Longer than the timeout of any socket.
const WRITE_TIMEOUT: Duration = Duration::from_secs(40);

/// Remote address of a connection.
#[derive(Debug, Clone, Copy)]
pub struct PeerAddress(pub SocketAddr);

/// Listener whose connections end when their peer accepts no bytes for 40 s.
#[derive(Debug)]
pub struct TimeoutListener<L>(pub L);

impl<L: Listener<Addr = SocketAddr>> Listener for TimeoutListener<L> {
    type Io = TimeoutStream<L::Io>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        let (io, peer) = self.0.accept().await;
        (TimeoutStream::new(io, WRITE_TIMEOUT), peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl<L: Listener<Addr = SocketAddr>> Connected<IncomingStream<'_, TimeoutListener<L>>> for PeerAddress {
    fn connect_info(stream: IncomingStream<'_, TimeoutListener<L>>) -> Self {
        Self(*stream.remote_addr())
    }
}

/// Stream whose writes time out.
#[derive(Debug)]
pub struct TimeoutStream<T> {
    io: T,
    timeout: Duration,
    /// Runs while a write is pending.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<T> TimeoutStream<T> {
    const fn new(io: T, timeout: Duration) -> Self {
        Self { io, timeout, waiting: None }
    }

    /// Applies the timeout to the result of a write.
    fn apply_timeout<R>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let timeout = self.timeout;
        ready!(self.waiting.get_or_insert_with(|| Box::pin(sleep(timeout))).as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer stopped reading")))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for TimeoutStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for TimeoutStream<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        self.apply_timeout(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.apply_timeout(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        self.apply_timeout(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(&mut self.io).poll_shutdown(context);
        self.apply_timeout(context, ended)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn a_peer_that_stops_reading_loses_its_connection_and_a_slow_one_does_not() {
        let (near, mut far) = duplex(16);
        let mut guard = TimeoutStream::new(near, Duration::from_secs(3));
        let reader = tokio::spawn(async move {
            for _ in 0..10 {
                sleep(Duration::from_millis(50)).await;
                far.read_exact(&mut [0; 16]).await.expect("sixteen bytes");
            }
            far
        });
        guard.write_all(&[7; 160]).await.expect("the peer reads some each time");
        let _far = reader.await.expect("the reader");
        let waiting = guard.write_all(&[7; 160]).await.expect_err("the peer has stopped reading");
        assert_eq!(waiting.kind(), io::ErrorKind::TimedOut);
    }
}
