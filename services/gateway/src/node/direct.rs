//! The agents on their own nodes, who are told what happens in their workspace.

use std::collections::HashSet;

use relay_domain::AgentId;

/// Frames a second that one workspace's own events cost here, each for one of its direct nodes. More are dropped:
/// they are best-effort, and no client needs them.
const NOTICES_PER_SECOND: usize = 20_000;

/// A workspace's agents on their own nodes.
#[derive(Debug, Default)]
pub(super) struct DirectAgents {
    pub(super) agents: HashSet<AgentId>,
    /// The second in which they were last told something of their workspace, and how many were in it.
    second: u64,
    told: usize,
}

impl DirectAgents {
    /// Who is told one thing more in this second: all, or nobody. Thousands that come back at once must not be
    /// told of each other; one thing a second always is.
    pub(super) fn told_in(&mut self, second: u64) -> impl Iterator<Item = &AgentId> {
        if self.second != second {
            (self.second, self.told) = (second, 0);
        }
        let first = self.told == 0;
        self.told += self.agents.len();
        let may = first || self.told <= NOTICES_PER_SECOND;
        if !may {
            metrics::counter!(relay_domain::metric_names::NOTICES_DROPPED).increment(1);
        }
        self.agents.iter().filter(move |_| may)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_is_told_a_bounded_number_of_things_a_second() {
        let mut direct = DirectAgents::default();
        direct.agents.extend((1..=5000).map(AgentId::new));
        let told: usize = (0..10).map(|_| direct.told_in(7).count()).sum();
        assert_eq!(told, NOTICES_PER_SECOND);
        assert_eq!(direct.told_in(8).count(), 5000, "the next second is another");
    }
}
