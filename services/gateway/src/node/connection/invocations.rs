//! Invocations written to a connection: each attempt is written once per connection, however often it is reported.

use std::collections::{HashSet, VecDeque};

use relay_domain::InvocationId;
use relay_engine::actions::{InvokeFrame, SentInvocation};

use super::{effects::Effect, state::ConnectionState};

/// Attempts remembered per connection. By the time one is forgotten, storage has recorded it as sent.
const MAX_REMEMBERED: usize = 4096;

/// Attempts written to one connection, oldest first.
#[derive(Debug, Default)]
pub(super) struct SentInvocations {
    attempts: HashSet<(InvocationId, i32)>,
    order: VecDeque<(InvocationId, i32)>,
}

impl SentInvocations {
    /// Remembers an attempt. Returns false if it is already known.
    fn insert(&mut self, invocation: InvocationId, attempt: i32) -> bool {
        if !self.attempts.insert((invocation, attempt)) {
            return false;
        }
        self.order.push_back((invocation, attempt));
        if self.order.len() > MAX_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.attempts.remove(&oldest);
        }
        true
    }
}

impl ConnectionState {
    /// Writes an invocation. With a full queue nothing happens: the next scan finds it. An attempt that was written
    /// before is only recorded again, because the scan found it without its record.
    pub(super) fn on_invoke(&mut self, invocation: &InvokeFrame) {
        let Some(binding) = &self.binding else { return };
        let fence = &binding.fence;
        let here = fence.scope == invocation.scope
            && fence.node_id == invocation.node_id
            && fence.provider == invocation.provider;
        if !here || self.conditions.room.is_empty() {
            return;
        }
        let sent = SentInvocation {
            scope: fence.scope,
            invocation_id: invocation.invocation,
            attempt: invocation.attempt,
            node_id: fence.node_id.clone(),
            provider: fence.provider.clone(),
            epoch: fence.epoch,
            written_at: self.now(),
        };
        if self.sent_invocations.insert(invocation.invocation, invocation.attempt) {
            self.send_text(invocation.text.clone());
            self.emit(Effect::Count(relay_domain::metric_names::INVOCATIONS_SENT));
        }
        self.emit(Effect::InvocationSent(Box::new(sent)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_inserted_once_and_memory_is_bounded() {
        let mut sent = SentInvocations::default();
        assert!(sent.insert(InvocationId::new(1), 1));
        assert!(!sent.insert(InvocationId::new(1), 1));
        assert!(sent.insert(InvocationId::new(1), 2));
        (2..10_000).for_each(|id| assert!(sent.insert(InvocationId::new(id), 1)));
        assert_eq!((sent.attempts.len(), sent.order.len()), (MAX_REMEMBERED, MAX_REMEMBERED));
    }
}
