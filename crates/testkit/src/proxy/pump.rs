//! One proxied connection: two pumps that obey the control.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;

use super::control::{Control, Mode, State};
use super::nats_messages::NatsMessages;
use super::{Direction, Verdict};

/// How a pump ended.
enum End {
    /// The source closed; pass that on.
    Closed,
    /// Reset both sides.
    Reset,
}

/// Drops a socket with a reset instead of an orderly end.
pub(super) fn reset(socket: TcpStream) {
    let _ = socket.set_zero_linger();
}

pub(super) async fn connection(client: TcpStream, server: TcpStream, control: Arc<Control>) {
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    control.connection_opened();
    let watch = control.watch();
    let generation = watch.borrow().generation;
    let (mut client_read, mut client_write) = client.into_split();
    let (mut server_read, mut server_write) = server.into_split();
    let nats = NatsMessages::default();
    let mut to_server = Pump { direction: Direction::ToServer, control: &control, state: watch.clone(), nats: None };
    let mut to_client =
        Pump { direction: Direction::ToClient, control: &control, state: watch.clone(), nats: Some(nats) };
    let mut resets = watch;
    let reset_asked = async {
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
        () = reset_asked => End::Reset,
    };
    // Neither Postgres nor NATS uses half-closed connections, so one end closing ends both.
    if let (Ok(client), Ok(server)) = (client_read.reunite(client_write), server_read.reunite(server_write))
        && matches!(end, End::Reset)
    {
        reset(client);
        reset(server);
    }
    control.connection_closed();
}

struct Pump<'a> {
    direction: Direction,
    control: &'a Control,
    state: watch::Receiver<State>,
    nats: Option<NatsMessages>,
}

impl Pump<'_> {
    async fn run(&mut self, from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf) -> End {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let length = match from.read(&mut buffer).await {
                Ok(length) => length,
                Err(_) => {
                    self.while_forwarding().await;
                    return End::Reset;
                }
            };
            let latency = self.state.borrow().latency;
            if latency > Duration::ZERO {
                tokio::time::sleep(latency).await;
            }
            self.while_forwarding().await;
            if length == 0 {
                return End::Closed;
            }
            let mut chunk = buffer[..length].to_vec();
            if let Some(nats) = &mut self.nats {
                nats.filter(&mut chunk, |subject| self.control.drops_message(subject));
            }
            let verdict = self.control.filter(self.direction, &mut chunk);
            if matches!(verdict, Verdict::DropThenCut | Verdict::DropThenReset) {
                chunk.clear();
            }
            if to.write_all(&chunk).await.is_err() {
                return End::Reset;
            }
            self.control.count(self.direction, chunk.len());
            match verdict {
                Verdict::Forward => {}
                Verdict::ForwardThenReset | Verdict::DropThenReset => {
                    self.let_it_arrive(verdict).await;
                    return End::Reset;
                }
                Verdict::ForwardThenCut | Verdict::DropThenCut => {
                    // The answer must not slip through while the last bytes arrive.
                    self.control.blackhole();
                    self.let_it_arrive(verdict).await;
                    self.control.cut();
                    return End::Reset;
                }
            }
        }
    }

    /// A reset overtakes bytes that still lie in the receiver's queue, so they get time to be read.
    async fn let_it_arrive(&self, verdict: Verdict) {
        if matches!(verdict, Verdict::ForwardThenCut | Verdict::ForwardThenReset) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn while_forwarding(&mut self) {
        let _ = self.state.wait_for(|state| state.mode != Mode::Blackhole).await;
    }
}
