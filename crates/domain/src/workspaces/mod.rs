//! Workspaces: plans with their limits ([`plan`]) and rate limits ([`rate_limit`]). Used by the engine's limits and by
//! the store.

pub mod plan;
pub mod rate_limit;
