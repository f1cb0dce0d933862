//! Hints between processes. A hint says "look", nothing more: losing one costs latency.

use futures::StreamExt as _;
use relay_domain::{AgentId, ChannelId, NodeId, WorkspaceId};
use serde::{Deserialize, Serialize};

use crate::{Stream, StreamError, StreamResult, subjects};

/// What may have changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "hint", rename_all = "snake_case")]
pub enum Hint {
    /// Agents came to or left these nodes, or a node's token changed.
    NodesChanged {
        /// The tenant.
        workspace: WorkspaceId,
        /// The nodes.
        nodes: Vec<NodeId>,
    },
    /// Rows were written or settled in these mailboxes otherwise than over their sockets.
    MailboxesChanged {
        /// The mailboxes.
        agents: Vec<(WorkspaceId, AgentId)>,
    },
    /// A token, given by its hash in hex, no longer holds.
    TokenRevoked {
        /// Lower-case hex SHA-256.
        hash: String,
    },
    /// A channel's membership, mutes or archived flag changed.
    MembersChanged {
        /// The tenant.
        workspace: WorkspaceId,
        /// The channel.
        channel: ChannelId,
    },
    /// A provider was taken over: older connections of it must close.
    ProviderTaken {
        /// The tenant.
        workspace: WorkspaceId,
        /// The node.
        node: NodeId,
        /// The provider.
        provider: String,
        /// The epoch that now holds it.
        epoch: i64,
    },
    /// A best-effort event for agents' sockets (`context.update`), never replayed.
    Notify {
        /// The tenant.
        workspace: WorkspaceId,
        /// Whose sockets.
        agents: Vec<AgentId>,
        /// presence, channel, thread or agent.
        topic: String,
        /// The event's name.
        event: String,
        /// Its data, an object.
        data: serde_json::Value,
    },
}

/// A hint as it travels: who sent it, so that nobody hears its own.
#[derive(Serialize, Deserialize)]
struct Envelope<H> {
    origin: String,
    #[serde(flatten)]
    hint: H,
}

/// Hints from the other processes.
pub struct Hints {
    subscriber: async_nats::Subscriber,
    origin: String,
}

impl Hints {
    /// The next hint; `None` once the client has been closed. What cannot be read is skipped: it is
    /// from a newer version.
    pub async fn next(&mut self) -> Option<Hint> {
        loop {
            let message = self.subscriber.next().await?;
            match serde_json::from_slice::<Envelope<Hint>>(&message.payload) {
                Ok(envelope) if envelope.origin == self.origin => {}
                Ok(envelope) => return Some(envelope.hint),
                Err(error) => tracing::debug!(%error, "skipped an unknown hint"),
            }
        }
    }
}

impl Stream {
    /// Sends a hint to all other processes. With NATS away it is dropped.
    pub async fn hint(&self, hint: &Hint) {
        if !self.is_up() {
            return;
        }
        let Ok(payload) = serde_json::to_vec(&Envelope { origin: self.origin.to_string(), hint }) else { return };
        if let Err(error) = self.client.publish(subjects::HINTS, payload.into()).await {
            tracing::debug!(%error, "a hint was not sent");
        }
    }

    /// Listens to the hints of all other processes.
    ///
    /// # Errors
    /// When the client has been closed.
    pub async fn hints(&self) -> StreamResult<Hints> {
        let subscriber =
            self.client.subscribe(subjects::HINTS).await.map_err(StreamError::from_nats("listening to hints"))?;
        Ok(Hints { subscriber, origin: self.origin.to_string() })
    }
}
