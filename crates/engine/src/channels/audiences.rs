//! Cache of membership snapshots for sends. Hints invalidate it, and the commit checks each snapshot.

use std::{sync::Arc, time::Duration};

use moka::sync::Cache;
use relay_domain::{AgentId, ChannelId, WorkspaceScope};
use relay_store::channels::audience::{Audience, AudienceKey};

const MAX_SNAPSHOTS: u64 = 20_000;
const SNAPSHOT_TTL: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Audiences {
    pub(crate) known: Cache<(WorkspaceScope, AudienceKey), Arc<Audience>>,
    /// The one-to-one conversation of `(sender, recipient name)`.
    pub(crate) direct: Cache<(WorkspaceScope, AgentId, String), Arc<Audience>>,
}

impl Default for Audiences {
    fn default() -> Self {
        Self {
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
}

impl Audiences {
    /// Invalidates the snapshots of a channel whose members changed.
    pub(crate) fn forget(&self, scope: WorkspaceScope, channel: ChannelId) {
        // Fails only without support for closures, which both caches enable.
        let _ = self.known.invalidate_entries_if(move |key, value| key.0 == scope && value.channel_id == channel);
        let _ = self.direct.invalidate_entries_if(move |key, value| key.0 == scope && value.channel_id == channel);
    }
}
