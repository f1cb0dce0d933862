//! Cache of membership snapshots for sends. Hints invalidate it, and the commit checks each snapshot.

use std::{sync::Arc, time::Duration};

use moka::sync::Cache;
use relay_domain::{AgentId, ChannelId, WorkspaceScope};
use relay_store::channels::audience::{Audience, AudienceKey};

use crate::{EngineResult, core::Core};

const MAX_SNAPSHOTS: u64 = 20_000;
const SNAPSHOT_TTL: Duration = Duration::from_secs(60);

/// Membership snapshots, cached.
pub(crate) struct Audiences {
    core: Core,
    pub(crate) known: Cache<(WorkspaceScope, AudienceKey), Arc<Audience>>,
    /// The one-to-one conversation of `(sender, recipient name)`.
    pub(crate) direct: Cache<(WorkspaceScope, AgentId, String), Arc<Audience>>,
}

/// Origin of a membership snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AudienceSource {
    /// The cache, or storage if it has none.
    Cache,
    /// Storage, after the cached one was found outdated.
    Storage,
}

impl Audiences {
    pub(crate) fn new(core: Core) -> Self {
        Self {
            core,
            known: Cache::builder()
                .max_capacity(MAX_SNAPSHOTS)
                .time_to_live(SNAPSHOT_TTL)
                .support_invalidation_closures()
                .build(),
            direct: Cache::builder()
                .max_capacity(MAX_SNAPSHOTS)
                .time_to_live(SNAPSHOT_TTL)
                .support_invalidation_closures()
                .build(),
        }
    }

    /// Loads the members of a channel or conversation; `None` if there is none.
    pub(crate) async fn load(
        &self,
        scope: WorkspaceScope,
        key: AudienceKey,
        source: AudienceSource,
    ) -> EngineResult<Option<Arc<Audience>>> {
        if source == AudienceSource::Cache
            && let Some(audience) = self.known.get(&(scope, key.clone()))
        {
            return Ok(Some(audience));
        }
        let Some(audience) = self.core.store.audience(scope, &key).await?.map(Arc::new) else { return Ok(None) };
        // The version is checked at commit, so a snapshot that is outdated on insertion costs a retry only.
        self.known.insert((scope, key), Arc::clone(&audience));
        Ok(Some(audience))
    }

    /// Invalidates the snapshots of a channel whose members changed.
    pub(crate) fn forget(&self, scope: WorkspaceScope, channel: ChannelId) {
        // Fails only without support for closures, which both caches enable.
        let _ = self.known.invalidate_entries_if(move |key, value| key.0 == scope && value.channel_id == channel);
        let _ = self.direct.invalidate_entries_if(move |key, value| key.0 == scope && value.channel_id == channel);
    }
}
