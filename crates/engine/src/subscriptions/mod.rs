//! Event subscriptions: their definitions, the matching of events, and the leases under which a worker serves them.
//! Main types: [`Subscriptions`] and [`Lease`]. The worker's dispatcher makes the calls.

pub mod definitions;
mod matching;
mod readers;
mod worker;

use std::sync::Arc;

pub use worker::{EventsMatched, Lease, LeasedSubscription};

use crate::{
    access::{limits::QuotaCache, secrets::Secrets},
    core::Core,
};

/// Event subscriptions of all workspaces.
#[derive(Clone)]
pub struct Subscriptions {
    pub(crate) core: Core,
    pub(crate) quotas: QuotaCache,
    pub(crate) secrets: Arc<Secrets>,
    pub(crate) egress: relay_egress::Client,
}
