//! Nodes: enrolment and roster, provider connections, and node kinds. Handle: [`Nodes`]. Main types:
//! [`providers::Registrant`], a connection that registers, and [`roster::NodeList`].

pub(crate) mod direct_registrations;
pub(crate) mod heartbeats;
pub(crate) mod kinds;
mod lookup;
pub(crate) mod online;
pub mod providers;
pub mod roster;
pub(crate) mod settings;
pub mod silence;

use std::{sync::Arc, time::Duration};

use relay_domain::{WorkspaceId, WorkspaceScope};
use relay_stream::Stream;
use relay_tasks::batches::BatchSender;

use crate::{
    access::{limits::QuotaCache, secrets::Secrets, tokens::Tokens},
    agents::Agents,
    core::Core,
};

pub use crate::fair_permits::FairPermit;

/// Bound of the repetitions after a lost race. Each of them means that another request changed the same node, provider
/// or agent within milliseconds.
const MAX_RACES: usize = 10;

/// Handle of nodes and their providers.
#[derive(Clone)]
pub struct Nodes {
    pub(crate) core: Core,
    pub(crate) tokens: Tokens,
    pub(crate) quotas: QuotaCache,
    pub(crate) agents: Agents,
    pub(crate) secrets: Arc<Secrets>,
    pub(crate) egress: relay_egress::Client,
    pub(crate) stream: Stream,
    pub(crate) heartbeats: Arc<heartbeats::Heartbeats>,
    pub(crate) registrations: Arc<BatchSender<direct_registrations::RegisterRequest, WorkspaceId>>,
    pub(crate) online: Arc<BatchSender<online::OnlineRequest, WorkspaceId>>,
}

impl Nodes {
    /// Waits for the permit for a control frame, which executes statements of its own. There is no limit: the frames
    /// behind it wait with it, and all of them end with their connection.
    pub async fn acquire_frame_permit(&self, scope: WorkspaceScope) -> Option<FairPermit> {
        self.core.acquire_single_request_permit(scope, Duration::MAX).await.ok()
    }
}
