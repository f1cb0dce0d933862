//! Serving mailboxes on a gateway's sockets: positions, repair and live tails.

use chrono::{Duration, Utc};
use relay_domain::{
    AgentId, DeliveryId, NodeId, ProviderName, WorkspaceScope,
    mailboxes::{StoredDelivery, delivery::Settlement, stream::Seq},
};
pub use relay_store::{
    mailboxes::cursors::{CursorMove, LocatedAgent, MailboxPosition},
    nodes::{
        fence::Fence,
        heartbeats::Heartbeat,
        hosting::{ListedAgent, SessionHandle},
        providers::ProviderRegistration,
    },
    processes::gateway_leases::ConnectedProvider,
};
pub use relay_stream::{LinkState, LiveCopy, LiveFrame, ProbeRequest, Probes, Tail};
use relay_wire::nodes::deliver_frame;
use tokio::sync::watch;

use super::Mailboxes;
use crate::EngineResult;

/// Older rows have expired, whatever their workspace's TTL (six days at most), so replay need not read their
/// partitions.
const OLDEST_LIVE_ROW: Duration = Duration::days(7);

/// Frame read back from the store, or its tombstone.
#[derive(Debug, Clone)]
pub struct ReplayFrame {
    pub seq: Seq,
    /// `None` for a tombstone.
    pub delivery_id: Option<DeliveryId>,
    /// Frame as it is written to the socket.
    pub body: bytes::Bytes,
}

#[derive(Debug, Clone)]
pub struct RepairedMailbox {
    pub agent_id: AgentId,
    /// Frames in seq order without gaps, from the requested one on.
    pub frames: Vec<ReplayFrame>,
}

/// Request for the rows of a mailbox from a seq on.
#[derive(Debug, Clone)]
pub struct RepairRequest {
    pub agent_id: AgentId,
    pub agent_name: String,
    pub from: Seq,
    /// Rows at or below this seq are acknowledged: a tombstone stands for each, and none is read.
    pub settled_below: Seq,
    /// Rows at or below this seq are replayed; a later one is counted as missing, since it should have had a live copy.
    pub resumed_to: Seq,
}

impl Mailboxes {
    /// Returns the positions of the mailboxes located on a node's provider, in name order.
    pub async fn positions_of_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
    ) -> EngineResult<Vec<MailboxPosition>> {
        Ok(self.core.store.positions_of_provider(scope, node, provider).await?)
    }

    /// Lists the agents located on these nodes.
    pub async fn agents_on_nodes(&self, of: &[(WorkspaceScope, NodeId)]) -> EngineResult<Vec<LocatedAgent>> {
        Ok(self.core.store.agents_on_nodes(of).await?)
    }

    /// Returns the positions of these mailboxes; deleted agents are left out.
    pub async fn positions(&self, of: &[(WorkspaceScope, AgentId)]) -> EngineResult<Vec<MailboxPosition>> {
        Ok(self.core.store.positions(of).await?)
    }

    /// Reads missing rows for many mailboxes of one workspace, at most [`relay_store::mailboxes::replay::PAGE`] rows
    /// each.
    ///
    /// Expired rows are dead-lettered first, with the statement of the expiry loop. A row that will never be delivered
    /// becomes a tombstone, but only after its terminal state is committed.
    pub async fn read_missing(
        &self,
        scope: WorkspaceScope,
        wants: &[RepairRequest],
    ) -> EngineResult<Vec<RepairedMailbox>> {
        let page = relay_store::mailboxes::replay::PAGE;
        let live: Vec<(WorkspaceScope, AgentId, Seq)> = wants
            .iter()
            .filter(|want| want.from + page > want.settled_below + 1)
            .map(|want| (scope, want.agent_id, want.from.max(want.settled_below + 1)))
            .collect();
        let mailboxes: Vec<_> = live.iter().map(|(scope, agent, _)| (*scope, *agent)).collect();
        let heads = self.core.store.positions(&mailboxes).await?;
        let since = self.core.now() - OLDEST_LIVE_ROW;
        let mut rows = self.core.store.deliveries_from(&live, since).await?;
        if rows.iter().any(|row| is_overdue(row, self.core.now())) {
            self.dead_letter_expired(&mailboxes).await?;
            rows = self.core.store.deliveries_from(&live, since).await?;
        }
        let mut repaired = Vec::with_capacity(wants.len());
        for want in wants {
            let head =
                heads.iter().find(|p| p.agent_id == want.agent_id).map_or(want.settled_below, |p| p.next_seq - 1);
            let own = rows.iter().filter(|row| row.agent_id == want.agent_id);
            repaired.push(RepairedMailbox {
                agent_id: want.agent_id,
                frames: repair_page(want, head, own, self.core.now()),
            });
        }
        let missed = wants
            .iter()
            .zip(&repaired)
            .map(|(want, read)| read.frames.iter().filter(|frame| frame.seq > want.resumed_to).count());
        metrics::counter!(relay_domain::metric_names::DELIVERIES_REPAIRED)
            .increment(u64::try_from(missed.sum::<usize>()).unwrap_or(0));
        Ok(repaired)
    }

    /// Subscribes to the live frames of a mailbox.
    ///
    /// # Errors
    /// When the NATS client has been closed.
    pub async fn tail(&self, scope: WorkspaceScope, agent: AgentId) -> EngineResult<Tail> {
        Ok(self.stream.tail_agent(scope, agent).await?)
    }

    /// Watches the NATS link: live copies arrive while it is up, and its count tells when some may have been lost.
    #[must_use]
    pub fn watch_link(&self) -> watch::Receiver<LinkState> {
        self.stream.watch_link()
    }
}

fn is_overdue(row: &StoredDelivery, now: chrono::DateTime<Utc>) -> bool {
    row.expires_at <= now && !row.settlement.is_some_and(is_terminal)
}

const fn is_terminal(exception: Settlement) -> bool {
    !matches!(exception, Settlement::Deferred)
}

/// Builds one page of frames for a mailbox, contiguous from the requested seq. A seq below the head without a row was
/// dropped with its partition: a tombstone stands for it.
fn repair_page<'a>(
    want: &RepairRequest,
    head: Seq,
    rows: impl Iterator<Item = &'a StoredDelivery>,
    now: chrono::DateTime<Utc>,
) -> Vec<ReplayFrame> {
    let mut rows = rows.peekable();
    let mut frames = Vec::new();
    let full = head.min(want.from + relay_store::mailboxes::replay::PAGE - 1);
    for seq in want.from..=full {
        while rows.peek().is_some_and(|row| row.seq < seq) {
            rows.next();
        }
        let tombstone = |seq| ReplayFrame {
            seq,
            delivery_id: None,
            body: deliver_frame::tombstone_frame(want.agent_id, &want.agent_name, seq),
        };
        if seq <= want.settled_below {
            frames.push(tombstone(seq));
            continue;
        }
        match rows.peek() {
            Some(row) if row.seq == seq => {
                if is_overdue(row, now) {
                    // It expired after the read: the next repair dead-letters it.
                    break;
                }
                let body =
                    if row.settlement.is_some_and(is_terminal) { None } else { deliver_frame::stored_frame(row) };
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
            // A later row proves that this one was dropped; without one, all rows up to the head were.
            Some(_) | None => frames.push(tombstone(seq)),
        }
    }
    frames
}
