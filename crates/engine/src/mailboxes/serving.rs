//! Serving mailboxes on a gateway's sockets: positions, repair and live copies.

use std::{collections::HashMap, sync::Arc};

use chrono::Utc;
use relay_domain::{
    AgentId, DeliveryId, GatewayId, NodeId, ProviderName, WorkspaceScope,
    mailboxes::{ContentBudget, StoredDelivery, delivery::Settlement, stream::Seq},
};
use relay_store::mailboxes::replay::MailboxPage;
pub use relay_store::{
    mailboxes::changes::{FeedPosition, FeedRead, MailboxChange},
    mailboxes::cursors::{CursorMove, LocatedAgent, MailboxPosition},
    nodes::{
        fence::Fence,
        heartbeats::Heartbeat,
        hosting::{ListedAgent, SessionHandle},
        providers::ProviderRegistration,
    },
    processes::gateway_leases::ConnectedProvider,
};
pub use relay_stream::{LinkState, LiveCopies, LiveCopy, LiveFrame, ProbeRequest, Probes};
use relay_tasks::byte_budget::ByteLease;
use relay_wire::nodes::deliver_frame::{self, SharedFrame, SharedPayloads};
use tokio::sync::watch;

use super::Mailboxes;
use crate::EngineResult;
pub use crate::maintenance::CHANGES_KEPT;

/// Rows that one repair reads of each mailbox at least, and at most if it reads few mailboxes. Below [`EARLY_LIMIT`],
/// since live copies that arrive meanwhile take room in the same stream.
///
/// [`EARLY_LIMIT`]: relay_domain::mailboxes::stream::EARLY_LIMIT
const MIN_PAGE: Seq = 50;
const MAX_PAGE: Seq = 100;
/// Rows that the pages of all mailboxes of one repair have, unless these are the smallest ones.
const REPAIR_ROWS: usize = 5000;
/// Bound of the contents that one repair reads.
const REPAIR_BYTES: usize = 4 * 1024 * 1024;

/// Frame read back from the store, or its tombstone.
#[derive(Debug, Clone)]
pub struct ReplayFrame {
    pub seq: Seq,
    pub body: ReplayBody,
}

#[derive(Debug, Clone)]
pub enum ReplayBody {
    /// Frame as it is written to the socket.
    Tombstone(bytes::Bytes),
    Delivery {
        id: DeliveryId,
        frame: SharedFrame,
        /// In milliseconds of Unix time.
        expires_at_ms: i64,
        memory: Arc<ByteLease>,
    },
}

#[derive(Debug, Clone)]
pub struct RepairedMailbox {
    pub agent_id: AgentId,
    /// Frames in seq order without gaps, from the requested one on. May be empty if those of others took the memory.
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
        let key = (scope, node.clone(), provider.clone());
        let mut positions = self.core.store.positions_of_providers(std::slice::from_ref(&key)).await?;
        Ok(positions.pop().unwrap_or_default())
    }

    /// Lists the agents located on these nodes.
    pub async fn agents_on_nodes(&self, of: &[(WorkspaceScope, NodeId)]) -> EngineResult<Vec<LocatedAgent>> {
        Ok(self.core.store.agents_on_nodes(of).await?)
    }

    /// Returns the positions of these mailboxes; deleted agents are left out.
    pub async fn positions(&self, of: &[(WorkspaceScope, AgentId)]) -> EngineResult<Vec<MailboxPosition>> {
        Ok(self.core.store.positions(of).await?)
    }

    /// Returns the current end of the change feed.
    pub async fn feed_position(&self) -> EngineResult<FeedPosition> {
        Ok(self.core.store.feed_position().await?)
    }

    /// Reads what has changed since `position`, which must be younger than [`CHANGES_KEPT`].
    pub async fn changes_since(&self, position: &FeedPosition) -> EngineResult<FeedRead> {
        Ok(self.core.store.mailbox_changes_since(position).await?)
    }

    /// Reads missing rows for many mailboxes of one workspace, at most [`page_size`] rows each, as many as fit
    /// into [`REPAIR_BYTES`]. Waits for the memory; the frames hold it until they are dropped.
    ///
    /// Expired rows are dead-lettered first, with the statement of the expiry loop. A row that will never be delivered
    /// becomes a tombstone, but only after its terminal state is committed.
    pub async fn read_missing(
        &self,
        scope: WorkspaceScope,
        wants: &[RepairRequest],
    ) -> EngineResult<Vec<RepairedMailbox>> {
        let page = page_size(wants.len());
        let live: Vec<(WorkspaceScope, AgentId, Seq)> = wants
            .iter()
            // A page that is acknowledged as a whole is made of tombstones, without a read.
            .filter(|want| want.from + page > want.settled_below + 1)
            .map(|want| (scope, want.agent_id, want.from.max(want.settled_below + 1)))
            .collect();
        let mut pages = self.core.store.mailbox_pages(&live, page, self.core.now()).await?;
        if pages.iter().flat_map(|page| &page.rows).any(|row| is_overdue(row, self.core.now())) {
            let mailboxes: Vec<_> = live.iter().map(|(scope, agent, _)| (*scope, *agent)).collect();
            self.dead_letter_expired(&mailboxes).await?;
            pages = self.core.store.mailbox_pages(&live, page, self.core.now()).await?;
        }
        let read = self.read_fitting(scope, wants, pages).await?;
        let mut frames =
            FrameBuilder { page, payloads: SharedPayloads::default(), memory: read.memory, now: self.core.now() };
        let repaired: Vec<_> = wants
            .iter()
            .zip(read.mailboxes)
            .map(|(want, mailbox)| RepairedMailbox {
                agent_id: want.agent_id,
                frames: frames.repair_page(want, mailbox.read_to, &mailbox.rows),
            })
            .collect();
        let missed = wants
            .iter()
            .zip(&repaired)
            .map(|(want, read)| read.frames.iter().filter(|frame| frame.seq > want.resumed_to).count());
        metrics::counter!(relay_domain::metric_names::DELIVERIES_REPAIRED)
            .increment(u64::try_from(missed.sum::<usize>()).unwrap_or(0));
        Ok(repaired)
    }

    /// Reads the contents of the rows that fit into the memory of a repair. Mailboxes are in the order of `wants`.
    async fn read_fitting(
        &self,
        scope: WorkspaceScope,
        wants: &[RepairRequest],
        pages: Vec<MailboxPage>,
    ) -> EngineResult<FittingRows> {
        let mut by_agent: HashMap<AgentId, MailboxPage> = pages.into_iter().map(|page| (page.agent_id, page)).collect();
        let mut mailboxes: Vec<ReadMailbox> = wants
            .iter()
            .map(|want| match by_agent.remove(&want.agent_id) {
                Some(page) => ReadMailbox { rows: page.rows, read_to: page.head },
                // All of it is acknowledged, or the agent is deleted.
                None => ReadMailbox { rows: Vec::new(), read_to: want.settled_below },
            })
            .collect();
        let mut budget = ContentBudget::new(REPAIR_BYTES);
        let fitting = budget.fit_prefixes(&mailboxes.iter().map(|mailbox| mailbox.rows.as_slice()).collect::<Vec<_>>());
        for (mailbox, fitting) in mailboxes.iter_mut().zip(fitting) {
            if let Some(next) = mailbox.rows.get(fitting) {
                mailbox.read_to = next.seq - 1;
                mailbox.rows.truncate(fitting);
            }
        }
        // Before the contents are read. Rows without them are small, and their number is bounded.
        let memory = Arc::new(self.core.bodies.reserve(self.core.family(scope).await, budget.used()).await);
        let rows = mailboxes.iter_mut().flat_map(|mailbox| &mut mailbox.rows);
        // A settled row becomes a tombstone, which has no content.
        self.core.store.read_contents(rows.filter(|row| !row.settlement.is_some_and(Settlement::is_settled))).await?;
        Ok(FittingRows { mailboxes, memory })
    }

    /// Subscribes to the live copies for the sockets of a gateway.
    ///
    /// # Errors
    /// When the NATS client has been closed.
    pub async fn live_copies(&self, gateway: GatewayId) -> EngineResult<LiveCopies> {
        Ok(self.stream.subscribe_copies(gateway).await?)
    }

    /// Watches the NATS link: live copies arrive while it is up, and its count tells when some may have been lost.
    #[must_use]
    pub fn watch_link(&self) -> watch::Receiver<LinkState> {
        self.stream.watch_link()
    }
}

/// Returns the rows that a repair of so many mailboxes reads of each.
fn page_size(mailboxes: usize) -> Seq {
    let rows = Seq::try_from(REPAIR_ROWS / mailboxes.max(1)).unwrap_or(MAX_PAGE);
    rows.clamp(MIN_PAGE, MAX_PAGE)
}

fn is_overdue(row: &StoredDelivery, now: chrono::DateTime<Utc>) -> bool {
    row.expires_at <= now && !row.settlement.is_some_and(Settlement::is_settled)
}

/// Rows of a repair with their contents, and the memory that these take.
struct FittingRows {
    mailboxes: Vec<ReadMailbox>,
    memory: Arc<ByteLease>,
}

struct ReadMailbox {
    rows: Vec<StoredDelivery>,
    /// The head, or the last row that was read.
    read_to: Seq,
}

/// Builder of the frames of one repair.
struct FrameBuilder {
    page: Seq,
    payloads: SharedPayloads,
    memory: Arc<ByteLease>,
    now: chrono::DateTime<Utc>,
}

impl FrameBuilder {
    /// Builds one page of frames for a mailbox, contiguous from the requested seq. A seq up to `read_to` without a row
    /// was dropped with its partition: a tombstone stands for it.
    fn repair_page(&mut self, want: &RepairRequest, read_to: Seq, rows: &[StoredDelivery]) -> Vec<ReplayFrame> {
        let mut rows = rows.iter().peekable();
        let mut frames = Vec::new();
        let full = read_to.min(want.from + self.page - 1);
        for seq in want.from..=full {
            while rows.peek().is_some_and(|row| row.seq < seq) {
                rows.next();
            }
            // A later row proves that this one was dropped; without one, all rows up to the head were.
            let row = rows.peek().filter(|row| row.seq == seq && seq > want.settled_below);
            if row.is_some_and(|row| is_overdue(row, self.now)) {
                // It expired after the read: the next repair dead-letters it.
                break;
            }
            let body = row.and_then(|row| self.delivery(row)).unwrap_or_else(|| {
                ReplayBody::Tombstone(deliver_frame::tombstone_frame(want.agent_id, &want.agent_name, seq))
            });
            frames.push(ReplayFrame { seq, body });
        }
        frames
    }

    /// Builds the frame of a row; `None` when it is settled, or its content is no longer kept.
    fn delivery(&mut self, row: &StoredDelivery) -> Option<ReplayBody> {
        if row.settlement.is_some_and(Settlement::is_settled) {
            return None;
        }
        let frame = self.payloads.frame(row)?;
        let expires_at_ms = row.expires_at.timestamp_millis();
        Some(ReplayBody::Delivery { id: row.id(), frame, expires_at_ms, memory: Arc::clone(&self.memory) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repair_of_few_mailboxes_reads_more_rows_of_each() {
        assert_eq!([0, 1, 50, 51, 99, 100, 1000].map(page_size), [100, 100, 100, 98, 50, 50, 50]);
    }
}
