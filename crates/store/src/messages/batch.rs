//! A batch of sends and its outcome: what the engine's committer gives to [`Store::commit_batch`](crate::Store) and
//! gets back, and the events that a send records.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    AgentId, BatchId, DeliveryId, GatewayId, MessageId, NodeId, ProviderName, WorkspaceScope,
    events::kind,
    mailboxes::{
        delivery::{Mode, Reason},
        stream::Seq,
    },
    messages::Message,
};
use relay_wire::{
    events::recorded_data::{DeliveryAccepted, DeliveryNotWritten},
    field::ToValue as _,
};

use crate::{
    Store, StoreError,
    access::idempotency::IdempotencyKey,
    events::{Event, EventBody, RecordedEvents},
    messages::outbox::OutboxSource,
};

/// Timeout of everything before the COMMIT, waits for locks (2 s each) included. Each lane of a process has one batch
/// transaction at a time, so a connection that hangs without an error must not block all later sends.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(15);

impl Store {
    /// Waits for a write of a batch. `None`: it was given up after [`WRITE_TIMEOUT`], or because another database was
    /// met. A host that is lost does not close its connections, and the batches behind this one can be written to the
    /// new primary.
    pub(super) async fn await_write<T>(&self, write: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            // A write that is done has a known outcome, whatever was met meanwhile.
            biased;
            done = tokio::time::timeout(WRITE_TIMEOUT, write) => done.ok(),
            () = self.fence.closed() => None,
        }
    }
}

/// Recipients from which on a message is a fan-out. Fewer are written with the message, in some twenty milliseconds.
const FANOUT_RECIPIENTS: usize = 1024;

/// One recipient of a message.
#[derive(Debug, Clone)]
pub struct NewRecipient {
    pub agent_id: AgentId,
    pub mode: Mode,
    pub reason: Reason,
}

/// One request of a batch, with the facts that it was resolved with. The transaction checks them again.
#[derive(Debug, Clone)]
pub struct NewSend {
    pub scope: WorkspaceScope,
    /// Its id and `created_at` are assigned before the transaction, so that a resubmitted batch writes the same rows.
    pub message: Message,
    /// In any order, without the sender.
    pub recipients: Vec<NewRecipient>,
    /// The channel's membership version that `recipients` was resolved from.
    pub members_version: i64,
    /// The token generation that the sender was authenticated with; `None` for a post by a node.
    pub token_generation: Option<i64>,
    /// The sender is an internal agent, which is deleted from its creation on: its liveness is not checked.
    pub hidden_sender: bool,
    /// Present when the caller sent an idempotency key.
    pub key: Option<IdempotencyKey>,
    /// Lifetime of its deliveries in milliseconds; `None`: the workspace's delivery TTL.
    pub ttl_ms: Option<i64>,
    /// W3C trace context of the request; spans of later processing become its children.
    pub traceparent: Option<String>,
    /// Further events to record with the message's own. A `message.id` of null in one of them is replaced by
    /// the id of the message.
    pub events: Vec<Event>,
    /// Id taken when the request arrived. Fan-outs of the same author with lower ids precede it.
    pub arrived: MessageId,
    /// Sends with the same number keep their order: one is written only if the earlier ones of its batch are current.
    pub sequence: Option<i64>,
}

impl NewSend {
    /// Returns whether its deliveries are written in chunks, after the transaction that accepts it.
    #[must_use]
    pub fn is_fanout(&self) -> bool {
        self.recipients.len() >= FANOUT_RECIPIENTS
    }

    /// Returns when its deliveries expire.
    pub(crate) fn expires_at(&self, ttl_seconds: i32) -> DateTime<Utc> {
        let ttl = self.ttl_ms.map_or_else(|| TimeDelta::seconds(ttl_seconds.into()), TimeDelta::milliseconds);
        self.message.created_at + ttl
    }
}

/// A batch of sends. Its content is fixed before its transaction, so that it can be submitted again.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Unique key of the outbox row; identifies a resubmitted batch.
    pub id: BatchId,
    /// The gateway that publishes it after the commit.
    pub gateway_id: GatewayId,
    /// Recovery epoch in which it was built: its ids and times belong to that one.
    pub epoch: Option<i64>,
    /// W3C trace context of the batch.
    pub traceparent: Option<String>,
    pub sends: Vec<NewSend>,
}

impl Batch {
    /// Returns the messages of the outbox row; the deliveries of fan-outs have rows of their own.
    pub(crate) fn sources(&self) -> Vec<OutboxSource> {
        let with_deliveries = self.sends.iter().filter(|send| !send.is_fanout());
        with_deliveries.map(|send| OutboxSource(send.scope.workspace_id(), send.message.id)).collect()
    }
}

/// A committed delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenDelivery {
    pub seq: Seq,
    /// The recipient's node at commit.
    pub node_id: NodeId,
    /// The provider that the recipient was bound to at commit.
    pub provider: Option<ProviderName>,
    /// Gateways with the sockets on which the recipient was served at commit: that of its provider or, for an agent
    /// that no provider is assigned to, those of all providers of its node. Their leases may have expired.
    pub gateways: Vec<GatewayId>,
    pub expires_at: DateTime<Utc>,
}

/// Outcome of one request of a batch.
#[derive(Debug, Clone)]
pub enum SendOutcome {
    /// Committed. One entry per recipient, in the request's order; `None`: its mailbox is full.
    Committed(Vec<Option<WrittenDelivery>>),
    /// Committed as a fan-out: its deliveries follow in chunks. `full`: positions of recipients that get none, because
    /// their mailboxes are full.
    FanoutOpened { full: Vec<usize> },
    /// The key was used before for the same request; carries the first response.
    Replayed { response: serde_json::Value },
    /// The key was used before for another request.
    KeyReused,
    /// The facts that the request was resolved with have changed. Nothing was written; resolve it again.
    Stale,
    /// An earlier request of the same sequence was not written, and so neither was this one. Submit it again behind
    /// that one.
    Preceded,
    /// An earlier fan-out of the author is open, whose recipients must not get this message first. Nothing was written.
    SenderBusy,
}

/// Way in which a batch was committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitPath {
    /// By one statement.
    AtOnce,
    /// By a transaction with a statement per step.
    InSteps,
}

#[derive(Debug)]
pub struct BatchOutcome {
    /// One per request, in order.
    pub sends: Vec<SendOutcome>,
    /// The recorded events. Empty for a batch that was committed by an earlier submission.
    pub events: Vec<RecordedEvents>,
    pub path: CommitPath,
}

/// Failure of a batch.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Nothing was committed.
    #[error("the batch was not committed")]
    NotCommitted(#[source] StoreError),
    /// The connection was lost during the COMMIT. Submitting the same batch again gives the outcome.
    #[error("commit outcome of the batch unknown")]
    Unknown(#[source] StoreError),
}

/// Returns the message's event, then the events of its deliveries if the workspace is watched.
pub(crate) fn message_events(send: &NewSend, rows: &[Option<WrittenDelivery>], watched: bool) -> Vec<Event> {
    let mut events = events_of_message(send);
    if watched {
        let deliveries = send.recipients.iter().zip(rows);
        events.extend(deliveries.map(|(recipient, row)| delivery_event(&send.message, recipient, row.as_ref())));
    }
    events
}

/// Returns the message's event, then those of the recipients that get no delivery if the workspace is watched. The
/// others are recorded with their chunks.
pub(crate) fn fanout_events(send: &NewSend, full: &[usize], watched: bool) -> Vec<Event> {
    let mut events = events_of_message(send);
    if watched {
        let refused = full.iter().filter_map(|position| send.recipients.get(*position));
        events.extend(refused.map(|recipient| delivery_event(&send.message, recipient, None)));
    }
    events
}

fn events_of_message(send: &NewSend) -> Vec<Event> {
    let message = &send.message;
    let mut events = vec![Event::for_message(message.event_kind(), message)];
    events.extend(send.events.iter().cloned().map(|event| with_message_id(event, message.id)));
    events
}

/// Fills in the id of the message, which was not known when the event was made.
fn with_message_id(mut event: Event, message_id: MessageId) -> Event {
    if let EventBody::Data(data) = &mut event.body
        && let Some(id) = data.pointer_mut("/message/id").filter(|id| id.is_null())
    {
        *id = message_id.to_value();
    }
    event
}

/// Returns the event of a written delivery, or of one that a full mailbox refused.
pub(crate) fn delivery_event(message: &Message, recipient: &NewRecipient, row: Option<&WrittenDelivery>) -> Event {
    let (kind, data) = match row {
        Some(row) => {
            let id = DeliveryId { source: message.id.into(), agent: recipient.agent_id, redrive_no: 0 };
            let data = DeliveryAccepted {
                delivery_id: id,
                message_id: message.id,
                channel_id: message.client_channel_id(),
                agent_id: recipient.agent_id,
                reason: recipient.reason.as_str(),
                seq: row.seq,
            };
            (kind::DELIVERY_ACCEPTED, data.to_value())
        }
        None => {
            let data = DeliveryNotWritten {
                delivery_id: None,
                message_id: message.id,
                target_agent_id: recipient.agent_id,
                reason: "depth_cap",
                error: "mailbox depth cap exceeded",
                retryable: false,
            };
            (kind::DELIVERY_FAILED, data.to_value())
        }
    };
    let event = Event { kind: kind.into(), ..Event::for_message("", message) };
    Event { body: EventBody::Data(data), ..event.by_agent(recipient.agent_id) }
}

pub(crate) fn sort_and_dedup<T: Ord>(keys: &mut Vec<T>) {
    keys.sort_unstable();
    keys.dedup();
}

#[cfg(test)]
pub(crate) mod tests {
    use relay_domain::{ChannelId, WorkspaceId, agents::AgentKind, channels::ChannelKind};
    use serde_json::{Map, Value, json};

    use super::*;

    /// Send of agent 1 to agents 2 and 3 in channel 10.
    pub(crate) fn send() -> NewSend {
        let recipient = |id| NewRecipient { agent_id: AgentId::new(id), mode: Mode::Wait, reason: Reason::Message };
        NewSend {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(7)),
            message: Message {
                id: MessageId::new(5),
                channel_id: ChannelId::new(10),
                channel_name: "general".to_owned(),
                channel_kind: ChannelKind::Channel,
                conversation_id: None,
                agent_id: AgentId::new(1),
                agent_name: "ada".to_owned(),
                agent_kind: AgentKind::Agent,
                thread_id: None,
                text: "text".to_owned(),
                blocks: None,
                metadata: Value::Object(Map::new()).into(),
                attachments: Value::Array(Vec::new()),
                mentions: Vec::new(),
                mode: Mode::Wait,
                content_type: None,
                created_at: DateTime::UNIX_EPOCH,
            },
            recipients: vec![recipient(2), recipient(3)],
            members_version: 4,
            token_generation: Some(1),
            hidden_sender: false,
            key: None,
            ttl_ms: None,
            traceparent: None,
            events: Vec::new(),
            arrived: MessageId::new(5),
            sequence: None,
        }
    }

    #[test]
    fn a_watched_workspace_records_each_delivery_and_events_learn_the_id_of_their_message() {
        let received = Event::new(kind::WEBHOOK_RECEIVED, json!({ "message": { "id": null, "text": "text" } }));
        let send = NewSend { events: vec![received], ..send() };
        let written = WrittenDelivery {
            seq: 8,
            node_id: NodeId::new("n1"),
            provider: None,
            gateways: Vec::new(),
            expires_at: DateTime::UNIX_EPOCH,
        };
        let rows = [Some(written), None];
        let kinds = |events: &[Event]| events.iter().map(|event| event.kind.to_string()).collect::<Vec<_>>();
        let unwatched = message_events(&send, &rows, false);
        assert_eq!(kinds(&unwatched), [kind::MESSAGE_CREATED, kind::WEBHOOK_RECEIVED]);
        assert_eq!(unwatched[0].body, EventBody::Message(send.message.id));
        assert_eq!(unwatched[1].body, EventBody::Data(json!({ "message": { "id": "5", "text": "text" } })));
        let watched = message_events(&send, &rows, true);
        assert_eq!(kinds(&watched)[2..], [kind::DELIVERY_ACCEPTED, kind::DELIVERY_FAILED]);
        assert_eq!(watched[2].agent_id, Some(AgentId::new(2)));
        let EventBody::Data(refused) = &watched[3].body else { panic!("{watched:?}") };
        assert_eq!(refused["reason"], "depth_cap");
    }
}
