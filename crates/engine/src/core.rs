//! [`Core`]: what the handles of all nouns share.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use chrono::{DateTime, Utc};
use relay_domain::{GatewayId, WorkspaceScope, workspaces::family::FamilyId};
use relay_store::Store;
use relay_tasks::byte_budget::ByteBudget;
use tokio::sync::mpsc;

use crate::{
    EngineError, EngineResult, IdSource,
    access::refusals::RefusalLog,
    events::announcement::Announcement,
    fair_permits::{FairPermit, FairPermits},
    hints::Hints,
    id_source::WorkerNumber,
    workspaces::families::Families,
};

/// Storage, ids, the clock, hints, announcements and shared bounds. Cheap to clone; all clones share their state.
#[derive(Clone)]
pub(crate) struct Core {
    pub(crate) store: Store,
    pub(crate) ids: Arc<IdSource>,
    pub(crate) hints: Arc<Hints>,
    pub(crate) announcer: mpsc::Sender<Announcement>,
    pub(crate) refusals: Arc<RefusalLog>,
    pub(crate) families: Families,
    /// Memory for the contents of deliveries that are read from storage.
    pub(crate) bodies: ByteBudget<FamilyId>,
    /// Memory for message bodies in answers to clients, until they are sent.
    pub(crate) answers: ByteBudget<FamilyId>,
    pub(crate) worker_number: Arc<WorkerNumber>,
    /// Set once this process is a gateway.
    pub(crate) gateway: Arc<OnceLock<GatewayId>>,
    /// Permits for reads that scan. They share the database with commits.
    pub(crate) scans: FairPermits,
    /// Permits for reads of many message bodies, each of which occupies a connection for some time.
    pub(crate) large_reads: FairPermits,
    /// Permits for requests that execute statements of their own, which no batch gathers, as often as a client likes:
    /// control frames of nodes, and repeated posts.
    pub(crate) single_requests: FairPermits,
}

/// Scans at the same time in this process; a family has one.
pub(crate) const CONCURRENT_SCANS: usize = 4;
/// Large reads at the same time in this process, half of a gateway's connections; a family has one.
pub(crate) const CONCURRENT_LARGE_READS: usize = 8;
/// Single requests at the same time in this process, which leaves a quarter of a gateway's connections to commits, and
/// of one family, a quarter of them.
pub(crate) const CONCURRENT_SINGLE_REQUESTS: usize = 12;
pub(crate) const CONCURRENT_SINGLE_REQUESTS_OF_FAMILY: usize = 4;
/// Longest wait for a permit: some scans of the same workspace, far below the 30 s that a request may take.
const SCAN_WAIT: Duration = Duration::from_secs(5);

impl Core {
    /// Current time by Postgres' clock, as far as this process knows it.
    pub(crate) fn now(&self) -> DateTime<Utc> {
        self.ids.now()
    }

    pub(crate) fn next_id(&self) -> i64 {
        self.ids.next_id()
    }

    /// Waits for the permit for a read that scans: a search, statistics, or a list of a whole workspace.
    ///
    /// # Errors
    /// When other scans, above all of the same family, take too long.
    pub(crate) async fn acquire_scan_permit(&self, scope: WorkspaceScope) -> EngineResult<FairPermit> {
        self.scans.acquire(self.family(scope).await, SCAN_WAIT).await.ok_or(EngineError::Overloaded)
    }

    /// Waits for the permit for a request that executes statements of its own.
    ///
    /// # Errors
    /// When other requests, above all of the same family, take longer than `timeout`.
    pub(crate) async fn acquire_single_request_permit(
        &self,
        scope: WorkspaceScope,
        timeout: Duration,
    ) -> EngineResult<FairPermit> {
        self.single_requests.acquire(self.family(scope).await, timeout).await.ok_or(EngineError::Overloaded)
    }

    /// Returns the family of a workspace. It is known from the token of a caller, and read otherwise.
    pub(crate) async fn family(&self, scope: WorkspaceScope) -> FamilyId {
        let workspace = scope.workspace_id();
        if let Some(known) = self.families.find(workspace) {
            return known;
        }
        match self.store.answerable_workspace(scope).await {
            Ok(answerable) => self.families.remember(workspace, answerable),
            // It counts alone until storage answers.
            Err(_) => FamilyId::of_workspace(workspace, None),
        }
    }

    /// Id of this gateway, if this process is one.
    pub(crate) fn gateway_id(&self) -> Option<GatewayId> {
        self.gateway.get().copied()
    }

    pub(crate) async fn check_storage(&self) -> EngineResult<()> {
        Ok(self.store.ping().await?)
    }

    /// Announces a committed record. Never waits.
    pub(crate) fn announce(&self, announcement: impl Into<Announcement>) {
        let announcement = announcement.into();
        let events = announcement.event_count();
        // A change may record no event. Its `RecordedEvents` is then empty and has no seq, so there is nothing to
        // announce.
        if events == 0 {
            return;
        }
        if self.announcer.try_send(announcement).is_err() {
            // Feeds find the record in Postgres within a second; agents' sockets miss it.
            metrics::counter!(relay_domain::metric_names::EVENTS_UNANNOUNCED)
                .increment(u64::try_from(events).unwrap_or(0));
        }
    }
}
