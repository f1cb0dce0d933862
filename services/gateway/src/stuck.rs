//! A peer that takes nothing any more: its connection is ended, instead of being held for as long as the peer likes.
//!
//! Sockets of nodes and observers have their own, shorter patience and say why they close; this is for everything else
//! that is written at length, server-sent events above all.

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

/// A write that makes no progress for this long is the last one. Longer than the patience of any socket.
const STUCK: Duration = Duration::from_secs(40);

/// The address that a connection comes from.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// Accepts connections that end when their peer takes nothing for 40 s.
#[derive(Debug)]
pub struct Guarded<L>(pub L);

impl<L: Listener<Addr = SocketAddr>> Listener for Guarded<L> {
    type Io = Guard<L::Io>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        let (io, peer) = self.0.accept().await;
        (Guard::new(io, STUCK), peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl<L: Listener<Addr = SocketAddr>> Connected<IncomingStream<'_, Guarded<L>>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Guarded<L>>) -> Self {
        Self(*stream.remote_addr())
    }
}

/// A connection whose writes are given up after a while.
#[derive(Debug)]
pub struct Guard<T> {
    io: T,
    patience: Duration,
    /// Runs while a write waits.
    stuck: Option<Pin<Box<Sleep>>>,
}

impl<T> Guard<T> {
    const fn new(io: T, patience: Duration) -> Self {
        Self { io, patience, stuck: None }
    }

    /// What a write came to; one that waits, waits so long.
    fn judged<R>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if written.is_ready() {
            self.stuck = None;
            return written;
        }
        let patience = self.patience;
        ready!(self.stuck.get_or_insert_with(|| Box::pin(sleep(patience))).as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer takes nothing any more")))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Guard<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Guard<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        self.judged(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.judged(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        self.judged(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(&mut self.io).poll_shutdown(context);
        self.judged(context, ended)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn a_peer_that_takes_nothing_ends_its_connection_and_a_slow_one_does_not() {
        let (near, mut far) = duplex(16);
        let mut guard = Guard::new(near, Duration::from_secs(3));
        let reader = tokio::spawn(async move {
            for _ in 0..10 {
                sleep(Duration::from_millis(50)).await;
                far.read_exact(&mut [0; 16]).await.expect("sixteen bytes");
            }
            far
        });
        guard.write_all(&[7; 160]).await.expect("it takes some each time");
        let _far = reader.await.expect("the reader");
        let stuck = guard.write_all(&[7; 160]).await.expect_err("nobody takes it");
        assert_eq!(stuck.kind(), io::ErrorKind::TimedOut);
    }
}
