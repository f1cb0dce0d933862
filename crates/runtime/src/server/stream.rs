//! Stream of a connection that ends when its peer is too slow.
//!
//! hyper has one timeout for the head of a request and for the pause before it. Here a pause may be longer: a client
//! that keeps its connection open is no attacker, and one that never completes a head is.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use relay_domain::metric_names as name;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep, sleep_until},
};

use super::{
    Timeouts,
    phase::Phase,
    read_gate::{Admission, ReadGate},
};

/// Bytes that are read at a time to be dropped.
const DISCARD_BYTES: usize = 4096;

/// Stream whose reads end with the phase of its connection, and whose writes time out.
#[derive(Debug)]
pub(super) struct GuardedStream<T, G> {
    io: T,
    timeouts: Timeouts,
    phase: Arc<Phase>,
    /// Started by the first read that is pending in a phase that has an end. Ends no later than that phase.
    reading: Option<Pin<Box<Sleep>>>,
    /// Runs while a write is pending.
    writing: Option<Pin<Box<Sleep>>>,
    gate: ReadGate,
    /// Dropped with the connection.
    _guard: G,
}

impl<T, G> GuardedStream<T, G> {
    /// `gate` bounds what is read after an upgrade; `guard` is dropped with the connection.
    pub(super) fn new(io: T, timeouts: Timeouts, phase: Arc<Phase>, (gate, guard): (ReadGate, G)) -> Self {
        Self { io, timeouts, phase, reading: None, writing: None, gate, _guard: guard }
    }

    /// Fails a pending read at the end of the phase.
    fn apply_read_timeout(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some((end, timeout)) = self.phase.deadline(&self.timeouts) else { return Poll::Pending };
        let timer = self.reading.get_or_insert_with(|| Box::pin(sleep_until(end)));
        if timer.deadline() > end {
            timer.as_mut().reset(end);
        }
        // A timer of an earlier phase is set again when it ends: once in a while instead of for each request.
        while timer.deadline() < end {
            ready!(timer.as_mut().poll(context));
            timer.as_mut().reset(end);
        }
        ready!(timer.as_mut().poll(context));
        metrics::counter!(name::CONNECTIONS_TIMED_OUT, "reason" => timeout.as_str()).increment(1);
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "no request in time")))
    }

    /// Applies the timeout to the result of a write.
    fn apply_write_timeout<R>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if written.is_ready() {
            // Progress restarts the time: it bounds a stall, not the whole answer.
            self.writing = None;
            return written;
        }
        let timeout: Duration = self.timeouts.write;
        ready!(self.writing.get_or_insert_with(|| Box::pin(sleep(timeout))).as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer stopped reading")))
    }
}

impl<T: AsyncRead + Unpin, G> GuardedStream<T, G> {
    /// Reads and drops what arrives, until the end of the stream.
    fn poll_discard(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut dropped = [0; DISCARD_BYTES];
        // Bounded by the runtime's budget of a task: once it is used up, the socket is pending.
        loop {
            let mut buffer = ReadBuf::new(&mut dropped);
            ready!(Pin::new(&mut self.io).poll_read(context, &mut buffer))?;
            if buffer.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<T: AsyncRead + Unpin, G: Unpin> AsyncRead for GuardedStream<T, G> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if ready!(self.gate.poll_admission(context)) == Admission::Discard {
            return self.poll_discard(context);
        }
        let filled = buffer.filled().len();
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if read.is_pending() {
            return self.apply_read_timeout(context);
        }
        if buffer.filled().len() > filled {
            self.phase.on_bytes();
            self.gate.on_bytes(buffer.filled().len() - filled);
        }
        read
    }
}

impl<T: AsyncWrite + Unpin, G: Unpin> AsyncWrite for GuardedStream<T, G> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        self.apply_write_timeout(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.apply_write_timeout(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        self.apply_write_timeout(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(&mut self.io).poll_shutdown(context);
        self.apply_write_timeout(context, ended)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
        time::Instant,
    };

    use super::*;

    const TIMEOUTS: Timeouts =
        Timeouts { head: Duration::from_secs(10), idle: Duration::from_secs(75), write: Duration::from_secs(3) };

    fn guarded() -> (GuardedStream<DuplexStream, ()>, DuplexStream, Arc<Phase>) {
        let (near, far) = duplex(16);
        let phase = Arc::new(Phase::default());
        (GuardedStream::new(near, TIMEOUTS, Arc::clone(&phase), (ReadGate::default(), ())), far, phase)
    }

    /// Reads until the stream fails, and returns after how long it did.
    async fn time_until_failure(stream: &mut GuardedStream<DuplexStream, ()>) -> Duration {
        let began = Instant::now();
        loop {
            if let Err(error) = stream.read_u8().await {
                assert_eq!(error.kind(), io::ErrorKind::TimedOut);
                return began.elapsed();
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_arrives_byte_by_byte_has_no_more_time_than_a_silent_one() {
        let (mut stream, mut far, _) = guarded();
        let dribble = tokio::spawn(async move {
            while far.write_all(b"x").await.is_ok() {
                sleep(Duration::from_secs(1)).await;
            }
        });
        assert_eq!(time_until_failure(&mut stream).await, TIMEOUTS.head);
        dribble.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_between_requests_may_be_longer_than_a_head() {
        let (mut stream, mut far, phase) = guarded();
        drop(phase.start_request());
        assert_eq!(time_until_failure(&mut stream).await, TIMEOUTS.idle);

        drop(phase.start_request());
        sleep(TIMEOUTS.head * 2).await;
        far.write_all(b"G").await.unwrap();
        assert_eq!(time_until_failure(&mut stream).await, TIMEOUTS.head, "from the first byte of a head");
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_an_earlier_phase_does_not_end_a_later_one() {
        let (mut stream, _far, phase) = guarded();
        for _ in 0..30 {
            let pause = tokio::time::timeout(Duration::from_secs(1), stream.read_u8()).await;
            assert!(pause.is_err(), "still reading");
            drop(phase.start_request());
        }
        assert_eq!(time_until_failure(&mut stream).await, TIMEOUTS.idle, "since the last request");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_and_upgraded_connections_are_not_timed() {
        let (mut stream, _far, phase) = guarded();
        let request = phase.start_request();
        let waited = tokio::time::timeout(TIMEOUTS.idle * 10, stream.read_u8()).await;
        assert!(waited.is_err(), "still reading");
        request.upgrade();
        let waited = tokio::time::timeout(TIMEOUTS.idle * 10, stream.read_u8()).await;
        assert!(waited.is_err(), "still reading");
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_stops_reading_loses_its_connection_and_a_slow_one_does_not() {
        let (mut stream, mut far, _) = guarded();
        let reader = tokio::spawn(async move {
            for _ in 0..10 {
                sleep(Duration::from_secs(1)).await;
                far.read_exact(&mut [0; 16]).await.expect("sixteen bytes");
            }
            far
        });
        stream.write_all(&[7; 160]).await.expect("the peer reads some each time");
        let _far = reader.await.expect("the reader");
        let waiting = stream.write_all(&[7; 160]).await.expect_err("the peer has stopped reading");
        assert_eq!(waiting.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn a_gate_stops_reading_until_its_limit_is_raised_or_the_rest_is_dropped() {
        let (near, mut far) = duplex(64);
        let phase = Arc::new(Phase::default());
        phase.start_request().upgrade();
        let gate = ReadGate::default();
        let mut stream = GuardedStream::new(near, TIMEOUTS, phase, (gate.clone(), ()));
        far.write_all(&[7; 32]).await.unwrap();
        gate.set_limit(8);
        let mut read = [0; 8];
        stream.read_exact(&mut read).await.unwrap();
        gate.full().await;
        let second = Duration::from_secs(1);
        assert!(tokio::time::timeout(second, stream.read_u8()).await.is_err(), "the limit is reached");

        gate.on_control_frame(2);
        stream.read_exact(&mut read[..2]).await.unwrap();
        gate.set_limit(10);
        stream.read_exact(&mut read[..2]).await.unwrap();
        gate.on_message();
        stream.read_exact(&mut read).await.unwrap();

        gate.discard();
        drop(far);
        let rest = stream.read(&mut read).await.unwrap();
        assert_eq!(rest, 0, "12 bytes were dropped");
    }
}
