//! Hints between processes. A hint says "look", nothing more: losing one costs latency.

use futures::StreamExt as _;
use relay_domain::{AgentId, ChannelId, GatewayId, NodeId, ProviderName, WorkspaceId};
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
    /// Rows were written in these mailboxes, whose agents are on nodes without a socket: who pushes to them, or waits
    /// for them, is to look.
    DeliveriesDue {
        /// The mailboxes.
        agents: Vec<(WorkspaceId, AgentId)>,
    },
    /// A token, given by its hash in hex, no longer holds.
    TokenRevoked {
        /// Lower-case hex SHA-256.
        hash: String,
    },
    /// What a workspace may use changed.
    QuotasChanged {
        /// The tenant.
        workspace: WorkspaceId,
    },
    /// Observer tokens were changed, rotated or revoked, or the keys that sign them.
    ObserversChanged,
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
    /// An invocation is to be written to a socket of this gateway.
    Invoke {
        /// The tenant.
        workspace: WorkspaceId,
        /// The node.
        node: NodeId,
        /// The provider.
        provider: ProviderName,
        /// The invocation.
        invocation: i64,
        /// Which try.
        attempt: i32,
        /// The frame; none: look for it.
        frame: Option<String>,
    },
    /// A best-effort event for agents' sockets, never replayed.
    Notify {
        /// The tenant.
        workspace: WorkspaceId,
        /// Whose sockets; none: those of all direct nodes of the workspace.
        agents: Option<Vec<AgentId>>,
        /// presence, channel, thread or agent.
        topic: String,
        /// The event's name.
        event: String,
        /// Its data, an object.
        data: serde_json::Value,
        /// Names the event when it goes out as a `deliver` frame with seq 0; none: a `context.update`.
        event_id: Option<String>,
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

    /// Sends a hint to one gateway. With NATS away it is dropped.
    pub async fn hint_to(&self, gateway: GatewayId, hint: &Hint) {
        if !self.is_up() {
            return;
        }
        let Ok(payload) = serde_json::to_vec(&Envelope { origin: self.origin.to_string(), hint }) else { return };
        if let Err(error) = self.client.publish(subjects::gateway_hints(gateway), payload.into()).await {
            tracing::debug!(%error, "a hint was not sent");
        }
    }

    /// Listens to the hints of all other processes.
    ///
    /// # Errors
    /// When the client has been closed.
    pub async fn hints(&self) -> StreamResult<Hints> {
        self.listen(subjects::HINTS.to_owned()).await
    }

    /// Listens to the hints for one gateway.
    ///
    /// # Errors
    /// When the client has been closed.
    pub async fn hints_to(&self, gateway: GatewayId) -> StreamResult<Hints> {
        self.listen(subjects::gateway_hints(gateway)).await
    }

    async fn listen(&self, subject: String) -> StreamResult<Hints> {
        let subscriber = self.client.subscribe(subject).await.map_err(StreamError::from_nats("listening to hints"))?;
        Ok(Hints { subscriber, origin: self.origin.to_string() })
    }
}
