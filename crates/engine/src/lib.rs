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
pub mod due_work;
pub mod error;
pub mod events;
mod fair_permits;
pub mod files;
mod handles;
pub mod hints;
mod id_source;
pub mod mailboxes;
pub mod maintenance;
pub mod messages;
mod migrations;
pub mod nodes;
pub mod observers;
pub mod parts;
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

pub use error::{EngineError, EngineResult};
pub(crate) use handles::Inner;
pub use id_source::IdSource;
pub use migrations::{MigrationError, migrate};
pub use relay_egress::EgressConfig;
pub use relay_store::ReadReceipt;
pub use start::EngineConfig;

/// Entry point to all use cases of a gateway or worker. Cheap to clone; all clones share their state.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

/// One handle per noun. Each holds what its use cases need, and nothing else.
impl Engine {
    /// Callers and their repeated requests.
    #[must_use]
    pub fn access(&self) -> &access::authentication::Access {
        &self.inner.access
    }

    /// Actions and invocations, among them spawning and releasing agents.
    #[must_use]
    pub fn actions(&self) -> &actions::Actions {
        &self.inner.actions
    }

    /// Agents: their life cycle, location and session events.
    #[must_use]
    pub fn agents(&self) -> &agents::Agents {
        &self.inner.agents
    }

    /// Channels and conversations.
    #[must_use]
    pub fn channels(&self) -> &channels::Channels {
        &self.inner.channels
    }

    /// Work that loops of this process wait for.
    #[must_use]
    pub fn due_work(&self) -> &due_work::DueWork {
        &self.inner.due_work
    }

    /// The event log of a workspace and its live streams.
    #[must_use]
    pub fn events(&self) -> &events::Events {
        &self.inner.events
    }

    /// Files: declared, uploaded, attached, downloaded, deleted.
    #[must_use]
    pub fn files(&self) -> &files::Files {
        &self.inner.files
    }

    /// Mailboxes: served on sockets, listed, settled, claimed, redriven.
    #[must_use]
    pub fn mailboxes(&self) -> &mailboxes::Mailboxes {
        &self.inner.mailboxes
    }

    /// Messages, reactions, receipts and webhooks.
    #[must_use]
    pub fn messages(&self) -> &messages::Messages {
        &self.inner.messages
    }

    /// Nodes, their providers and the agents that those host.
    #[must_use]
    pub fn nodes(&self) -> &nodes::Nodes {
        &self.inner.nodes
    }

    /// Observers, their tokens and signing keys.
    #[must_use]
    pub fn observers(&self) -> &observers::Observers {
        &self.inner.observers
    }

    /// This process as a gateway: its lease and the connections that it holds.
    #[must_use]
    pub fn processes(&self) -> &processes::Processes {
        &self.inner.processes
    }

    /// Plans and limits of workspaces.
    #[must_use]
    pub fn quotas(&self) -> &access::limits::QuotaCache {
        &self.inner.quotas
    }

    /// Rate limits of requests.
    #[must_use]
    pub fn rate_limits(&self) -> &access::limits::RateLimits {
        &self.inner.rate_limits
    }

    /// Recovery of a restored database, which must end before clients are served.
    #[must_use]
    pub fn recovery(&self) -> &recovery::Recovery {
        &self.inner.recovery
    }

    /// Search of messages.
    #[must_use]
    pub fn search(&self) -> &search::Search {
        &self.inner.search
    }

    /// Event subscriptions: their definitions, and their leases for a worker.
    #[must_use]
    pub fn subscriptions(&self) -> &subscriptions::Subscriptions {
        &self.inner.subscriptions
    }

    /// Suspended workspaces and drained nodes.
    #[must_use]
    pub fn suspensions(&self) -> &workspaces::suspensions::Suspensions {
        &self.inner.suspensions
    }

    /// Workspaces: their life cycle, activity, usage and system prompt.
    #[must_use]
    pub fn workspaces(&self) -> &workspaces::Workspaces {
        &self.inner.workspaces
    }

    /// Hints: wake-ups without authority.
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

    /// Asks Postgres for a sign of life.
    ///
    /// # Errors
    /// When it is unavailable.
    pub async fn check_storage(&self) -> EngineResult<()> {
        self.inner.core.check_storage().await
    }

    pub(crate) fn core(&self) -> &core::Core {
        &self.inner.core
    }

    pub(crate) fn node_kinds(&self) -> &nodes::kinds::NodeKinds {
        &self.inner.node_kinds
    }

    pub(crate) fn store(&self) -> &Store {
        &self.inner.core.store
    }

    pub(crate) fn next_id(&self) -> i64 {
        self.inner.core.next_id()
    }
}
