//! Settings of a proxy, shared with its connections.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::{ConnectionId, Direction, Verdict};

pub(super) type Filter = Box<dyn FnMut(ConnectionId, &mut Vec<u8>) -> Verdict + Send>;
pub(super) type NatsRule = Box<dyn FnMut(&str) -> bool + Send>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Mode {
    #[default]
    Forward,
    Blackhole,
    Cut,
    Closed,
}

/// State that every connection watches: a change of `generation` resets it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct State {
    pub(super) mode: Mode,
    pub(super) generation: u64,
    pub(super) latency: Duration,
}

#[derive(Default)]
struct Rules {
    to_server: Option<Filter>,
    to_client: Option<Filter>,
    nats: Option<NatsRule>,
}

#[derive(Default)]
pub(super) struct Control {
    state: watch::Sender<State>,
    rules: Mutex<Rules>,
    connections: AtomicUsize,
    next_connection: AtomicU64,
    to_server_bytes: AtomicU64,
    to_client_bytes: AtomicU64,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("state", &*self.state.borrow()).finish_non_exhaustive()
    }
}

impl Control {
    pub(super) fn watch(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    pub(super) fn generation(&self) -> u64 {
        self.state.borrow().generation
    }

    pub(super) fn refuses(&self) -> bool {
        matches!(self.state.borrow().mode, Mode::Cut | Mode::Closed)
    }

    pub(super) fn cut(&self) {
        self.state.send_modify(|state| {
            state.mode = Mode::Cut;
            state.generation += 1;
        });
    }

    pub(super) fn close(&self) {
        self.state.send_modify(|state| {
            state.mode = Mode::Closed;
            state.generation += 1;
        });
    }

    pub(super) async fn closed(&self) {
        // Cannot fail: the sender is a field of `self`.
        let _ = self.watch().wait_for(|state| state.mode == Mode::Closed).await;
    }

    pub(super) fn reset_all(&self) {
        self.state.send_modify(|state| state.generation += 1);
    }

    pub(super) fn blackhole(&self) {
        self.state.send_modify(|state| state.mode = Mode::Blackhole);
    }

    pub(super) fn set_latency(&self, latency: Duration) {
        self.state.send_modify(|state| state.latency = latency);
    }

    pub(super) fn restore(&self) {
        // The rules first: the chunks that a blackhole held back pass on with the change of mode, and would meet them.
        *self.rules() = Rules::default();
        self.state.send_modify(|state| {
            state.mode = Mode::Forward;
            state.latency = Duration::ZERO;
        });
    }

    pub(super) fn set_filter(&self, direction: Direction, filter: Option<Filter>) {
        let mut rules = self.rules();
        match direction {
            Direction::ToServer => rules.to_server = filter,
            Direction::ToClient => rules.to_client = filter,
        }
    }

    pub(super) fn set_nats_rule(&self, rule: Option<NatsRule>) {
        self.rules().nats = rule;
    }

    /// Runs the filter of `direction` on a chunk of `connection`.
    pub(super) fn filter(&self, direction: Direction, connection: ConnectionId, chunk: &mut Vec<u8>) -> Verdict {
        // Held while the filter runs, so that the connections take turns with its state.
        let mut rules = self.rules();
        let filter = match direction {
            Direction::ToServer => &mut rules.to_server,
            Direction::ToClient => &mut rules.to_client,
        };
        filter.as_mut().map_or(Verdict::Forward, |filter| filter(connection, chunk))
    }

    /// Returns whether the NATS rule drops a message on `subject`.
    pub(super) fn drops_message(&self, subject: &str) -> bool {
        self.rules().nats.as_mut().is_some_and(|drops| drops(subject))
    }

    pub(super) fn connection_opened(&self) -> ConnectionId {
        self.connections.fetch_add(1, Ordering::Relaxed);
        ConnectionId(self.next_connection.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn connection_closed(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn connection_count(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    pub(super) fn count(&self, direction: Direction, bytes: usize) {
        self.counter(direction).fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn forwarded_bytes(&self, direction: Direction) -> u64 {
        self.counter(direction).load(Ordering::Relaxed)
    }

    fn counter(&self, direction: Direction) -> &AtomicU64 {
        match direction {
            Direction::ToServer => &self.to_server_bytes,
            Direction::ToClient => &self.to_client_bytes,
        }
    }

    fn rules(&self) -> MutexGuard<'_, Rules> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
