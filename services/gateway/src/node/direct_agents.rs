//! Agents on their own nodes, which receive workspace-wide notices, and the rate limit of those notices.
//!
//! Used by `notices` for hints that name no agents.

use std::collections::HashSet;

use relay_domain::AgentId;

/// Notice frames per second for one workspace on this gateway. More are dropped: they are best-effort, and no client
/// depends on them.
const NOTICES_PER_SECOND: usize = 20_000;

/// Direct agents of one workspace.
#[derive(Debug, Default)]
pub(super) struct DirectAgents {
    pub(super) agents: HashSet<AgentId>,
    /// Second of the last notice, and frames sent in it.
    second: u64,
    sent_count: usize,
}

impl DirectAgents {
    /// Returns the recipients of one more notice in this second: all agents or none. The first notice of a second
    /// always passes; the limit keeps thousands of simultaneous reconnects from notifying each other.
    pub(super) fn recipients_in(&mut self, second: u64) -> impl Iterator<Item = &AgentId> {
        if self.second != second {
            (self.second, self.sent_count) = (second, 0);
        }
        let first = self.sent_count == 0;
        self.sent_count += self.agents.len();
        let within_limit = first || self.sent_count <= NOTICES_PER_SECOND;
        if !within_limit {
            metrics::counter!(relay_domain::metric_names::NOTICES_DROPPED).increment(1);
        }
        self.agents.iter().filter(move |_| within_limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_to_many_direct_agents_are_limited_per_second() {
        let mut direct = DirectAgents::default();
        direct.agents.extend((1..=5000).map(AgentId::new));
        let sent_count: usize = (0..10).map(|_| direct.recipients_in(7).count()).sum();
        assert_eq!(sent_count, NOTICES_PER_SECOND);
        assert_eq!(direct.recipients_in(8).count(), 5000, "the next second has its own limit");
    }
}
