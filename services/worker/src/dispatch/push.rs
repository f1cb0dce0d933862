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
    push::{EndpointRecord, NodeEvent, Notice, PushQueue},
};
use relay_domain::{
    AgentId, AttemptId, NodeId, PushWorkerId, WorkspaceId, WorkspaceScope,
    mailboxes::stream::Seq,
    push::{
        attempt::{PushAttempt, RecordingPass},
        endpoint::{EndpointHealth, EndpointReport},
        mailbox::{LeasedMailbox, MailboxKey, MailboxRelease, PushPage},
    },
};
use relay_engine::{
    Engine,
    hints::Hint,
    push::{PushEndpoint, PushWorker},
};
use tokio::sync::broadcast::error::RecvError;

use super::queue_error;

/// Queue of one dispatcher.
pub(crate) struct EnginePushQueue {
    engine: Engine,
    worker: PushWorker,
}

impl EnginePushQueue {
    pub(crate) fn new(engine: Engine) -> Self {
        Self { worker: engine.push_worker(), engine }
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
        let hints = self.engine.hints().subscribe();
        let notices = stream::unfold(hints, |mut hints| async move {
            loop {
                let notice = match hints.recv().await {
                    Ok(hint) => notice(&hint),
                    Err(RecvError::Lagged(_)) => Some(Notice::Lagged),
                    Err(RecvError::Closed) => return None,
                };
                if let Some(notice) = notice {
                    return Some((notice, hints));
                }
            }
        });
        notices.boxed()
    }

    async fn renew_lease(&self, ttl: Duration) -> QueueResult<()> {
        self.worker.renew_lease(ttl).await.map_err(queue_error)
    }

    async fn live_workers(&self) -> QueueResult<Vec<PushWorkerId>> {
        self.worker.live_workers().await.map_err(queue_error)
    }

    async fn retire(&self) -> QueueResult<()> {
        self.worker.retire().await.map_err(queue_error)
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

    async fn read_pages(&self, mailboxes: &[(LeasedMailbox, Seq)]) -> QueueResult<Vec<PushPage>> {
        self.worker.read_pages(mailboxes).await.map_err(queue_error)
    }

    async fn record(&self, attempts: &[PushAttempt], pass: RecordingPass) -> QueueResult<HashSet<MailboxKey>> {
        self.worker.record(attempts, pass).await.map_err(queue_error)
    }

    async fn expire(&self, mailbox: MailboxKey) -> QueueResult<()> {
        self.engine.mailboxes().dead_letter_expired(&[mailbox]).await.map(|_| ()).map_err(queue_error)
    }

    async fn endpoint(&self, scope: WorkspaceScope, node: &NodeId) -> QueueResult<Option<EndpointRecord>> {
        let endpoint = self.worker.endpoint(scope, node).await.map_err(queue_error)?;
        Ok(endpoint.map(|PushEndpoint { settings, secrets, health }| EndpointRecord { settings, secrets, health }))
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

/// Translates a hint; `None` for those of no interest.
fn notice(hint: &Hint) -> Option<Notice> {
    let keys = |agents: &[(WorkspaceId, AgentId)]| {
        agents.iter().map(|(workspace, agent)| (WorkspaceScope::from_engine_row(*workspace), *agent)).collect()
    };
    match hint {
        Hint::DeliveriesDue { agents } => Some(Notice::Due(keys(agents))),
        Hint::MailboxesChanged { agents } => Some(Notice::Changed(keys(agents))),
        Hint::NodesChanged { workspace, nodes } => {
            Some(Notice::NodesChanged { scope: WorkspaceScope::from_engine_row(*workspace), nodes: nodes.clone() })
        }
        Hint::Notify { workspace, agents, topic, event, data, .. } => Some(Notice::Event(NodeEvent {
            scope: WorkspaceScope::from_engine_row(*workspace),
            agents: agents.clone(),
            topic: topic.clone(),
            kind: event.clone(),
            data: data.clone(),
        })),
        Hint::NoticeMissed { .. }
        | Hint::TokenDoubted { .. }
        | Hint::TokenRevoked { .. }
        | Hint::WorkspaceDeleted { .. }
        | Hint::QuotasChanged { .. }
        | Hint::ObserversChanged
        | Hint::MembersChanged { .. }
        | Hint::ProviderTaken { .. }
        | Hint::Invoke { .. } => None,
    }
}
