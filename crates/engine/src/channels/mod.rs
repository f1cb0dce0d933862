//! Channels, conversations and the audiences that sends are resolved from. Handle: [`Channels`]; snapshots of members:
//! `audiences::Audiences`.

pub mod all_conversations;
pub(crate) mod audiences;
pub mod conversations;
pub mod lifecycle;

use crate::{access::limits::QuotaCache, agents::Agents, core::Core};

/// Handle of channels and conversations.
#[derive(Clone)]
pub struct Channels {
    pub(crate) core: Core,
    pub(crate) quotas: QuotaCache,
    pub(crate) agents: Agents,
}
