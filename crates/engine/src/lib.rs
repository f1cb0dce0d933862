//! Use cases: the operations that callers, nodes and operators may request.
//!
//! A use case takes an authenticated caller and plain values, applies the rules of `relay-domain`, and reads and writes
//! through `relay-store` and `relay-stream`. It knows neither HTTP nor sockets. The gateway, the worker and relayctl
//! are its callers.

pub mod access;
pub mod actions;
pub mod agents;
pub mod channels;
mod core;
mod debounce;
pub mod error;
pub mod events;
pub mod files;
pub mod hints;
mod id_source;
pub mod mailboxes;
pub mod maintenance;
pub mod messages;
mod migrations;
pub mod nodes;
pub mod observers;
pub mod processes;
pub mod push;
pub mod recovery;
pub mod search;
pub mod settings;
mod start;
pub mod subscriptions;
pub mod tick;
pub mod workspaces;

use std::sync::Arc;

use chrono::{DateTime, Utc};
use relay_store::Store;
use relay_stream::Stream;

pub use error::{EngineError, EngineResult};
pub use id_source::IdSource;
pub use migrations::{MigrationError, migrate};
pub use relay_egress::EgressConfig;
pub use relay_store::{MessagePage, ObserverTokenRow, ReadReceipt};
pub use start::EngineConfig;

/// Entry point to all use cases of a gateway or worker. Cheap to clone; all clones share their state.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) core: core::Core,
    pub(crate) tokens: access::authentication::TokenCache,
    pub(crate) seen: agents::last_seen::LastSeenRecorder,
    pub(crate) observers: observers::Observers,
    pub(crate) stream: Stream,
    pub(crate) audiences: channels::audiences::Audiences,
    pub(crate) committer: messages::committer::CommitQueue,
    pub(crate) publisher: messages::publisher::Publisher,
    pub(crate) feeds: events::Feeds,
    pub(crate) large_frames: events::LargeFrames,
    pub(crate) cursors: Arc<mailboxes::cursors::CursorMoves>,
    pub(crate) heartbeats: nodes::heartbeats::Heartbeats,
    pub(crate) limits: access::limits::Limits,
    pub(crate) quotas: access::limits::QuotaCache,
    pub(crate) secrets: Arc<access::secrets::Secrets>,
    pub(crate) files: files::Files,
    pub(crate) subscriptions: subscriptions::Subscriptions,
    pub(crate) calls: actions::CallQueues,
    pub(crate) dispatch_notes: actions::DispatchRecorder,
    pub(crate) node_kinds: nodes::kinds::NodeKinds,
    pub(crate) egress: relay_egress::Client,
    pub(crate) gateway_id: std::sync::OnceLock<relay_domain::GatewayId>,
    pub(crate) recovery: recovery::Recovery,
    pub(crate) suspensions: workspaces::suspensions::Suspensions,
    pub(crate) tasks: relay_tasks::TaskSet,
}

impl Engine {
    /// Plans and limits of workspaces.
    #[must_use]
    pub fn quotas(&self) -> &access::limits::QuotaCache {
        &self.inner.quotas
    }

    /// Files: declared, uploaded, attached, downloaded, deleted.
    #[must_use]
    pub fn files(&self) -> &files::Files {
        &self.inner.files
    }

    /// Event subscriptions: their definitions, and their leases for a worker.
    #[must_use]
    pub fn subscriptions(&self) -> &subscriptions::Subscriptions {
        &self.inner.subscriptions
    }

    pub(crate) fn store(&self) -> &Store {
        &self.inner.core.store
    }

    #[must_use]
    pub fn hints(&self) -> &hints::Hints {
        &self.inner.core.hints
    }

    /// Guarded HTTP client: the only way to call URLs that tenants chose.
    #[must_use]
    pub fn egress(&self) -> &relay_egress::Client {
        &self.inner.egress
    }

    /// Current time by Postgres' clock, as far as this process knows it.
    #[must_use]
    pub fn now(&self) -> DateTime<Utc> {
        self.inner.core.now()
    }

    pub async fn check_storage(&self) -> EngineResult<()> {
        Ok(self.store().ping().await?)
    }

    pub(crate) fn next_id(&self) -> i64 {
        self.inner.core.next_id()
    }
}
