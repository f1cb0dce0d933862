//! Invocations on their way out: each is written once per connection and try, however often it is heard of.

use std::collections::{HashSet, VecDeque};

use relay_domain::InvocationId;
use relay_engine::actions::{Delivered, InvokeFrame};

use super::connection::Connection;

/// Tries that a connection remembers. What it has forgotten is noted in the store long since.
const REMEMBERED: usize = 4096;

/// What a connection was told to do.
#[derive(Debug, Default)]
pub(super) struct Invoked {
    known: HashSet<(InvocationId, i32)>,
    order: VecDeque<(InvocationId, i32)>,
}

impl Invoked {
    /// Remembers a try; false when it was known.
    fn is_new(&mut self, invocation: InvocationId, attempt: i32) -> bool {
        if !self.known.insert((invocation, attempt)) {
            return false;
        }
        self.order.push_back((invocation, attempt));
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        true
    }
}

impl Connection {
    /// Writes an invocation, unless the peer takes nothing now: then the next look finds it. One that the peer has is only
    /// noted once more: somebody has found it without its note.
    pub(super) fn on_invoke(&mut self, invocation: &InvokeFrame) {
        let Some(bound) = &self.bound else { return };
        let fence = &bound.fence;
        let here = fence.scope == invocation.scope
            && fence.node_id == invocation.node_id
            && fence.provider == invocation.provider;
        if !here || self.outbound.is_full() {
            return;
        }
        if self.invoked.is_new(invocation.invocation, invocation.attempt) {
            self.outbound.text(invocation.text.clone().into());
            metrics::counter!(relay_domain::metric_names::INVOCATIONS_SENT).increment(1);
        }
        self.state.engine.invocation_sent(Delivered {
            scope: fence.scope,
            invocation_id: invocation.invocation,
            attempt: invocation.attempt,
            node_id: fence.node_id.clone(),
            provider: fence.provider.clone(),
            epoch: fence.epoch,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_try_is_new_once_and_what_is_remembered_is_bounded() {
        let mut invoked = Invoked::default();
        assert!(invoked.is_new(InvocationId::new(1), 1));
        assert!(!invoked.is_new(InvocationId::new(1), 1));
        assert!(invoked.is_new(InvocationId::new(1), 2));
        (2..10_000).for_each(|id| assert!(invoked.is_new(InvocationId::new(id), 1)));
        assert_eq!((invoked.known.len(), invoked.order.len()), (REMEMBERED, REMEMBERED));
    }
}
