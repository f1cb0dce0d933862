//! Positions that wait to be acknowledged: one number for each agent, written together.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use tokio::sync::Notify;

/// Acks that were not sent. They outlive a connection.
#[derive(Debug, Default)]
pub(super) struct Acks {
    waiting: Mutex<BTreeMap<String, u64>>,
    /// Notified with the first ack that waits.
    pub(super) arrived: Notify,
}

impl Acks {
    /// Adds a position. A lower one than that which waits has no effect.
    pub(super) fn put(&self, agent: &str, up_to_seq: u64) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let position = waiting.entry(agent.to_owned()).or_default();
        *position = up_to_seq.max(*position);
        drop(waiting);
        self.arrived.notify_one();
    }

    pub(super) fn take(&self) -> BTreeMap<String, u64> {
        std::mem::take(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
