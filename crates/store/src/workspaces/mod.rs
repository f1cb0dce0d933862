//! Workspaces: rows, quotas, rate limits, suspensions, statistics and usage figures. Called by the folders of the same
//! name in the engine, by its access layer and by worker loops. Main types: `NewWorkspace` with `WorkspaceCreation`,
//! `EffectiveLimits`, `RateLimitGrant`, `SuspensionRows`.

pub mod activity;
pub(crate) mod lifecycle;
pub(crate) mod quota_counts;
pub(crate) mod quotas;
pub(crate) mod rate_limits;
pub mod statistics;
pub mod suspensions;
pub mod usage;
