//! Workspaces: families ([`family`]), plans with their limits ([`plan`]), rate limits ([`rate_limit`]) and the rules of
//! their metadata ([`metadata`]). Used by the engine's limits and by the store.

pub mod family;
pub mod metadata;
pub mod plan;
pub mod rate_limit;
