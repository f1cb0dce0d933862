//! Which of the fixed virtual shards an agent's log lives on.

use crate::{AgentId, WorkspaceId};

/// Number of virtual shards. Fixed for ever: subjects carry the shard, streams capture ranges.
pub const SHARDS: u16 = 64;

/// The shard of an agent's mailbox, from 0 to 63.
///
/// FNV-1a over the two ids in big-endian order; the value is part of stored subjects, so it must
/// never depend on the process, the platform or the version.
#[must_use]
pub fn shard_of(workspace: WorkspaceId, agent: AgentId) -> u16 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in workspace.get().to_be_bytes().into_iter().chain(agent.get().to_be_bytes()) {
        hash ^= u64::from(byte);
        hash = hash.wrapping_mul(0x0000_0100_0000_01b3);
    }
    // The high half is mixed best.
    u16::try_from((hash >> 32) % u64::from(SHARDS)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_stable_and_spread() {
        assert_eq!(shard_of(WorkspaceId::new(1), AgentId::new(1)), shard_of(WorkspaceId::new(1), AgentId::new(1)));
        let mut seen = [0u32; SHARDS as usize];
        for agent in 0..6400 {
            seen[usize::from(shard_of(WorkspaceId::new(7), AgentId::new(agent << 12)))] += 1;
        }
        assert!(seen.iter().all(|n| (50..=150).contains(n)), "uneven: {seen:?}");
    }
}
