//! The use cases: what callers, nodes and operators can ask of the engine.
//!
//! A call takes an authenticated caller and plain values, applies the rules of `relay-domain`, and
//! reads and writes through `relay-store` and `relay-stream`. It knows nothing of HTTP or sockets.

pub mod actions;
pub mod activity;
mod addresses;
pub mod admin;
pub mod agents;
pub mod all_dms;
mod audiences;
pub mod auth;
pub mod bindings;
pub mod channels;
pub mod claims;
mod commit;
mod cursors;
pub mod dead_letters;
pub mod deliveries;
pub mod dms;
mod draft;
mod error;
pub mod events;
pub mod files;
pub mod gateway;
pub mod hints;
pub mod history;
mod holds;
pub mod idempotency;
mod ids;
pub mod inbox;
pub mod insight;
mod jwt;
pub mod limits;
pub mod mailbox;
pub mod mailboxes;
mod node_kinds;
pub mod nodes;
pub mod observers;
pub mod operators;
pub mod payload;
pub mod prompt;
mod publish;
pub mod push;
pub mod reactions;
pub mod reads;
pub mod recovery;
pub mod render;
mod schema;
pub mod search;
pub mod secrets;
mod seen;
pub mod send;
pub mod serve;
pub mod session_events;
pub mod settings;
pub mod spawn;
mod start;
pub mod subscriptions;
pub mod trace;
pub mod triggers;
pub mod updates;
pub mod usage;
mod vitals;
pub mod webhooks;
pub mod worker;
pub mod workspaces;

use std::sync::Arc;

use chrono::{DateTime, Utc};
use relay_store::Store;
use relay_stream::Stream;

pub use error::{EngineError, EngineResult};
pub use ids::IdSource;
pub use relay_egress::EgressConfig;
pub use relay_store::{MessagePage, MessageRow, ObserverTokenRow, ReadReceipt};
pub use schema::{MigrationError, migrate};
pub use start::EngineConfig;

/// Everything a gateway or worker can do. Cheap to clone; all clones share their state.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) store: Store,
    pub(crate) ids: IdSource,
    pub(crate) tokens: auth::TokenCache,
    pub(crate) seen: seen::SeenNotes,
    pub(crate) observers: observers::Observers,
    pub(crate) hints: hints::Hints,
    pub(crate) stream: Stream,
    pub(crate) audiences: audiences::Audiences,
    pub(crate) committer: commit::CommitQueue,
    pub(crate) publisher: publish::Publisher,
    pub(crate) announcer: events::Announcer,
    pub(crate) feeds: events::Feeds,
    pub(crate) large_frames: events::LargeFrames,
    pub(crate) cursors: Arc<cursors::CursorMoves>,
    pub(crate) heartbeats: serve::Heartbeats,
    pub(crate) limits: limits::Limits,
    pub(crate) secrets: secrets::Secrets,
    pub(crate) files: files::Files,
    pub(crate) calls: actions::CallQueues,
    pub(crate) sent_invocations: actions::SentNotes,
    pub(crate) node_kinds: node_kinds::NodeKinds,
    pub(crate) egress: relay_egress::Client,
    pub(crate) gateway_id: std::sync::OnceLock<relay_domain::GatewayId>,
    pub(crate) recovery: recovery::Recovery,
    pub(crate) holds: holds::Holds,
}

impl Engine {
    /// The store, for the crate's own modules.
    pub(crate) fn store(&self) -> &Store {
        &self.inner.store
    }

    /// The hints that this process gives.
    #[must_use]
    pub fn hints(&self) -> &hints::Hints {
        &self.inner.hints
    }

    /// The one way to tenants' URLs.
    #[must_use]
    pub fn egress(&self) -> &relay_egress::Client {
        &self.inner.egress
    }

    /// Postgres' clock, as far as known.
    #[must_use]
    pub fn now(&self) -> DateTime<Utc> {
        DateTime::from_timestamp_millis(self.inner.ids.now_ms()).unwrap_or_default()
    }

    /// Asks Postgres for a sign of life.
    ///
    /// # Errors
    /// When it gives none.
    pub async fn check_storage(&self) -> EngineResult<()> {
        self.store().ping().await?;
        Ok(())
    }

    /// The next snowflake id.
    pub(crate) fn next_id(&self) -> i64 {
        self.inner.ids.next_id()
    }
}
