//! Workspaces: life cycle, suspension, activity, usage and the system prompt.

pub mod activity;
pub mod erasure;
pub mod lifecycle;
pub mod prompt;
pub(crate) mod suspensions;
pub mod usage;
pub mod usage_rollup;
