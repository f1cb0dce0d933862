//! The use cases: what callers, nodes and operators can ask of the engine.
//!
//! A call takes an authenticated caller and plain values, applies the rules of `relay-domain`, and
//! reads and writes through `relay-store` and `relay-stream`. It knows nothing of HTTP or sockets.

pub mod agents;
mod audiences;
pub mod auth;
pub mod bindings;
pub mod channels;
mod commit;
mod cursors;
pub mod deliveries;
pub mod dms;
mod draft;
mod error;
pub mod gateway;
pub mod hints;
pub mod history;
pub mod idempotency;
mod ids;
pub mod mailbox;
pub mod nodes;
pub mod payload;
mod publish;
mod reads;
pub mod render;
mod schema;
mod seen;
pub mod send;
pub mod serve;
mod start;
mod trace;
pub mod worker;
pub mod workspaces;

use std::sync::Arc;

use chrono::{DateTime, Utc};
use relay_store::Store;
use relay_stream::Stream;

pub use error::{EngineError, EngineResult};
pub use ids::IdSource;
pub use relay_store::{MessagePage, MessageRow, ReadReceipt};
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
    pub(crate) hints: hints::Hints,
    pub(crate) stream: Stream,
    pub(crate) audiences: audiences::Audiences,
    pub(crate) committer: commit::CommitQueue,
    pub(crate) publisher: publish::Publisher,
    pub(crate) cursors: Arc<cursors::CursorMoves>,
    pub(crate) heartbeats: serve::Heartbeats,
    pub(crate) gateway_id: std::sync::OnceLock<relay_domain::GatewayId>,
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
