//! [`KnownIds`]: ids of messages that came already, so that a repeated one is not taken again.

use std::collections::{HashSet, VecDeque};

/// Message ids remembered for one agent.
const REMEMBERED: usize = 512;

/// The newest message ids.
#[derive(Debug, Default)]
pub(super) struct KnownIds {
    ids: HashSet<String>,
    order: VecDeque<String>,
}

impl KnownIds {
    pub(super) fn contains(&self, id: &str) -> bool {
        self.ids.contains(id)
    }

    /// Returns `false` if the id is known.
    pub(super) fn insert(&mut self, id: &str) -> bool {
        if !self.ids.insert(id.to_owned()) {
            return false;
        }
        self.order.push_back(id.to_owned());
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        true
    }
}
