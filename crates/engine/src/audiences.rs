//! Membership snapshots that sends are resolved from. Hints and the commit's own check keep them true.

use std::{sync::Arc, time::Duration};

use moka::sync::Cache;
use relay_domain::{AgentId, ChannelId, WorkspaceScope};
use relay_store::audience::{Audience, AudienceKey};

/// Snapshots remembered; further ones push out the least used.
const REMEMBERED: u64 = 20_000;
const REMEMBERED_FOR: Duration = Duration::from_secs(60);

/// Remembered membership snapshots.
#[derive(Debug)]
pub(crate) struct Audiences {
    pub(crate) known: Cache<(WorkspaceScope, AudienceKey), Arc<Audience>>,
    /// Whose conversation `(sender, name)` means.
    pub(crate) direct: Cache<(WorkspaceScope, AgentId, String), Arc<Audience>>,
}

impl Default for Audiences {
    fn default() -> Self {
        Self {
            known: Cache::builder()
                .max_capacity(REMEMBERED)
                .time_to_live(REMEMBERED_FOR)
                .support_invalidation_closures()
                .build(),
            direct: Cache::builder()
                .max_capacity(REMEMBERED)
                .time_to_live(REMEMBERED_FOR)
                .support_invalidation_closures()
                .build(),
        }
    }
}

impl Audiences {
    /// Forgets a channel: its members changed.
    pub(crate) fn forget(&self, scope: WorkspaceScope, channel: ChannelId) {
        // Only fails without support for closures, which both caches have.
        let _ = self.known.invalidate_entries_if(move |key, value| key.0 == scope && value.channel_id == channel);
        let _ = self.direct.invalidate_entries_if(move |key, value| key.0 == scope && value.channel_id == channel);
    }
}
