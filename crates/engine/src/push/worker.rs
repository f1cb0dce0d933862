//! [`PushWorker`]: mailboxes of http_push nodes under the lease of one worker.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use relay_domain::{
    AgentId, AttemptId, NodeId, PushWorkerId, WorkspaceScope,
    events::{Event, kind},
    mailboxes::{ContentBudget, dead_letter::DeadLetterReason, delivery::Settlement, stream::Seq},
    metric_names,
    push::{
        BREAKER_FAILURES, BREAKER_OPEN,
        attempt::{AttemptOutcome, PushAttempt, RecordingPass},
        endpoint::{EndpointHealth, EndpointReport},
        mailbox::{LeasedMailbox, MailboxKey, MailboxRelease, PushPage},
        settings::{EndpointSecrets, EndpointSettings},
    },
    workspaces::family::FamilyId,
};
use relay_store::{Store, mailboxes::expiry::DeadLetteredDelivery, push::record::RecordedAttempts};
use relay_tasks::byte_budget::ByteLease;
use relay_wire::{events::data::BindingDisabled, field::ToValue as _};

use crate::{Engine, EngineError, EngineResult, access::secrets::Secrets, core::Core, error::Fault};

/// Older rows have expired, whatever their workspace's TTL (six days at most).
const OLDEST_LIVE_ROW: chrono::Duration = chrono::Duration::days(7);

/// Bound of the contents of one workspace that one read returns.
const PAGE_BYTES: usize = 1024 * 1024;

/// Mailboxes of http_push nodes as one worker claims and settles them. Its writes change nothing once its lease has
/// expired or a mailbox has another epoch.
#[derive(Clone)]
pub struct PushWorker {
    core: Core,
    secrets: Arc<Secrets>,
    id: PushWorkerId,
    /// Connections of their own for what runs many times a second.
    reads: Store,
    records: Store,
}

/// Page, and the memory that its contents take.
#[derive(Debug)]
pub struct HeldPage {
    pub page: PushPage,
    pub memory: Arc<ByteLease>,
}

/// Endpoint of an http_push node.
#[derive(Debug)]
pub struct PushEndpoint {
    /// Tenant that its calls count for.
    pub family: FamilyId,
    pub settings: EndpointSettings,
    /// They suffice for the authentication of the settings.
    pub secrets: EndpointSecrets,
    pub health: EndpointHealth,
}

impl Engine {
    /// Creates a worker, which has no lease yet. Its id is new, so that mailboxes of an earlier process are fenced
    /// without looking at its lease.
    #[must_use]
    pub fn push_worker(&self) -> PushWorker {
        PushWorker {
            id: PushWorkerId::new(self.next_id()),
            reads: self.store().with_dedicated_connection(),
            records: self.store().with_dedicated_connection(),
            core: self.inner.core.clone(),
            secrets: Arc::clone(&self.inner.secrets),
        }
    }
}

impl PushWorker {
    #[must_use]
    pub const fn id(&self) -> PushWorkerId {
        self.id
    }

    #[must_use]
    pub fn new_attempt_id(&self) -> AttemptId {
        AttemptId::new(self.core.next_id())
    }

    /// Acquires or renews the lease. Returns the workers whose lease has not expired, in order.
    pub async fn renew_lease(&self, ttl: Duration) -> EngineResult<Vec<PushWorkerId>> {
        Ok(self.core.store.renew_push_worker(self.id, ttl).await?)
    }

    /// Releases all mailboxes and ends the lease.
    pub async fn retire(&self) -> EngineResult<()> {
        Ok(self.core.store.retire_push_worker(self.id).await?)
    }

    /// Claims due mailboxes, at most `limit`, fairly between families of workspaces.
    pub async fn claim_due(&self, limit: i64) -> EngineResult<Vec<LeasedMailbox>> {
        Ok(self.core.store.claim_due_mailboxes(self.id, limit).await?)
    }

    /// Claims those of these mailboxes that no worker has.
    pub async fn claim(&self, mailboxes: &[MailboxKey]) -> EngineResult<Vec<LeasedMailbox>> {
        Ok(self.core.store.claim_mailboxes(self.id, mailboxes).await?)
    }

    /// Releases a mailbox.
    pub async fn release(&self, release: &MailboxRelease) -> EngineResult<()> {
        Ok(self.core.store.release_mailboxes(self.id, std::slice::from_ref(release)).await?)
    }

    /// Reads one page of each mailbox above a position, in the order given, as many rows as fit into memory. `None` for
    /// mailboxes of a family whose pages in use leave no room.
    pub async fn read_pages(&self, mailboxes: &[(LeasedMailbox, Seq)]) -> EngineResult<Vec<Option<HeldPage>>> {
        // Without the contents: only rows that fit are read completely, after their memory was reserved.
        let pages = self.reads.read_push_pages(self.id, mailboxes, self.core.now() - OLDEST_LIVE_ROW).await?;
        let mut by_family: HashMap<FamilyId, Vec<(usize, PushPage)>> = HashMap::new();
        for (at, page) in pages.into_iter().enumerate() {
            by_family.entry(self.core.family(page.scope).await).or_default().push((at, page));
        }
        let mut held: Vec<Option<HeldPage>> = mailboxes.iter().map(|_| None).collect();
        for (family, mut pages) in by_family {
            let free = self.core.bodies.free(family);
            // `free` may be outdated by the time of the reservation, which then fails and gives the mailboxes no page.
            let mut budget = ContentBudget::new(free.min(PAGE_BYTES));
            let fitting = budget.fit_prefixes(&pages.iter().map(|(_, page)| page.rows.as_slice()).collect::<Vec<_>>());
            // The next read must not wait for endpoints of this family.
            let Some(memory) = self.core.bodies.try_reserve(family, budget.used()) else { continue };
            let memory = Arc::new(memory);
            for ((at, mut page), fitting) in pages.drain(..).zip(fitting) {
                // The rows that were cut off are read with the next page.
                page.has_more |= fitting < page.rows.len();
                page.rows.truncate(fitting);
                held[at] = Some(HeldPage { page, memory: Arc::clone(&memory) });
            }
        }
        // Settled rows are only passed, so their contents are not needed.
        let rows = held.iter_mut().flatten().flat_map(|held| &mut held.page.rows).map(|row| &mut row.delivery);
        let unsettled = rows.filter(|row| !row.settlement.is_some_and(Settlement::is_settled));
        self.reads.read_contents(unsettled).await?;
        Ok(held)
    }

    /// Records attempts with their effects and events. Returns the mailboxes that belong to other workers by now.
    pub async fn record(&self, attempts: &[PushAttempt], pass: RecordingPass) -> EngineResult<HashSet<MailboxKey>> {
        let mut done = self.records.record_attempts(self.id, attempts, own_events, pass, self.core.now()).await?;
        std::mem::take(&mut done.recorded).into_iter().for_each(|recorded| self.core.announce(recorded));
        self.notify_senders(attempts, &done);
        Ok(done.lost)
    }

    /// Notifies senders of deliveries that became dead letters.
    fn notify_senders(&self, attempts: &[PushAttempt], done: &RecordedAttempts) {
        // Only deliveries that this transaction gave up: a row that another writer settled meanwhile keeps that
        // outcome.
        for attempt in attempts.iter().filter(|attempt| done.is_dead_lettered(attempt)) {
            let AttemptOutcome::DeadLettered { reason } = attempt.outcome else { continue };
            metrics::counter!(metric_names::DELIVERIES_DEAD_LETTERED, "reason" => reason.as_str()).increment(1);
            let Some(sender) = attempt.sender else { continue };
            let notice = dead_letter(attempt, reason).notice();
            self.core.hints.notify(attempt.mailbox.scope, vec![sender], "agent", kind::DELIVERY_FAILED, notice);
        }
    }

    /// Reads the endpoint of a node; `None` when the node is deleted or is no http_push node.
    ///
    /// # Errors
    /// Also when its secrets cannot be decrypted here, or do not suffice for its authentication.
    pub async fn endpoint(&self, scope: WorkspaceScope, node: &NodeId) -> EngineResult<Option<PushEndpoint>> {
        let Some(row) = self.core.store.push_endpoint(scope, node).await? else { return Ok(None) };
        let secrets = self.secrets.open_node_delivery(scope, node, row.secret.as_ref())?;
        if !secrets.suffice_for(&row.settings.auth) {
            return Err(EngineError::Internal(Fault::EndpointSecretUnusable));
        }
        Ok(Some(PushEndpoint { family: row.family, settings: row.settings, secrets, health: row.health }))
    }

    /// Claims the one call that probes an endpoint after the breaker's open period.
    pub async fn claim_probe(&self, scope: WorkspaceScope, node: &NodeId, ttl: Duration) -> EngineResult<bool> {
        Ok(self.core.store.claim_endpoint_probe(scope, node, ttl).await?)
    }

    /// Adds a report to the endpoint's health, and returns it.
    pub async fn report(&self, report: &EndpointReport) -> EngineResult<EndpointHealth> {
        Ok(self.core.store.record_endpoint_report(report, BREAKER_FAILURES, BREAKER_OPEN).await?)
    }

    /// Lists the agents of a workspace on http_push nodes, with their nodes.
    pub async fn agents(&self, scope: WorkspaceScope) -> EngineResult<Vec<(AgentId, NodeId)>> {
        Ok(self.core.store.http_push_agents(scope).await?)
    }
}

/// Returns the events of an attempt itself, which are recorded whether or not its workspace is watched.
fn own_events(attempt: &PushAttempt) -> Vec<Event> {
    let mailbox = &attempt.mailbox;
    match &attempt.outcome {
        AttemptOutcome::Delivered | AttemptOutcome::Acked | AttemptOutcome::Retry { .. } => Vec::new(),
        AttemptOutcome::DeadLettered { reason } => vec![dead_letter(attempt, *reason).event()],
        AttemptOutcome::Disabled { reason, .. } => {
            let data = BindingDisabled {
                node_id: mailbox.node_id.as_str(),
                agent_id: mailbox.agent_id,
                agent_name: &mailbox.agent_name,
                reason,
            };
            vec![Event::new(kind::NODE_BINDING_DISABLED, data.to_value()).by_agent(mailbox.agent_id)]
        }
    }
}

fn dead_letter(attempt: &PushAttempt, reason: DeadLetterReason) -> DeadLetteredDelivery {
    DeadLetteredDelivery {
        scope: attempt.mailbox.scope,
        delivery_id: attempt.delivery_id,
        seq: attempt.seq,
        reason,
        error: attempt.http.error.clone(),
        agent_name: Some(attempt.mailbox.agent_name.clone()),
        sender: None,
        place: attempt.location.clone(),
    }
}
