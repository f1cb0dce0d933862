//! [`Runners`]: the connected runner, its handlers and its calls.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde_json::Value;
use tokio::{
    sync::{oneshot, watch},
    time::{Duration, sleep},
};
use tokio_util::sync::CancellationToken;

use super::{outbox::Outbox, supervisor::Supervisor};
use crate::{api::types::runner_frame, insight::count_dropped};

/// Calls in flight.
const MAX_CALLS: usize = 256;

/// End of a call: output or error.
pub(crate) type CallOutcome = Result<Value, String>;

/// The one runner.
#[derive(Debug, Default)]
pub(crate) struct Runners {
    state: Mutex<State>,
    is_present: watch::Sender<bool>,
    pub(crate) supervisor: Supervisor,
}

#[derive(Debug, Default)]
struct State {
    connection: Option<Connection>,
    next_id: u64,
    handlers: HashSet<String>,
    calls: HashMap<String, Call>,
}

#[derive(Debug)]
struct Connection {
    id: u64,
    outbox: Outbox,
    superseded: CancellationToken,
}

#[derive(Debug)]
struct Call {
    is_spawn: bool,
    outcome: oneshot::Sender<CallOutcome>,
}

impl Runners {
    /// A runner has connected; an earlier one is superseded and its calls fail. Returns the id of the connection.
    pub(super) fn connect(&self, outbox: Outbox, superseded: CancellationToken) -> u64 {
        let mut state = self.lock();
        state.next_id += 1;
        let id = state.next_id;
        if let Some(earlier) = state.connection.replace(Connection { id, outbox, superseded }) {
            earlier.superseded.cancel();
        }
        // Dropped senders are read as unavailable handlers.
        state.calls.clear();
        state.handlers.clear();
        self.is_present.send_replace(true);
        id
    }

    /// A connection has ended. Returns whether it was the current one.
    pub(super) fn disconnect(&self, id: u64) -> bool {
        let mut state = self.lock();
        let is_current = state.connection.as_ref().is_some_and(|connection| connection.id == id);
        if is_current {
            // The counter stays, so that an id never names two connections.
            *state = State { next_id: state.next_id, ..State::default() };
            self.is_present.send_replace(false);
        }
        is_current
    }

    /// Frames that wait for the runner.
    pub(crate) fn waiting_frames(&self) -> usize {
        self.lock().connection.as_ref().map_or(0, |connection| connection.outbox.waiting())
    }

    /// Ends all calls in flight.
    pub(super) fn fail_calls(&self) {
        self.lock().calls.clear();
    }

    /// Replaces the handlers of a connection. Returns whether there are any.
    pub(super) fn set_handlers(&self, id: u64, names: &[String]) -> bool {
        let mut state = self.lock();
        // A request of a superseded connection may still be at work.
        if state.connection.as_ref().is_some_and(|connection| connection.id == id) {
            let names = names.iter().map(|name| name.trim()).filter(|name| !name.is_empty());
            state.handlers = names.map(str::to_owned).collect();
        }
        !state.handlers.is_empty()
    }

    /// Waits for a time. `false` as soon as a runner is connected.
    pub(super) async fn stays_absent(&self, time: Duration) -> bool {
        let mut is_present = self.is_present.subscribe();
        tokio::select! {
            () = sleep(time) => true,
            // The sender is in `self`, so the channel is open.
            _ = is_present.wait_for(|is_present| *is_present) => false,
        }
    }

    /// Waits until no runner has been connected for a time.
    pub(super) async fn wait_absent(&self, time: Duration) {
        let mut is_present = self.is_present.subscribe();
        loop {
            // The sender is in `self`, so the channel is open.
            let _ = is_present.wait_for(|is_present| !is_present).await;
            tokio::select! {
                () = sleep(time) => return,
                _ = is_present.wait_for(|is_present| *is_present) => {}
            }
        }
    }

    pub(crate) fn has_handler(&self, name: &str) -> bool {
        self.lock().handlers.contains(name)
    }

    /// Calls a handler. `None` if there is none of that name, or too many calls are in flight.
    pub(crate) fn call(
        &self,
        invocation_id: &str,
        name: &str,
        input: &Value,
    ) -> Option<oneshot::Receiver<CallOutcome>> {
        let mut state = self.lock();
        let may_call = state.handlers.contains(name) && state.calls.len() < MAX_CALLS;
        let connection = state.connection.as_ref().filter(|_| may_call)?;
        // The lock is held until the call is entered below: its result may come at once.
        if !connection.outbox.try_send(runner_frame::invoke_handler(invocation_id, name, input)) {
            count_dropped("runner");
            return None;
        }
        let (outcome, receiver) = oneshot::channel();
        let is_spawn = name == "spawn" || name.starts_with("spawn:");
        state.calls.insert(invocation_id.to_owned(), Call { is_spawn, outcome });
        Some(receiver)
    }

    /// A call is not waited for any more.
    pub(crate) fn cancel(&self, invocation_id: &str, reason: &str) {
        let mut state = self.lock();
        state.calls.remove(invocation_id);
        if let Some(connection) = &state.connection {
            // A runner that reads nothing learns of it by its late result.
            let _ = connection.outbox.try_send(runner_frame::cancel_handler(invocation_id, reason));
        }
    }

    /// Returns whether calls are in flight.
    pub(super) fn is_busy(&self) -> bool {
        !self.lock().calls.is_empty()
    }

    /// Takes the result of a call. `false` if it is not in flight.
    pub(super) fn complete(&self, invocation_id: &str, outcome: CallOutcome) -> bool {
        match self.lock().calls.remove(invocation_id) {
            Some(call) => call.outcome.send(outcome).is_ok(),
            None => false,
        }
    }

    /// The spawn that an agent without an invocation belongs to: the only one in flight.
    pub(super) fn only_spawn(&self) -> Option<String> {
        let state = self.lock();
        let mut spawns = state.calls.iter().filter(|(_, call)| call.is_spawn).map(|(id, _)| id.clone());
        let only = spawns.next();
        only.filter(|_| spawns.next().is_none())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_new_runner_takes_over_and_calls_of_the_old_one_fail() {
        let runners = Runners::default();
        let (outbox, mut frames) = Outbox::new();
        let superseded = CancellationToken::new();
        let first = runners.connect(outbox, superseded.clone());
        assert!(runners.set_handlers(first, &[" build ".into(), String::new(), "spawn:x".into()]));
        assert!(runners.call("inv_0", "other", &Value::Null).is_none());
        let mut build = runners.call("inv_1", "build", &json!({})).expect("a call");
        let _spawn = runners.call("inv_2", "spawn:x", &json!({})).expect("a call");
        assert!(frames.try_recv().is_ok_and(|frame| frame.text.contains("inv_1")));
        assert_eq!(runners.only_spawn().as_deref(), Some("inv_2"));
        assert!(runners.complete("inv_1", Ok(json!(1))) && !runners.complete("inv_1", Ok(json!(2))));
        assert_eq!(build.try_recv(), Ok(Ok(json!(1))));

        let mut lost = runners.call("inv_3", "build", &json!({})).expect("a call");
        let (outbox, _frames) = Outbox::new();
        runners.connect(outbox, CancellationToken::new());
        assert!(superseded.is_cancelled() && lost.try_recv().is_err());
        assert!(!runners.has_handler("build") && !runners.disconnect(first));
    }

    #[tokio::test(start_paused = true)]
    async fn a_runner_is_absent_only_if_none_connected_meanwhile() {
        let minute = Duration::from_secs(60);
        let runners = Runners::default();
        assert!(runners.stays_absent(minute).await);
        let connect = async {
            sleep(minute / 2).await;
            let (outbox, _frames) = Outbox::new();
            let id = runners.connect(outbox, CancellationToken::new());
            sleep(minute / 4).await;
            runners.disconnect(id);
        };
        let (is_gone, ()) = tokio::join!(runners.stays_absent(minute), connect);
        assert!(!is_gone);
    }

    #[test]
    fn an_agent_belongs_to_the_only_spawn_also_to_a_bare_one() {
        let runners = Runners::default();
        let (outbox, _frames) = Outbox::new();
        let id = runners.connect(outbox, CancellationToken::new());
        runners.set_handlers(id, &["spawn".into(), "spawned".into()]);
        let _other = runners.call("inv_1", "spawned", &Value::Null).expect("a call");
        let _spawn = runners.call("inv_2", "spawn", &Value::Null).expect("a call");
        assert_eq!(runners.only_spawn().as_deref(), Some("inv_2"));
    }
}
