//! Hints: "look at this". They go to every part of this process and, over NATS, to every other one.
//! A hint has no authority, and losing one costs latency.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use relay_domain::{AgentId, ChannelId, NodeId, ProviderName, WorkspaceScope, token::TokenHash};
pub use relay_stream::Hint;
use relay_stream::Stream;
use tokio::sync::{broadcast, mpsc};

use crate::{Engine, Inner};

/// How many hints may wait for a slow listener, or for NATS, before the oldest or newest is lost.
const WAITING: usize = 4096;

const SUBSCRIBE_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// Where hints of this process start from.
#[derive(Debug)]
pub struct Hints {
    local: broadcast::Sender<Arc<Hint>>,
    remote: mpsc::Sender<Arc<Hint>>,
}

impl Hints {
    /// Hints, and the queue that [`forward`] empties into NATS.
    pub(crate) fn new() -> (Self, mpsc::Receiver<Arc<Hint>>) {
        let (remote, queue) = mpsc::channel(WAITING);
        (Self { local: broadcast::channel(WAITING).0, remote }, queue)
    }

    /// Hints of all processes from now on. A listener that lags by more than 4096 misses the oldest.
    #[must_use]
    pub fn listen(&self) -> broadcast::Receiver<Arc<Hint>> {
        self.local.subscribe()
    }

    /// A node, its bindings or its token changed.
    pub fn node_changed(&self, scope: WorkspaceScope, node: NodeId) {
        self.agents_moved(scope, vec![node]);
    }

    /// Agents came to, left or changed on these nodes.
    pub fn agents_moved(&self, scope: WorkspaceScope, nodes: Vec<NodeId>) {
        self.give(Hint::NodesChanged { workspace: scope.workspace_id(), nodes });
    }

    /// Rows of these mailboxes were written, or settled otherwise than over their sockets.
    pub fn mailboxes_changed(&self, agents: impl IntoIterator<Item = (WorkspaceScope, AgentId)>) {
        let agents: Vec<_> = agents.into_iter().map(|(scope, agent)| (scope.workspace_id(), agent)).collect();
        // A hint stays far below NATS' payload limit.
        for some in agents.chunks(1000) {
            self.give(Hint::MailboxesChanged { agents: some.to_vec() });
        }
    }

    /// Rows of one mailbox were written, or settled otherwise than over its socket.
    pub fn mailbox_changed(&self, scope: WorkspaceScope, agent: AgentId) {
        self.mailboxes_changed([(scope, agent)]);
    }

    /// A token is dead.
    pub fn token_revoked(&self, hash: TokenHash) {
        self.give(Hint::TokenRevoked { hash: hash.to_string() });
    }

    /// A channel's members, mutes or archived flag changed.
    pub fn members_changed(&self, scope: WorkspaceScope, channel: ChannelId) {
        self.give(Hint::MembersChanged { workspace: scope.workspace_id(), channel });
    }

    /// A provider is held under a new epoch: older connections of it close.
    pub fn provider_taken(&self, scope: WorkspaceScope, node: NodeId, provider: &ProviderName, epoch: i64) {
        let workspace = scope.workspace_id();
        self.give(Hint::ProviderTaken { workspace, node, provider: provider.to_string(), epoch });
    }

    /// A best-effort event for the sockets of these agents: `context.update`, never replayed.
    pub fn notify(
        &self,
        scope: WorkspaceScope,
        agents: Vec<AgentId>,
        topic: &str,
        event: &str,
        data: serde_json::Value,
    ) {
        self.give(Hint::Notify {
            workspace: scope.workspace_id(),
            agents,
            topic: topic.to_owned(),
            event: event.to_owned(),
            data,
        });
    }

    fn give(&self, hint: Hint) {
        let hint = Arc::new(hint);
        // Nobody listening is fine, and so is a full queue: the silence check finds what it hinted at.
        let _ = self.local.send(Arc::clone(&hint));
        let _ = self.remote.try_send(hint);
    }
}

/// Passes the hints of other processes to the listeners of this one, until the engine is gone.
pub(crate) async fn receive(engine: Weak<Inner>, stream: Stream) {
    let mut hints = loop {
        match stream.hints().await {
            Ok(hints) => break hints,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "waiting for nats");
                tokio::time::sleep(SUBSCRIBE_AGAIN_AFTER).await;
            }
        }
    };
    while let Some(hint) = hints.next().await {
        let Some(inner) = engine.upgrade() else { return };
        let _ = inner.hints.local.send(Arc::new(hint));
    }
}

/// What hints mean for the engine's own memory, until the engine is gone. A lagging listener forgets
/// more than it had to.
pub(crate) async fn obey(engine: Weak<Inner>, mut hints: broadcast::Receiver<Arc<Hint>>) {
    loop {
        let hint = hints.recv().await;
        let Some(inner) = engine.upgrade() else { return };
        match hint.as_deref() {
            Ok(Hint::TokenRevoked { hash }) => {
                if let Ok(hash) = hash.parse::<TokenHash>() {
                    Engine { inner }.forget_token(&hash);
                }
            }
            Ok(Hint::MembersChanged { workspace, channel }) => {
                inner.audiences.forget(WorkspaceScope::from_engine_row(*workspace), *channel);
            }
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => Engine { inner }.forget_all_tokens(),
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

/// Sends this process's hints to the others until the engine is gone.
pub(crate) async fn forward(stream: Stream, mut queue: mpsc::Receiver<Arc<Hint>>) {
    while let Some(hint) = queue.recv().await {
        stream.hint(&hint).await;
    }
}
