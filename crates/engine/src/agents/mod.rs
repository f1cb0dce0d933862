//! Agents: life cycle, location and session events. Handle: [`Agents`]. Main types: [`lifecycle::RegisterAgent`],
//! [`bindings::NodeBinding`], [`session_events::RecordedSessionEvent`].

pub mod bindings;
pub mod ended_sessions;
pub(crate) mod last_seen;
pub mod lifecycle;
pub mod session_events;

use std::sync::Arc;

use crate::{
    access::{limits::QuotaCache, tokens::Tokens},
    core::Core,
    mailboxes::Mailboxes,
};

/// Handle of agents.
#[derive(Clone)]
pub struct Agents {
    pub(crate) core: Core,
    pub(crate) tokens: Tokens,
    pub(crate) quotas: QuotaCache,
    pub(crate) mailboxes: Mailboxes,
    pub(crate) seen: Arc<last_seen::LastSeenRecorder>,
}
