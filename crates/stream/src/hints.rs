//! Hints between processes. A hint announces a possible change, and the receiver reads the rows; losing one costs
//! latency only.

use futures::StreamExt as _;
use relay_domain::{AgentId, ChannelId, GatewayId, NodeId, ProviderName, WorkspaceId};
use serde::{Deserialize, Serialize};

use crate::{Stream, StreamError, StreamResult, subjects};

/// Announcement of a possible change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "hint", rename_all = "snake_case")]
pub enum Hint {
    /// Agents were bound to or unbound from these nodes, or a node's token changed.
    NodesChanged {
        /// Id of the workspace.
        workspace: WorkspaceId,
        /// Ids of the nodes.
        nodes: Vec<NodeId>,
    },
    /// Rows were written to or settled in these mailboxes by other means than their sockets.
    MailboxesChanged {
        /// Workspace and agent of each mailbox.
        agents: Vec<(WorkspaceId, AgentId)>,
    },
    /// Rows were written to these mailboxes of agents without a socket. Receivers that dispatch or claim for them read
    /// the rows.
    DeliveriesDue {
        /// Workspace and agent of each mailbox.
        agents: Vec<(WorkspaceId, AgentId)>,
    },
    /// A token was revoked.
    TokenRevoked {
        /// SHA-256 of the token in lower-case hex.
        hash: String,
    },
    /// A workspace was deleted, and with it all of its tokens.
    WorkspaceDeleted {
        /// Id of the workspace.
        workspace: WorkspaceId,
    },
    /// The plan or the quotas of a workspace changed.
    QuotasChanged {
        /// Id of the workspace.
        workspace: WorkspaceId,
    },
    /// Observer tokens were changed, rotated or revoked, or their signing keys changed.
    ObserversChanged,
    /// A channel's membership, mutes or archived flag changed.
    MembersChanged {
        /// Id of the workspace.
        workspace: WorkspaceId,
        /// Id of the channel.
        channel: ChannelId,
    },
    /// A provider was taken over; its older connections must close.
    ProviderTaken {
        /// Id of the workspace.
        workspace: WorkspaceId,
        /// Id of the node.
        node: NodeId,
        /// Name of the provider.
        provider: String,
        /// Epoch of the new connection.
        epoch: i64,
    },
    /// An invocation waits for a socket of this gateway.
    Invoke {
        /// Id of the workspace.
        workspace: WorkspaceId,
        /// Id of the node.
        node: NodeId,
        /// Name of the provider.
        provider: ProviderName,
        /// Id of the invocation.
        invocation: i64,
        /// Number of the attempt.
        attempt: i32,
        /// Frame to write; `None` if the receiver has to read it from Postgres.
        frame: Option<String>,
    },
    /// A best-effort event for agents' sockets, never replayed.
    Notify {
        /// Id of the workspace.
        workspace: WorkspaceId,
        /// Recipients; `None` for all direct nodes of the workspace.
        agents: Option<Vec<AgentId>>,
        /// `presence`, `channel`, `thread` or `agent`.
        topic: String,
        /// Name of the event.
        event: String,
        /// Data of the event, an object.
        data: serde_json::Value,
        /// Id for a `deliver` frame with seq 0; `None` for a `context.update`.
        event_id: Option<String>,
    },
}

/// Hint with its sender, so that a process can ignore its own hints.
#[derive(Serialize, Deserialize)]
struct Envelope<H> {
    origin: String,
    #[serde(flatten)]
    hint: H,
}

/// Subscription to the hints of other processes.
pub struct Hints {
    subscriber: async_nats::Subscriber,
    origin: String,
}

impl Hints {
    /// Returns the next hint, or `None` once the client is closed. Skips unknown hints, which newer versions send.
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
    /// Sends a hint to all other processes. Drops it while NATS is unavailable.
    pub async fn send_hint(&self, hint: &Hint) {
        if !self.is_up() {
            return;
        }
        let Ok(payload) = serde_json::to_vec(&Envelope { origin: self.origin.to_string(), hint }) else { return };
        if let Err(error) = self.client.publish(subjects::HINTS, payload.into()).await {
            tracing::debug!(%error, "failed to send a hint");
        }
    }

    /// Sends a hint to one gateway. Drops it while NATS is unavailable.
    pub async fn send_hint_to(&self, gateway: GatewayId, hint: &Hint) {
        if !self.is_up() {
            return;
        }
        let Ok(payload) = serde_json::to_vec(&Envelope { origin: self.origin.to_string(), hint }) else { return };
        if let Err(error) = self.client.publish(subjects::gateway_hint_subject(gateway), payload.into()).await {
            tracing::debug!(%error, "failed to send a hint");
        }
    }

    /// Subscribes to the hints of all other processes.
    ///
    /// # Errors
    /// If the client is closed.
    pub async fn subscribe_hints(&self) -> StreamResult<Hints> {
        self.subscribe_to(subjects::HINTS.to_owned()).await
    }

    /// Subscribes to the hints for one gateway.
    ///
    /// # Errors
    /// If the client is closed.
    pub async fn subscribe_hints_to(&self, gateway: GatewayId) -> StreamResult<Hints> {
        self.subscribe_to(subjects::gateway_hint_subject(gateway)).await
    }

    async fn subscribe_to(&self, subject: String) -> StreamResult<Hints> {
        let subscriber = self.client.subscribe(subject).await.map_err(StreamError::from_nats("listening to hints"))?;
        Ok(Hints { subscriber, origin: self.origin.to_string() })
    }
}
