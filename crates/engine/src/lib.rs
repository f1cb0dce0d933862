//! The use cases: what callers, nodes and operators can ask of the engine.
//!
//! A call takes an authenticated caller and plain values, applies the rules of `relay-domain`, and
//! reads and writes through `relay-store` and `relay-stream`. It knows nothing of HTTP or sockets.

mod error;
mod ids;
mod schema;

use std::sync::Arc;

use relay_store::Store;

pub use error::{EngineError, EngineResult};
pub use ids::IdSource;
pub use schema::{MigrationError, migrate};

/// Everything a gateway or worker can do. Cheap to clone; all clones share their state.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) store: Store,
    pub(crate) ids: IdSource,
}

impl Engine {
    /// The store, for the crate's own modules.
    pub(crate) fn store(&self) -> &Store {
        &self.inner.store
    }

    /// The next snowflake id.
    pub(crate) fn next_id(&self) -> i64 {
        self.inner.ids.next_id()
    }
}
