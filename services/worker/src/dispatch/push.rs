//! Mailboxes of http_push nodes.

use std::{collections::HashSet, time::Duration};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use relay_dispatch::{
    QueueResult,
    push::{EndpointRecord, HeldPage, NodeEvent, Notice, PushQueue},
};
use relay_domain::{
    AgentId, AttemptId, NodeId, PushWorkerId, WorkspaceId, WorkspaceScope,
    mailboxes::stream::Seq,
    push::{
        attempt::{PushAttempt, RecordingPass},
        endpoint::{EndpointHealth, EndpointReport},
        mailbox::{LeasedMailbox, MailboxKey, MailboxRelease},
    },
};
use relay_engine::{
    Engine,
    due_work::{WorkKind, WorkWatch},
    hints::Hint,
    push::{self, PushEndpoint, PushWorker},
};
use tokio::sync::broadcast::error::RecvError;

use super::queue_error;

/// Time within which a due mailbox without a notice is claimed.
const CLAIM_WITHIN: Duration = Duration::from_millis(250);

/// Queue of one dispatcher.
pub(crate) struct EnginePushQueue {
    engine: Engine,
    worker: PushWorker,
    due: WorkWatch,
}

impl EnginePushQueue {
    pub(crate) fn new(engine: Engine) -> Self {
        let due = engine.due_work().watch(WorkKind::DuePushMailboxes, CLAIM_WITHIN);
        Self { worker: engine.push_worker(), due, engine }
    }
}

#[async_trait]
impl PushQueue for EnginePushQueue {
    fn worker(&self) -> PushWorkerId {
        self.worker.id()
    }

    fn now(&self) -> DateTime<Utc> {
        self.engine.now()
    }

    fn new_attempt_id(&self) -> AttemptId {
        self.worker.new_attempt_id()
    }

    fn client(&self) -> &relay_egress::Client {
        self.engine.egress()
    }

    fn notices(&self) -> BoxStream<'static, Notice> {
        // Two queues, so that a flood of events displaces no change (ADR 0006).
        let changes = stream::unfold(self.engine.hints().subscribe(), |mut hints| async move {
            let notices = match hints.recv().await {
                Ok(hint) => notices(&hint),
                Err(RecvError::Lagged(_)) => vec![Notice::Lagged],
                Err(RecvError::Closed) => return None,
            };
            Some((notices, hints))
        });
        // Lost events are no reason to look at all mailboxes.
        let events = stream::unfold(self.engine.hints().subscribe_notices(), |mut hints| async move {
            let events = match hints.recv().await {
                Ok(hint) => notices(&hint),
                Err(RecvError::Lagged(_)) => Vec::new(),
                Err(RecvError::Closed) => return None,
            };
            Some((events, hints))
        });
        stream::select(changes, events).flat_map(stream::iter).boxed()
    }

    async fn renew_lease(&self, ttl: Duration) -> QueueResult<Vec<PushWorkerId>> {
        self.worker.renew_lease(ttl).await.map_err(queue_error)
    }

    async fn retire(&self) -> QueueResult<()> {
        self.worker.retire().await.map_err(queue_error)
    }

    async fn wait_until_due(&self) {
        // Waiting needs a receiver of its own. A clone sees the last read, so nothing is missed.
        self.due.clone().wait().await;
    }

    async fn claim_due(&self, limit: i64) -> QueueResult<Vec<LeasedMailbox>> {
        self.worker.claim_due(limit).await.map_err(queue_error)
    }

    async fn claim(&self, mailboxes: &[MailboxKey]) -> QueueResult<Vec<LeasedMailbox>> {
        self.worker.claim(mailboxes).await.map_err(queue_error)
    }

    async fn release(&self, release: &MailboxRelease) -> QueueResult<()> {
        self.worker.release(release).await.map_err(queue_error)
    }

    async fn read_pages(&self, mailboxes: &[(LeasedMailbox, Seq)]) -> QueueResult<Vec<Option<HeldPage>>> {
        let pages = self.worker.read_pages(mailboxes).await.map_err(queue_error)?;
        let held = |page: push::HeldPage| HeldPage { page: page.page, _memory: page.memory };
        Ok(pages.into_iter().map(|page| page.map(held)).collect())
    }

    fn note_sent(&self, mailbox: &LeasedMailbox, seq: Seq) {
        self.engine.recovery().note_pushed(mailbox, seq);
    }

    async fn record(&self, attempts: &[PushAttempt], pass: RecordingPass) -> QueueResult<HashSet<MailboxKey>> {
        self.worker.record(attempts, pass).await.map_err(queue_error)
    }

    async fn expire(&self, mailbox: MailboxKey) -> QueueResult<()> {
        self.engine.mailboxes().dead_letter_expired(&[mailbox]).await.map(|_| ()).map_err(queue_error)
    }

    async fn endpoint(&self, scope: WorkspaceScope, node: &NodeId) -> QueueResult<Option<EndpointRecord>> {
        let endpoint = self.worker.endpoint(scope, node).await.map_err(queue_error)?;
        let record = |endpoint: PushEndpoint| {
            let PushEndpoint { family, settings, secrets, health } = endpoint;
            EndpointRecord { family, settings, secrets, health }
        };
        Ok(endpoint.map(record))
    }

    async fn claim_probe(&self, scope: WorkspaceScope, node: &NodeId, ttl: Duration) -> QueueResult<bool> {
        self.worker.claim_probe(scope, node, ttl).await.map_err(queue_error)
    }

    async fn report(&self, report: &EndpointReport) -> QueueResult<EndpointHealth> {
        self.worker.report(report).await.map_err(queue_error)
    }

    async fn agents(&self, scope: WorkspaceScope) -> QueueResult<Vec<(AgentId, NodeId)>> {
        self.worker.agents(scope).await.map_err(queue_error)
    }
}

/// Translates a hint; empty for those of no interest.
fn notices(hint: &Hint) -> Vec<Notice> {
    let keys = |agents: &[(WorkspaceId, AgentId)]| {
        agents.iter().map(|(workspace, agent)| (WorkspaceScope::from_engine_row(*workspace), *agent)).collect()
    };
    match hint {
        Hint::DeliveriesDue { agents } => vec![Notice::Due(keys(agents))],
        Hint::MailboxesChanged { agents } => vec![Notice::Changed(keys(agents))],
        Hint::NodesChanged { workspace, nodes } => {
            vec![Notice::NodesChanged { scope: WorkspaceScope::from_engine_row(*workspace), nodes: nodes.clone() }]
        }
        Hint::Notify { workspace, agents, topic, event, data, .. } => vec![Notice::Event(NodeEvent {
            scope: WorkspaceScope::from_engine_row(*workspace),
            agents: agents.clone(),
            topic: topic.clone(),
            kind: event.clone(),
            data: data.clone(),
        })],
        Hint::NotifyEach { workspace, agent, topic, event, each } => {
            let events = each.iter().cloned().map(|data| {
                Notice::Event(NodeEvent {
                    scope: WorkspaceScope::from_engine_row(*workspace),
                    agents: Some(vec![*agent]),
                    topic: topic.clone(),
                    kind: event.clone(),
                    data,
                })
            });
            events.collect()
        }
        Hint::NoticeMissed { .. }
        | Hint::TokenDoubted { .. }
        | Hint::TokenRevoked { .. }
        | Hint::WorkspaceDeleted { .. }
        | Hint::QuotasChanged { .. }
        | Hint::ObserversChanged
        | Hint::MembersChanged { .. }
        | Hint::ProviderTaken { .. }
        | Hint::Invoke { .. } => Vec::new(),
    }
}
