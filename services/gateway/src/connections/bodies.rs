//! [`RequestBodies`]: memory of the bodies of requests and of large frames, from their arrival until their answer.

use std::{net::IpAddr, time::Duration};

use relay_domain::workspaces::family::FamilyId;
use relay_tasks::byte_budget::{ByteBudget, ByteLease};

/// Bytes of the process, a quarter of them for one owner. A caller may have 600 requests of a megabyte in progress.
const TOTAL_BYTES: usize = 64 * 1024 * 1024;
/// Longest wait for memory. The client repeats the request afterwards, so a share that stays taken holds no connections.
const WAIT: Duration = Duration::from_secs(5);
/// Frames up to this are held without a lease. 64 of them may wait on each of the 600 sockets of a token.
const SMALL_FRAME_BYTES: usize = 1024;

/// Tenant to which a body counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum BodyOwner {
    Family(FamilyId),
    /// Client without a token.
    Address(Option<IpAddr>),
}

/// Bytes of request bodies and frames that this gateway holds. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct RequestBodies(ByteBudget<BodyOwner>);

impl Default for RequestBodies {
    fn default() -> Self {
        Self(ByteBudget::new("requests", TOTAL_BYTES))
    }
}

impl RequestBodies {
    /// Waits a while for the memory of a body; `None` if others take too long.
    pub(super) async fn reserve(&self, owner: BodyOwner, bytes: usize) -> Option<ByteLease> {
        tokio::time::timeout(WAIT, self.0.reserve(owner, bytes)).await.ok()
    }

    /// Waits for the memory of a message that waits for the engine. Small ones need none.
    pub(crate) async fn reserve_frame(&self, family: FamilyId, bytes: usize) -> Option<ByteLease> {
        if bytes <= SMALL_FRAME_BYTES {
            return None;
        }
        Some(self.0.reserve(BodyOwner::Family(family), bytes).await)
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_tenant_without_room_is_refused_after_a_while_and_others_are_not() {
        let bodies = RequestBodies::default();
        let [greedy, other] = [1, 2].map(|id| FamilyId::of_workspace(WorkspaceId::new(id), None));
        let held = bodies.reserve(BodyOwner::Family(greedy), TOTAL_BYTES).await.unwrap();
        assert!(bodies.reserve(BodyOwner::Family(greedy), 1).await.is_none());
        assert!(bodies.reserve(BodyOwner::Family(other), 1024 * 1024).await.is_some());
        assert!(bodies.reserve(BodyOwner::Address(None), 1024 * 1024).await.is_some());
        assert!(bodies.reserve_frame(greedy, SMALL_FRAME_BYTES).await.is_none(), "small frames do not wait");
        drop(held);
        assert!(bodies.reserve_frame(greedy, 1024 * 1024).await.is_some());
    }
}
