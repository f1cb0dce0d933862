//! Proxied connection: two pumps that apply the settings.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;

use super::control::{Control, Mode, State};
use super::nats_messages::NatsMessages;
use super::{ConnectionId, Direction, Verdict};

/// Bound of the wait for an answer that shows that the last bytes were read. Bytes that end inside a message get none.
const ANSWER_WAIT: Duration = Duration::from_secs(2);
/// Time for a client to read its last bytes; a client does not answer.
const CLIENT_WAIT: Duration = Duration::from_millis(50);

/// Reason for the end of a pump.
enum End {
    /// The source closed; close the destination.
    Closed,
    /// Reset both sides.
    Reset,
}

/// Closes a socket with a reset instead of a FIN.
pub(super) fn reset(socket: TcpStream) {
    let _ = socket.set_zero_linger();
}

/// Forwards between the two sockets. `generation` is that of the settings when the client was accepted.
pub(super) async fn run_connection(client: TcpStream, server: TcpStream, control: Arc<Control>, generation: u64) {
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let id = control.connection_opened();
    let watch = control.watch();
    let (mut client_read, mut client_write) = client.into_split();
    let (mut server_read, mut server_write) = server.into_split();
    let nats = NatsMessages::default();
    let answers = watch::Sender::new(0);
    let pump =
        |direction, nats| Pump { id, direction, control: &control, state: watch.clone(), answers: &answers, nats };
    let mut to_server = pump(Direction::ToServer, None);
    let mut to_client = pump(Direction::ToClient, Some(nats));
    let mut resets = watch.clone();
    let reset_requested = async {
        let _ = resets.wait_for(|state| state.generation != generation).await;
    };
    let both = async {
        tokio::select! {
            end = to_server.run(&mut client_read, &mut server_write) => end,
            end = to_client.run(&mut server_read, &mut client_write) => end,
        }
    };
    let end = tokio::select! {
        end = both => end,
        () = reset_requested => End::Reset,
    };
    // Neither Postgres nor NATS uses half-closed connections, so either end closes both.
    if let (Ok(client), Ok(server)) = (client_read.reunite(client_write), server_read.reunite(server_write))
        && matches!(end, End::Reset)
    {
        reset(client);
        reset(server);
    }
    control.connection_closed();
}

struct Pump<'a> {
    id: ConnectionId,
    direction: Direction,
    control: &'a Control,
    state: watch::Receiver<State>,
    /// Number of reads from the server.
    answers: &'a watch::Sender<u64>,
    nats: Option<NatsMessages>,
}

impl Pump<'_> {
    async fn run(&mut self, from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf) -> End {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let length = match from.read(&mut buffer).await {
                Ok(length) => length,
                Err(_) => {
                    self.wait_while_blackholed().await;
                    return End::Reset;
                }
            };
            if self.direction == Direction::ToClient {
                // Counted before a blackhole holds it back: `wait_for_receiver` waits for an answer that must not pass.
                self.answers.send_modify(|count| *count += 1);
            }
            let latency = self.state.borrow().latency;
            if latency > Duration::ZERO {
                tokio::time::sleep(latency).await;
            }
            self.wait_while_blackholed().await;
            if length == 0 {
                return End::Closed;
            }
            if self.control.refuses() {
                // Cut while this chunk was held back.
                return End::Reset;
            }
            let mut chunk = buffer[..length].to_vec();
            if let Some(nats) = &mut self.nats {
                nats.filter(&mut chunk, |subject| self.control.drops_message(subject));
            }
            let verdict = self.control.filter(self.direction, self.id, &mut chunk);
            // Before the write: the answer may come before this pump begins to wait for it.
            let mut answers = self.answers.subscribe();
            match verdict {
                Verdict::Forward => {}
                // Before the write: the answer must not pass.
                Verdict::ForwardThenCut => self.control.blackhole(),
                Verdict::DropThenCut => {
                    self.control.cut();
                    return End::Reset;
                }
                Verdict::DropThenReset => return End::Reset,
                Verdict::DropThenStall => return std::future::pending().await,
            }
            if to.write_all(&chunk).await.is_err() {
                return End::Reset;
            }
            self.control.count(self.direction, chunk.len());
            if verdict == Verdict::ForwardThenCut {
                self.wait_for_receiver(&mut answers).await;
                self.control.cut();
                return End::Reset;
            }
        }
    }

    /// Waits until the receiver has read the last bytes: a reset discards those in its queue. A server shows it by its
    /// answer.
    async fn wait_for_receiver(&self, answers: &mut watch::Receiver<u64>) {
        match self.direction {
            Direction::ToServer => drop(tokio::time::timeout(ANSWER_WAIT, answers.changed()).await),
            Direction::ToClient => tokio::time::sleep(CLIENT_WAIT).await,
        }
    }

    async fn wait_while_blackholed(&mut self) {
        let _ = self.state.wait_for(|state| state.mode != Mode::Blackhole).await;
    }
}
