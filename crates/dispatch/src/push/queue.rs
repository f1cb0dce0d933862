//! [`PushQueue`]: what the dispatcher needs of the engine.

use std::{collections::HashSet, sync::Arc, time::Duration};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use futures::stream::BoxStream;
use relay_domain::{
    AgentId, AttemptId, NodeId, PushWorkerId, WorkspaceScope,
    mailboxes::stream::Seq,
    push::{
        attempt::{PushAttempt, RecordingPass},
        endpoint::{EndpointHealth, EndpointReport},
        mailbox::{LeasedMailbox, MailboxKey, MailboxRelease, PushPage},
        settings::{EndpointSecrets, EndpointSettings},
    },
    workspaces::family::FamilyId,
};
use relay_tasks::byte_budget::ByteLease;
use serde_json::Value;

use crate::QueueResult;

/// Mailboxes of http_push nodes, as one worker claims and settles them. Each write is fenced by the worker's lease and
/// the mailbox's epoch, so that a worker that has lost either changes nothing.
#[async_trait]
pub trait PushQueue: Send + Sync + 'static {
    /// Id of this worker, under which it holds its lease. New with each start.
    fn worker(&self) -> PushWorkerId;
    /// Current time by the clock that all workers share.
    fn now(&self) -> DateTime<Utc>;
    /// Creates the id of an attempt.
    fn new_attempt_id(&self) -> AttemptId;
    /// Guarded client for the URLs of tenants.
    fn client(&self) -> &relay_egress::Client;
    /// Notices from now on. A lost one costs time only.
    fn notices(&self) -> BoxStream<'static, Notice>;

    /// Acquires or renews the worker's lease. Returns the workers whose lease has not expired, in order.
    async fn renew_lease(&self, ttl: Duration) -> QueueResult<Vec<PushWorkerId>>;
    /// Releases all mailboxes and ends the lease.
    async fn retire(&self) -> QueueResult<()>;

    /// Waits while no mailbox is due.
    async fn wait_until_due(&self);
    /// Claims due mailboxes, at most `limit`, fairly between families of workspaces.
    async fn claim_due(&self, limit: i64) -> QueueResult<Vec<LeasedMailbox>>;
    /// Claims those of these mailboxes that no worker has.
    async fn claim(&self, mailboxes: &[MailboxKey]) -> QueueResult<Vec<LeasedMailbox>>;
    /// Releases a mailbox. A row that arrived meanwhile makes it due at once, unless it is blocked.
    async fn release(&self, release: &MailboxRelease) -> QueueResult<()>;
    /// Reads one page of each mailbox above a position, in the order given. `None` where memory does not suffice now.
    async fn read_pages(&self, mailboxes: &[(LeasedMailbox, Seq)]) -> QueueResult<Vec<Option<HeldPage>>>;
    /// Notes that this delivery is sent, whatever becomes of the attempt and its record.
    fn note_sent(&self, mailbox: &LeasedMailbox, seq: Seq);
    /// Records attempts with their effects. Returns the mailboxes that belong to other workers by now.
    async fn record(&self, attempts: &[PushAttempt], pass: RecordingPass) -> QueueResult<HashSet<MailboxKey>>;
    /// Makes the overdue deliveries of a mailbox dead letters.
    async fn expire(&self, mailbox: MailboxKey) -> QueueResult<()>;

    /// Reads the endpoint of a node; `None` when the node is deleted or is no http_push node.
    ///
    /// # Errors
    /// Also when its secrets cannot be decrypted here, or do not suffice for its authentication.
    async fn endpoint(&self, scope: WorkspaceScope, node: &NodeId) -> QueueResult<Option<EndpointRecord>>;
    /// Claims the one call that probes an endpoint after the breaker's open period.
    async fn claim_probe(&self, scope: WorkspaceScope, node: &NodeId, ttl: Duration) -> QueueResult<bool>;
    /// Adds a report of this worker, and returns the endpoint's health.
    async fn report(&self, report: &EndpointReport) -> QueueResult<EndpointHealth>;

    /// Lists the agents of a workspace on http_push nodes, with their nodes.
    async fn agents(&self, scope: WorkspaceScope) -> QueueResult<Vec<(AgentId, NodeId)>>;
}

/// Page, and the memory that its rows take until it is dropped.
#[derive(Debug)]
pub struct HeldPage {
    pub page: PushPage,
    pub _memory: Arc<ByteLease>,
}

/// Endpoint of a node, with the health that all workers have reported.
#[derive(Debug)]
pub struct EndpointRecord {
    /// Tenant that its calls count for.
    pub family: FamilyId,
    pub settings: EndpointSettings,
    pub secrets: EndpointSecrets,
    pub health: EndpointHealth,
}

/// Change that the dispatcher may act on at once.
#[derive(Debug)]
pub enum Notice {
    /// Deliveries of these mailboxes are due.
    Due(Vec<MailboxKey>),
    /// Rows of these mailboxes were written or settled.
    Changed(Vec<MailboxKey>),
    /// These nodes, their endpoints or their agents changed.
    NodesChanged { scope: WorkspaceScope, nodes: Vec<NodeId> },
    /// Event for agents.
    Event(NodeEvent),
    /// Notices were lost.
    Lagged,
}

/// Event without a delivery, for agents on http_push nodes.
#[derive(Debug)]
pub struct NodeEvent {
    pub scope: WorkspaceScope,
    /// Agents that it is for; `None` for all of the workspace.
    pub agents: Option<Vec<AgentId>>,
    /// `presence`, `channel`, `thread` or `agent`.
    pub topic: String,
    pub kind: String,
    pub data: Value,
}
