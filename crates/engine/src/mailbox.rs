//! What a gateway asks about the mailboxes that it serves: where they stand, what is missing, where to
//! tail them.

use chrono::{Duration, Utc};
use relay_domain::{AgentId, DeliveryId, NodeId, ProviderName, WorkspaceScope, delivery::Exception, session::Seq};
use relay_store::replay::StoredDelivery;
pub use relay_store::{
    cursors::{CursorMove, Located, Position},
    heartbeats::Heartbeat,
    hosting::{Fence, Listed},
    leases::HeldProvider,
    providers::Registration,
};
pub use relay_stream::{Link, LiveFrame, ProbeRequest, Probes, Tail};
use tokio::sync::watch;

use crate::{Engine, EngineResult, payload};

/// Older rows than this have expired, whatever their workspace's TTL (six days at most), so replay need
/// not read their partitions.
const OLDEST_LIVE_ROW: Duration = Duration::days(7);

/// A frame read back from the store, or what stands in for it.
#[derive(Debug, Clone)]
pub struct ReplayFrame {
    /// Its place in the mailbox.
    pub seq: Seq,
    /// The delivery id; none for a tombstone.
    pub delivery_id: Option<DeliveryId>,
    /// The frame as it is written to the socket.
    pub body: bytes::Bytes,
}

/// What a repair brought.
#[derive(Debug, Clone)]
pub struct Repaired {
    /// The mailbox.
    pub agent_id: AgentId,
    /// Frames in seq order, from the wanted one on, without a gap.
    pub frames: Vec<ReplayFrame>,
}

/// A mailbox that wants rows from a seq on; `head` is the highest seq known to exist.
#[derive(Debug, Clone)]
pub struct Want {
    /// The mailbox.
    pub agent_id: AgentId,
    /// The recipient's name.
    pub agent_name: String,
    /// The first seq wanted.
    pub from: Seq,
    /// Rows at or below this seq are acknowledged: a tombstone stands for each, and none is read.
    pub settled_below: Seq,
    /// Rows at or below this seq are replayed; a later one is missing, for there should have been a live copy.
    pub resumed_to: Seq,
}

impl Engine {
    /// Where the mailboxes located on a node's provider stand, in name order.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn positions_of_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
    ) -> EngineResult<Vec<Position>> {
        Ok(self.store().positions_of_provider(scope, node, provider).await?)
    }

    /// Which agents are located on these nodes.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn agents_on_nodes(&self, of: &[(WorkspaceScope, NodeId)]) -> EngineResult<Vec<Located>> {
        Ok(self.store().agents_on_nodes(of).await?)
    }

    /// Where these mailboxes stand; deleted agents are left out.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn positions(&self, of: &[(WorkspaceScope, AgentId)]) -> EngineResult<Vec<Position>> {
        Ok(self.store().positions(of).await?)
    }

    /// Reads what is missing, for many mailboxes of one workspace at once, at most
    /// [`relay_store::replay::PAGE`] rows each.
    ///
    /// Rows whose time is up are dead-lettered first, with the statement of the expiry loop. What will
    /// never be delivered is a tombstone, and only once its terminal state is committed.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn read_missing(&self, scope: WorkspaceScope, wants: &[Want]) -> EngineResult<Vec<Repaired>> {
        let page = relay_store::replay::PAGE;
        let live: Vec<(WorkspaceScope, AgentId, Seq)> = wants
            .iter()
            .filter(|want| want.from + page > want.settled_below + 1)
            .map(|want| (scope, want.agent_id, want.from.max(want.settled_below + 1)))
            .collect();
        let mailboxes: Vec<_> = live.iter().map(|(scope, agent, _)| (*scope, *agent)).collect();
        let heads = self.store().positions(&mailboxes).await?;
        let since = Utc::now() - OLDEST_LIVE_ROW;
        let mut rows = self.store().deliveries_from(&live, since).await?;
        if rows.iter().any(|row| is_overdue(row, self.now())) {
            self.dead_letter_expired(&mailboxes).await?;
            rows = self.store().deliveries_from(&live, since).await?;
        }
        let mut repaired = Vec::with_capacity(wants.len());
        for want in wants {
            let head =
                heads.iter().find(|p| p.agent_id == want.agent_id).map_or(want.settled_below, |p| p.next_seq - 1);
            let own = rows.iter().filter(|row| row.agent_id == want.agent_id);
            repaired.push(Repaired { agent_id: want.agent_id, frames: page_of(want, head, own, self.now()) });
        }
        let missed = wants
            .iter()
            .zip(&repaired)
            .map(|(want, read)| read.frames.iter().filter(|frame| frame.seq > want.resumed_to).count());
        metrics::counter!(relay_domain::metric_names::DELIVERIES_REPAIRED)
            .increment(u64::try_from(missed.sum::<usize>()).unwrap_or(0));
        Ok(repaired)
    }

    /// Tails a mailbox live, from now on.
    ///
    /// # Errors
    /// When the client has been closed.
    pub async fn tail(&self, scope: WorkspaceScope, agent: AgentId) -> EngineResult<Tail> {
        Ok(self.inner.stream.tail(scope, agent).await?)
    }

    /// Whether live copies arrive, and how often some may have been lost.
    #[must_use]
    pub fn link(&self) -> watch::Receiver<Link> {
        self.inner.stream.link()
    }
}

fn is_overdue(row: &StoredDelivery, now: chrono::DateTime<Utc>) -> bool {
    row.expires_at <= now && !row.exception.is_some_and(is_terminal)
}

const fn is_terminal(exception: Exception) -> bool {
    !matches!(exception, Exception::Deferred)
}

/// One page of frames for a mailbox, contiguous from the wanted seq. A seq below the head without a
/// row has been dropped with its partition: a tombstone stands for it.
fn page_of<'a>(
    want: &Want,
    head: Seq,
    rows: impl Iterator<Item = &'a StoredDelivery>,
    now: chrono::DateTime<Utc>,
) -> Vec<ReplayFrame> {
    let mut rows = rows.peekable();
    let mut frames = Vec::new();
    let full = head.min(want.from + relay_store::replay::PAGE - 1);
    for seq in want.from..=full {
        while rows.peek().is_some_and(|row| row.seq < seq) {
            rows.next();
        }
        let tombstone = |seq| ReplayFrame {
            seq,
            delivery_id: None,
            body: payload::tombstone_frame(want.agent_id, &want.agent_name, seq),
        };
        if seq <= want.settled_below {
            frames.push(tombstone(seq));
            continue;
        }
        match rows.peek() {
            Some(row) if row.seq == seq => {
                if is_overdue(row, now) {
                    // Its time came after the read: the next repair dead-letters it.
                    break;
                }
                let body = if row.exception.is_some_and(is_terminal) { None } else { payload::stored_frame(row) };
                frames.push(match body {
                    Some(body) => ReplayFrame {
                        seq,
                        delivery_id: Some(DeliveryId {
                            source: row.source_id,
                            agent: row.agent_id,
                            redrive_no: row.redrive_no,
                        }),
                        body,
                    },
                    None => tombstone(seq),
                });
            }
            // A later row proves that this one is gone; without one it was dropped with all before it.
            Some(_) | None => frames.push(tombstone(seq)),
        }
    }
    frames
}
