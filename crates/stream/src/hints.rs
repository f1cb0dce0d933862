//! Hints between processes. A hint announces a possible change, and the receiver reads the rows; losing one costs
//! latency only.
//!
//! Some hints carry what their receiver would read ([`Hint::Invoke`], [`Hint::Notify`]). They are signed, numbered and
//! dated. One that is not, or that was received before, is reduced to a wake-up ([`Hint::into_wake_up`]).

use std::{collections::HashMap, sync::atomic::Ordering};

use async_nats::HeaderMap;
use futures::StreamExt as _;
use relay_domain::{AgentId, ChannelId, GatewayId, NodeId, ProviderName, WorkspaceId};
use serde::{Deserialize, Serialize};

use crate::{
    Clock, FrameKeys, Stream, StreamError, StreamResult,
    mac::{CoveredParts, MAC, MessageKind},
    subjects,
};

/// Age at which a signed hint is only a wake-up, in milliseconds. An older one was recorded and sent again, or it
/// waited until its frame may have been replaced. Far above the difference between the clocks of two processes.
const MAX_AGE_MS: i64 = 60_000;
/// Senders remembered by a subscription before those that are silent are forgotten.
const SENDERS: usize = 256;

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
    /// A workspace was deleted, and with it all of its tokens. Receivers forget what they have cached, and ask storage.
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
    /// Several best-effort events of one kind for the socket of one agent, never replayed. Versions before this one
    /// ignore it.
    NotifyEach {
        /// Id of the workspace.
        workspace: WorkspaceId,
        /// Recipient.
        agent: AgentId,
        /// Topic of the events.
        topic: String,
        /// Name of the events.
        event: String,
        /// Data of each event, an object.
        each: Vec<serde_json::Value>,
    },
    /// Unverified [`Hint::Notify`]: these agents may have missed an event that storage knows.
    #[serde(skip)]
    NoticeMissed {
        /// Id of the workspace.
        workspace: WorkspaceId,
        /// Agents; `None` for all direct nodes of the workspace.
        agents: Option<Vec<AgentId>>,
    },
    /// Unverified [`Hint::TokenRevoked`]: cached knowledge of the token is dropped.
    #[serde(skip)]
    TokenDoubted {
        /// SHA-256 of the token in lower-case hex.
        hash: String,
    },
}

impl Hint {
    /// Reduces a hint to what its receiver can find in Postgres. Believing it costs a read.
    #[must_use]
    pub fn into_wake_up(self) -> Self {
        match self {
            Self::Invoke { workspace, node, provider, invocation, attempt, frame: _ } => {
                Self::Invoke { workspace, node, provider, invocation, attempt, frame: None }
            }
            Self::Notify { workspace, agents, topic: _, event: _, data: _, event_id: _ } => {
                Self::NoticeMissed { workspace, agents }
            }
            Self::NotifyEach { workspace, agent, topic: _, event: _, each: _ } => {
                Self::NoticeMissed { workspace, agents: Some(vec![agent]) }
            }
            // Connections older than the epoch would close.
            Self::ProviderTaken { workspace, node, provider: _, epoch: _ } => {
                Self::NodesChanged { workspace, nodes: vec![node] }
            }
            // Sockets opened with the token would close.
            Self::TokenRevoked { hash } => Self::TokenDoubted { hash },
            Self::NodesChanged { .. }
            | Self::MailboxesChanged { .. }
            | Self::DeliveriesDue { .. }
            | Self::QuotasChanged { .. }
            | Self::ObserversChanged
            | Self::MembersChanged { .. }
            | Self::WorkspaceDeleted { .. }
            | Self::NoticeMissed { .. }
            | Self::TokenDoubted { .. } => self,
        }
    }
}

/// Hint with its sender, so that a process can ignore its own hints.
#[derive(Serialize, Deserialize)]
struct Envelope<H> {
    origin: String,
    /// Number of the hint among those of its sender; 0 from versions that do not sign.
    #[serde(default)]
    number: u64,
    /// Time of sending, in unix milliseconds.
    #[serde(default)]
    sent_at_ms: i64,
    #[serde(flatten)]
    hint: H,
}

/// Latest verified hint of each sender, to recognize hints that are received again.
#[derive(Debug, Default)]
struct LatestHints(HashMap<String, LatestHint>);

#[derive(Debug, Clone, Copy)]
struct LatestHint {
    number: u64,
    sent_at_ms: i64,
}

impl LatestHints {
    /// Returns whether a verified hint is new, and remembers it. NATS delivers the hints of one sender in order.
    fn accept(&mut self, origin: &str, hint: LatestHint, now_ms: i64) -> bool {
        let is_recent = |sent_at_ms: i64| sent_at_ms.abs_diff(now_ms) <= MAX_AGE_MS.unsigned_abs();
        if !is_recent(hint.sent_at_ms) {
            return false;
        }
        if let Some(latest) = self.0.get_mut(origin) {
            let is_new = hint.number > latest.number;
            if is_new {
                *latest = hint;
            }
            return is_new;
        }
        if self.0.len() >= SENDERS {
            // All hints of a forgotten sender are too old to be accepted.
            self.0.retain(|_, latest| is_recent(latest.sent_at_ms));
        }
        // Exceeds the bound if all are recent: only processes with a key of the installation get here.
        self.0.insert(origin.to_owned(), hint);
        true
    }
}

/// Subscription to the hints of other processes.
pub struct Hints {
    subscriber: async_nats::Subscriber,
    subject: String,
    origin: String,
    keys: FrameKeys,
    clock: Clock,
    latest: LatestHints,
}

impl Hints {
    /// Returns the next hint, or `None` once the client is closed. Skips unknown hints, which newer versions send.
    /// Unverified hints are reduced to wake-ups.
    pub async fn next(&mut self) -> Option<Hint> {
        loop {
            let message = self.subscriber.next().await?;
            match serde_json::from_slice::<Envelope<Hint>>(&message.payload) {
                // Listeners of this process have received it directly.
                Ok(envelope) if envelope.origin == self.origin => {}
                Ok(envelope) if self.verify(&message, &envelope) => return Some(envelope.hint),
                Ok(envelope) => return Some(envelope.hint.into_wake_up()),
                Err(error) => tracing::debug!(%error, "skipped an unknown hint"),
            }
        }
    }

    fn verify(&mut self, message: &async_nats::Message, envelope: &Envelope<Hint>) -> bool {
        let code = message.headers.as_ref().and_then(|headers| headers.get(MAC)).map(|value| value.as_str());
        let covered = CoveredParts { subject: &self.subject, fields: &[], body: &message.payload };
        if !self.keys.verify(MessageKind::Hint, code, &covered) {
            return false;
        }
        let hint = LatestHint { number: envelope.number, sent_at_ms: envelope.sent_at_ms };
        let is_new = self.latest.accept(&envelope.origin, hint, self.clock.now_ms());
        if !is_new {
            self.keys.refuse(MessageKind::Hint);
        }
        is_new
    }
}

impl Stream {
    /// Sends a hint to one gateway, or to all other processes. Drops it while NATS is unavailable.
    ///
    /// Receivers accept the hints of a process in the order of their numbers, so one task sends all of them.
    pub async fn send_hint(&self, gateway: Option<GatewayId>, hint: &Hint) {
        // The client would keep it until it is connected again, after which receivers compare with Postgres anyway.
        if !self.is_up() {
            return;
        }
        let subject = subjects::hint_subject(gateway);
        let identity = &self.identity;
        let envelope = Envelope {
            origin: identity.origin.clone(),
            // Relaxed, because one task sends all hints.
            number: self.hints_sent.fetch_add(1, Ordering::Relaxed) + 1,
            sent_at_ms: identity.clock.now_ms(),
            hint,
        };
        let Ok(payload) = serde_json::to_vec(&envelope) else { return };
        let mut headers = HeaderMap::new();
        headers.insert(MAC, identity.keys.sign(&CoveredParts { subject: &subject, fields: &[], body: &payload }));
        if let Err(error) = self.client.publish_with_headers(subject, headers, payload.into()).await {
            tracing::debug!(%error, "failed to send a hint");
        }
    }

    /// Subscribes to the hints for one gateway, or to those for all processes.
    ///
    /// # Errors
    /// If the client is closed.
    pub async fn subscribe_hints(&self, gateway: Option<GatewayId>) -> StreamResult<Hints> {
        let (subject, identity) = (subjects::hint_subject(gateway), &self.identity);
        let subscriber =
            self.client.subscribe(subject.clone()).await.map_err(StreamError::from_nats("listening to hints"))?;
        Ok(Hints {
            subscriber,
            subject,
            origin: identity.origin.clone(),
            keys: identity.keys.clone(),
            clock: identity.clock.clone(),
            latest: LatestHints::default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_700_000_000_000;

    fn hint(number: u64, age_ms: i64) -> LatestHint {
        LatestHint { number, sent_at_ms: NOW - age_ms }
    }

    #[test]
    fn a_hint_is_accepted_once_and_while_it_is_recent() {
        let mut latest = LatestHints::default();
        assert!(latest.accept("a", hint(1, 0), NOW));
        assert!(!latest.accept("a", hint(1, 0), NOW), "the same again");
        assert!(latest.accept("b", hint(1, 0), NOW), "another sender");
        assert!(latest.accept("a", hint(3, 0), NOW));
        assert!(!latest.accept("a", hint(2, 0), NOW), "overtaken");
        assert!(!latest.accept("c", hint(9, MAX_AGE_MS + 1), NOW), "recorded long ago");
        assert!(!latest.accept("c", hint(9, -MAX_AGE_MS - 1), NOW), "from the future");
    }

    #[test]
    fn only_senders_whose_hints_are_too_old_are_forgotten() {
        let mut latest = LatestHints::default();
        assert!(latest.accept("silent", hint(5, MAX_AGE_MS), NOW));
        (0..SENDERS).for_each(|n| assert!(latest.accept(&n.to_string(), hint(1, 0), NOW + 1)));
        assert!(!latest.0.contains_key("silent"));
        assert!(!latest.accept("silent", hint(5, MAX_AGE_MS), NOW + 1), "its hints are too old");
        assert_eq!(latest.0.len(), SENDERS);
    }

    #[test]
    fn an_unverified_hint_carries_nothing_that_a_socket_would_see() {
        let (workspace, node) = (WorkspaceId::new(1), NodeId::new("n"));
        let provider = ProviderName::default_provider();
        let invoke = Hint::Invoke {
            workspace,
            node: node.clone(),
            provider,
            invocation: 7,
            attempt: 1,
            frame: Some("{}".to_owned()),
        };
        assert!(matches!(invoke.into_wake_up(), Hint::Invoke { frame: None, .. }));
        let notify = Hint::Notify {
            workspace,
            agents: None,
            topic: "agent".to_owned(),
            event: "action.completed".to_owned(),
            data: serde_json::Value::Null,
            event_id: None,
        };
        assert_eq!(notify.into_wake_up(), Hint::NoticeMissed { workspace, agents: None });
        let taken = Hint::ProviderTaken { workspace, node: node.clone(), provider: "p".to_owned(), epoch: 9 };
        assert_eq!(taken.into_wake_up(), Hint::NodesChanged { workspace, nodes: vec![node] });
        let revoked = Hint::TokenRevoked { hash: "ab".to_owned() };
        assert_eq!(revoked.into_wake_up(), Hint::TokenDoubted { hash: "ab".to_owned() });
    }

    #[test]
    fn hints_of_versions_that_do_not_sign_are_decoded() {
        let old = r#"{"origin":"1-ab","hint":"observers_changed"}"#;
        let envelope: Envelope<Hint> = serde_json::from_str(old).unwrap();
        assert_eq!((envelope.hint, envelope.number), (Hint::ObserversChanged, 0));
    }
}
