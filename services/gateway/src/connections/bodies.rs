//! [`RequestBodies`]: memory of the bodies of requests and of large frames, from their arrival until their answer.

use std::{net::IpAddr, time::Duration};

use relay_domain::workspaces::family::FamilyId;
use relay_tasks::byte_budget::{ByteBudget, ByteLease};

/// Bytes of the process, a quarter of them for one owner. A caller may have 600 requests of a megabyte in progress.
const TOTAL_BYTES: usize = 64 * 1024 * 1024;
/// Longest wait for memory. The client repeats the request afterwards, so a share that stays taken holds no
/// connections.
const WAIT: Duration = Duration::from_secs(5);
/// Frames up to this are held without a lease. 64 of them may wait on each of the 600 sockets of a token.
const SMALL_FRAME_BYTES: usize = 1024;
/// Memory of a byte of JSON that is held as values, as in lists: 3 in common objects, 80 in the smallest ones.
pub(super) const VALUE_FACTOR: usize = 16;
/// Types of frames whose JSON is held as values until the engine has handled them.
const FRAMES_WITH_VALUES: [&str; 4] =
    ["\"action.result\"", "\"node.spawn\"", "\"node.register\"", "\"node.heartbeat\""];

/// Tenant to which a body counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum BodyOwner {
    Family(FamilyId),
    /// Client without a token.
    Address(Option<IpAddr>),
}

/// Bytes of request bodies and frames that this gateway holds. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct RequestBodies {
    texts: ByteBudget<BodyOwner>,
    /// Memory of frames once they are parsed. It is reserved while their text is held, and so apart from the texts.
    values: ByteBudget<FamilyId>,
}

/// Memory of a frame that waits for the engine.
#[derive(Debug)]
pub(crate) struct FrameMemory {
    _text: ByteLease,
    _values: ByteLease,
}

impl Default for RequestBodies {
    fn default() -> Self {
        Self { texts: ByteBudget::new("requests", TOTAL_BYTES), values: ByteBudget::new("frame_values", TOTAL_BYTES) }
    }
}

impl RequestBodies {
    /// Waits a while for the memory of a body; `None` if others take too long.
    pub(super) async fn reserve(&self, owner: BodyOwner, bytes: usize) -> Option<ByteLease> {
        tokio::time::timeout(WAIT, self.texts.reserve(owner, bytes)).await.ok()
    }

    /// Waits for the memory of a message that waits for the engine. Small ones need none.
    pub(crate) async fn reserve_frame(&self, family: FamilyId, bytes: usize) -> Option<ByteLease> {
        if bytes <= SMALL_FRAME_BYTES {
            return None;
        }
        Some(self.texts.reserve(BodyOwner::Family(family), bytes).await)
    }

    /// Waits for the memory of what a frame takes once it is parsed.
    pub(crate) async fn reserve_values(&self, family: FamilyId, text: ByteLease, frame: &str) -> FrameMemory {
        let bytes = if holds_values(frame) { frame.len().saturating_mul(VALUE_FACTOR) } else { 0 };
        FrameMemory { _text: text, _values: self.values.reserve(family, bytes).await }
    }
}

/// Returns whether JSON of a frame may be held as values. Its type is not parsed yet, and may be written with escapes.
fn holds_values(frame: &str) -> bool {
    frame.contains("\\u") || FRAMES_WITH_VALUES.iter().any(|kind| frame.contains(kind))
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

    #[tokio::test(start_paused = true)]
    async fn frames_with_values_take_turns() {
        let (bodies, family) = (RequestBodies::default(), FamilyId::of_workspace(WorkspaceId::new(1), None));
        let frame = |kind: &str| format!(r#"{{"type":"{kind}","x":"{}"}}"#, "x".repeat(TOTAL_BYTES / 64));
        let reserve = async |frame: String| {
            let text = bodies.reserve_frame(family, frame.len()).await.unwrap();
            tokio::time::timeout(WAIT, bodies.reserve_values(family, text, &frame)).await.ok()
        };
        let held = reserve(frame("action.result")).await.expect("the share is free");
        for kind in ["action.result", "node.spawn", "node.register", "node.heartbeat", r"action\u002eresult"] {
            assert!(reserve(frame(kind)).await.is_none(), "{kind}");
        }
        assert!(reserve(frame("inventory.sync")).await.is_some());
        drop(held);
        assert!(reserve(frame("node.spawn")).await.is_some());
    }
}
