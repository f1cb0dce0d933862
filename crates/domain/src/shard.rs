//! Virtual shards of logs, and the assignment of nodes to polling turns.

use crate::{AgentId, NodeId, WorkspaceId};

/// Number of virtual shards. Fixed forever: subjects contain the shard, streams capture ranges.
pub const SHARDS: u16 = 64;

/// Returns the shard of an agent's mailbox, from 0 to 63.
///
/// Mixes the two ids (the finaliser of MurmurHash3). The value is part of stored subjects, so it must never depend on
/// the process, the platform or the version.
#[must_use]
pub fn agent_shard(workspace: WorkspaceId, agent: AgentId) -> u16 {
    let mut hash = mix(workspace.get().cast_unsigned()) ^ agent.get().cast_unsigned();
    hash = mix(hash);
    // Cannot fail: the remainder is below `SHARDS`.
    u16::try_from(hash % u64::from(SHARDS)).unwrap_or(0)
}

/// Returns the shard of a workspace's event log, from 0 to 63. Stable like [`agent_shard`].
#[must_use]
pub fn workspace_shard(workspace: WorkspaceId) -> u16 {
    // Cannot fail: the remainder is below `SHARDS`.
    u16::try_from(mix(workspace.get().cast_unsigned()) % u64::from(SHARDS)).unwrap_or(0)
}

/// Returns the turn, from 0 to `turns` - 1, that a node falls to. The result is the same in all processes and versions,
/// so processes that receive the same hint agree on the turn without coordination.
#[must_use]
pub fn node_turn(workspace: WorkspaceId, node: &NodeId, turns: usize) -> usize {
    let hash =
        node.as_str().bytes().fold(mix(workspace.get().cast_unsigned()), |hash, byte| mix(hash ^ u64::from(byte)));
    // Cannot fail: the remainder is below `turns`.
    usize::try_from(hash % turns.max(1) as u64).unwrap_or(0)
}

const fn mix(mut bits: u64) -> u64 {
    bits ^= bits >> 33;
    bits = bits.wrapping_mul(0xff51_afd7_ed55_8ccd);
    bits ^= bits >> 33;
    bits = bits.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    bits ^ (bits >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_stable_and_spread() {
        let turn = |node: u32, turns| node_turn(WorkspaceId::new(7), &NodeId::new(format!("node-{node}")), turns);
        assert_eq!((turn(0, 5), turn(1, 5), turn(2, 5)), (2, 0, 3), "old versions know these too");
        assert_eq!((turn(1, 0), turn(1, 1)), (0, 0));
        let mut seen = [0u32; 5];
        (0..1000).for_each(|node| seen[turn(node, 5)] += 1);
        assert!(seen.iter().all(|n| (150..=250).contains(n)), "uneven: {seen:?}");
    }

    #[test]
    fn shards_are_stable_and_spread() {
        assert_eq!(
            agent_shard(WorkspaceId::new(1), AgentId::new(1)),
            agent_shard(WorkspaceId::new(1), AgentId::new(1))
        );
        let mut seen = [0u32; SHARDS as usize];
        for agent in 0..6400 {
            seen[usize::from(agent_shard(WorkspaceId::new(7), AgentId::new(agent << 12)))] += 1;
        }
        assert!(seen.iter().all(|n| (50..=150).contains(n)), "uneven: {seen:?}");
    }
}
