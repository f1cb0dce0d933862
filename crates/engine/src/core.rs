//! [`Core`]: what the handles of all nouns share.

use std::sync::{Arc, OnceLock};

use chrono::{DateTime, Utc};
use relay_domain::GatewayId;
use relay_store::Store;
use tokio::sync::mpsc;

use crate::{EngineResult, IdSource, events::Announcement, hints::Hints};

/// Storage, ids, the clock, hints and announcements. Cheap to clone; all clones share their state.
#[derive(Clone)]
pub(crate) struct Core {
    pub(crate) store: Store,
    pub(crate) ids: Arc<IdSource>,
    pub(crate) hints: Arc<Hints>,
    pub(crate) announcer: mpsc::Sender<Announcement>,
    /// Set once this process is a gateway.
    pub(crate) gateway: Arc<OnceLock<GatewayId>>,
}

impl Core {
    /// Current time by Postgres' clock, as far as this process knows it.
    pub(crate) fn now(&self) -> DateTime<Utc> {
        DateTime::from_timestamp_millis(self.ids.now_ms()).unwrap_or_default()
    }

    pub(crate) fn next_id(&self) -> i64 {
        self.ids.next_id()
    }

    /// Id of this gateway, if this process is one.
    pub(crate) fn gateway_id(&self) -> Option<GatewayId> {
        self.gateway.get().copied()
    }

    pub(crate) async fn check_storage(&self) -> EngineResult<()> {
        Ok(self.store.ping().await?)
    }
}
