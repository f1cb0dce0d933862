//! Workspaces: life cycle, suspension, activity, usage and the system prompt.

pub mod activity;
pub mod erasure;
pub mod lifecycle;
pub mod prompt;
pub mod suspensions;
pub mod usage;
pub mod usage_rollup;

use crate::{access::tokens::Tokens, core::Core, observers::Observers};

/// Handle of workspaces.
#[derive(Clone)]
pub struct Workspaces {
    pub(crate) core: Core,
    pub(crate) tokens: Tokens,
    pub(crate) observers: Observers,
}
