//! [`Agents`]: the names in use.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use subtle::ConstantTimeEq as _;
use tokio_util::sync::CancellationToken;

use super::{AgentError, AgentHandle};
use crate::metric_names;

/// Running and starting agents by name.
#[derive(Debug, Default)]
pub(crate) struct Agents {
    slots: RwLock<BTreeMap<String, Slot>>,
    /// The broker stops. Changed and read under the lock of the slots, so that a stop misses no start.
    is_closed: AtomicBool,
}

#[derive(Debug)]
enum Slot {
    Starting(Start),
    Running(AgentHandle),
}

/// A start that others may end or wait for. Clones are the same start.
#[derive(Debug, Clone, Default)]
struct Start {
    /// The agent was released before it ran.
    released: CancellationToken,
    /// The agent runs, or the start has failed.
    over: CancellationToken,
}

/// A name that is being used for a start. Dropping it frees the name, unless the agent runs.
#[derive(Debug)]
pub(super) struct Reservation {
    agents: Arc<Agents>,
    name: String,
    start: Start,
}

impl Agents {
    /// Reserves a name, unless the broker stops. `max` is the greatest number of agents, 0 for any.
    pub(super) fn reserve(self: &Arc<Self>, name: &str, max: u32) -> Result<Reservation, AgentError> {
        // Held from the check to the insert, so that of two spawns of a name one is refused.
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(AgentError::Disappeared);
        }
        if slots.contains_key(name) {
            return Err(AgentError::AlreadyExists { name: name.to_owned() });
        }
        if max > 0 && slots.len() >= max as usize {
            return Err(AgentError::CapacityExceeded { max });
        }
        let start = Start::default();
        slots.insert(name.to_owned(), Slot::Starting(start.clone()));
        metrics::gauge!(metric_names::AGENTS).set(slots.len() as f64);
        Ok(Reservation { agents: self.clone(), name: name.to_owned(), start })
    }

    /// Refuses further agents, and returns the names of those that run or start.
    pub(crate) fn close(&self) -> Vec<String> {
        // A read excludes reservations, which write.
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        self.is_closed.store(true, Ordering::Relaxed);
        slots.keys().cloned().collect()
    }

    /// Ends the start of an agent that does not run yet, and waits until it runs all the same or is given up.
    pub(crate) async fn end_start(&self, name: &str) {
        let start = match self.slots.read().unwrap_or_else(PoisonError::into_inner).get(name) {
            // Cloned out of the lock, which the start needs to free its name.
            Some(Slot::Starting(start)) => start.clone(),
            Some(Slot::Running(_)) | None => return,
        };
        start.released.cancel();
        start.over.cancelled().await;
    }

    /// Returns whether an agent of the name runs or starts here.
    pub(crate) fn is_in_use(&self, name: &str) -> bool {
        self.slots.read().unwrap_or_else(PoisonError::into_inner).contains_key(name)
    }

    /// The running agent of a name.
    pub(crate) fn get(&self, name: &str) -> Result<AgentHandle, AgentError> {
        match self.slots.read().unwrap_or_else(PoisonError::into_inner).get(name) {
            Some(Slot::Running(handle)) => Ok(handle.clone()),
            Some(Slot::Starting(_)) | None => Err(AgentError::NotFound { name: name.to_owned() }),
        }
    }

    /// All running agents, by name.
    pub(crate) fn list(&self) -> Vec<AgentHandle> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let running = slots.values().filter_map(|slot| match slot {
            Slot::Running(handle) => Some(handle.clone()),
            Slot::Starting(_) => None,
        });
        running.collect()
    }

    /// The agent that a secret belongs to.
    pub(crate) fn find_by_secret(&self, given: &str, secret: impl Fn(&AgentHandle) -> &str) -> Option<AgentHandle> {
        // Every agent is compared, so that the time says nothing about which one matched.
        let mut found = None;
        for handle in self.list() {
            if bool::from(secret(&handle).as_bytes().ct_eq(given.as_bytes())) {
                found = Some(handle);
            }
        }
        found
    }

    /// Frees the name of an agent that has ended.
    pub(super) fn remove(&self, name: &str) {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        slots.remove(name);
        metrics::gauge!(metric_names::AGENTS).set(slots.len() as f64);
    }
}

impl Reservation {
    /// Cancelled when the agent is released before it runs.
    pub(super) fn released(&self) -> CancellationToken {
        self.start.released.clone()
    }

    /// The agent runs under the name.
    pub(super) fn run(self, handle: AgentHandle) {
        let mut slots = self.agents.slots.write().unwrap_or_else(PoisonError::into_inner);
        // Dropping `self` after this leaves the slot alone and ends the waits for the start.
        slots.insert(self.name.clone(), Slot::Running(handle));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut slots = self.agents.slots.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(slots.get(&self.name), Some(Slot::Starting(_))) {
            slots.remove(&self.name);
            metrics::gauge!(metric_names::AGENTS).set(slots.len() as f64);
        }
        drop(slots);
        self.start.over.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_release_ends_a_start_and_waits_for_it() {
        let agents = Arc::<Agents>::default();
        let reservation = agents.reserve("ada", 0).expect("a free name");
        let released = reservation.released();
        let start = async {
            released.cancelled().await;
            drop(reservation);
        };
        tokio::join!(agents.end_start("ada"), start);
        agents.end_start("ada").await;
        assert!(!agents.is_in_use("ada"));
        let again = agents.reserve("ada", 1).expect("the name is free");
        assert!(agents.is_in_use("ada"));
        drop(again);
    }

    #[tokio::test]
    async fn no_agent_is_missed_when_further_ones_are_refused() {
        let agents = Arc::<Agents>::default();
        let starting = agents.reserve("ada", 0).expect("a free name");
        assert_eq!(agents.close(), ["ada"]);
        for name in ["ada", "bob"] {
            let refused = agents.reserve(name, 0).expect_err("it is closed");
            assert!(matches!(refused, AgentError::Disappeared), "{refused}");
        }
        let released = starting.released();
        let start = async {
            released.cancelled().await;
            drop(starting);
        };
        tokio::join!(agents.end_start("ada"), start);
        assert!(agents.close().is_empty());
    }
}
