//! Which of the fixed virtual shards an agent's log lives on.

use crate::{AgentId, WorkspaceId};

/// Number of virtual shards. Fixed for ever: subjects carry the shard, streams capture ranges.
pub const SHARDS: u16 = 64;

/// The shard of an agent's mailbox, from 0 to 63.
///
/// Mixes the two ids (the finaliser of MurmurHash3). The value is part of stored subjects, so it must
/// never depend on the process, the platform or the version.
#[must_use]
pub fn shard_of(workspace: WorkspaceId, agent: AgentId) -> u16 {
    let mut hash = mix(workspace.get().cast_unsigned()) ^ agent.get().cast_unsigned();
    hash = mix(hash);
    u16::try_from(hash % u64::from(SHARDS)).unwrap_or(0)
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
    fn shards_are_stable_and_spread() {
        assert_eq!(shard_of(WorkspaceId::new(1), AgentId::new(1)), shard_of(WorkspaceId::new(1), AgentId::new(1)));
        let mut seen = [0u32; SHARDS as usize];
        for agent in 0..6400 {
            seen[usize::from(shard_of(WorkspaceId::new(7), AgentId::new(agent << 12)))] += 1;
        }
        assert!(seen.iter().all(|n| (50..=150).contains(n)), "uneven: {seen:?}");
    }
}
