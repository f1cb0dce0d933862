//! An agent's own deliveries: listing and settling them one by one.

use relay_domain::{
    AgentId, DeliveryId, WorkspaceScope,
    dead_letter::DeadReason,
    delivery::{DeliveryState, Exception, Mode, Reason, state_of},
    event, metric_names,
    names::{MAX_NOTE_BYTES, check_length},
};
pub use relay_store::{DeliveryReport, DeliveryRow, attempts::AttemptRow};
use relay_store::{Place, Reported, delivered_event, events::NewEvent};
use serde_json::json;

use crate::{Engine, EngineError, EngineResult, auth::AgentCaller, render, render::timestamp};

/// What a list of deliveries holds unless a limit is given, and at most.
pub const PAGE: (i64, i64) = (100, 200);

const REJECTED: &str = DeadReason::Rejected.as_str();

/// Tries that are shown of one delivery: the newest.
const ATTEMPTS: i64 = 1000;

/// A delivery with its derived state.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// As stored.
    pub row: DeliveryRow,
    /// Its id.
    pub id: DeliveryId,
    /// Its state.
    pub state: DeliveryState,
    /// How it departs from its mailbox's floors.
    pub exception: Option<Exception>,
}

impl From<DeliveryRow> for Delivery {
    fn from(row: DeliveryRow) -> Self {
        let exception = row.exception_state.and_then(|code| Exception::from_code(code).ok());
        let state = match state_of(row.seq, row.sent_seq, row.ack_floor, exception) {
            // A dead letter to operators, and a failure to the recipient that has said so (contract: node.md 10).
            DeliveryState::DeadLettered if row.deferred_reason.as_deref() == Some(REJECTED) => DeliveryState::Failed,
            state => state,
        };
        Self {
            id: DeliveryId { source: row.source_id, agent: AgentId::new(row.agent_id), redrive_no: row.redrive_no },
            state,
            exception,
            row,
        }
    }
}

impl Delivery {
    /// The word for how it asks to be injected.
    #[must_use]
    pub fn mode(&self) -> &'static str {
        Mode::from_code(self.row.mode).unwrap_or_default().row_word()
    }

    /// Why the recipient gets it; a deferred one says why it was deferred.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        // One that comes back after a failure has not been put off by its recipient.
        let put_off = self.state == DeliveryState::Queued && self.exception == Some(Exception::Deferred);
        if put_off && !self.is_retry() && !self.is_requeued() {
            return self.row.deferred_reason.as_deref();
        }
        Reason::from_code(self.row.reason).ok().map(Reason::as_str)
    }

    /// Whether it comes back because its consumer could not handle it for now.
    #[must_use]
    pub fn is_requeued(&self) -> bool {
        let put_off = self.state == DeliveryState::Queued && self.exception == Some(Exception::Deferred);
        put_off && self.row.retryable == Some(true)
    }

    /// Whether it comes back because a try to hand it over has failed.
    #[must_use]
    pub fn is_retry(&self) -> bool {
        let put_off = self.state == DeliveryState::Queued && self.exception == Some(Exception::Deferred);
        put_off && self.row.retry_no.is_some_and(|n| n > 0) && self.row.retryable.is_none()
    }

    /// The delivery that has taken its place in the same mailbox.
    #[must_use]
    pub fn redriven_as(&self) -> Option<DeliveryId> {
        self.row.redriven_seq.map(|_| DeliveryId { redrive_no: self.id.redrive_no + 1, ..self.id })
    }

    /// The public id of its channel.
    #[must_use]
    pub fn channel_id(&self) -> Option<String> {
        self.row.channel_id.map(|id| render::public_id(id, self.row.conversation_id.as_deref()))
    }
}

impl Engine {
    /// The caller's deliveries, oldest first: those in `state`, or without one the unexpired queued and
    /// delivered ones.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn deliveries(
        &self,
        caller: &AgentCaller,
        state: Option<DeliveryState>,
        limit: i64,
    ) -> EngineResult<Vec<Delivery>> {
        let rows = self.store().deliveries(caller.scope, caller.agent_id, state, limit).await?;
        Ok(rows.into_iter().map(Delivery::from).collect())
    }

    /// The tries to hand one of the caller's deliveries over to an endpoint, oldest first.
    ///
    /// # Errors
    /// When there is no such delivery of the caller's.
    pub async fn attempts(&self, caller: &AgentCaller, id: &str) -> EngineResult<Vec<AttemptRow>> {
        let delivery = self.delivery_row(caller.scope, own_delivery(caller, id)?).await?;
        Ok(self.store().attempts(caller.scope, caller.agent_id, delivery.row.seq, ATTEMPTS).await?)
    }

    /// Settles or defers one of the caller's deliveries. What cannot change any more stays as it is,
    /// and is answered just the same.
    ///
    /// # Errors
    /// When there is no such delivery of the caller's.
    pub async fn report_delivery(
        &self,
        caller: &AgentCaller,
        id: &str,
        report: &DeliveryReport,
    ) -> EngineResult<Delivery> {
        check_report(report)?;
        let id = own_delivery(caller, id)?;
        let (mut sender, mut reason) = (None, None);
        let events = |reported: &Reported| {
            if let Some(letter) = &reported.dead {
                reason = Some(letter.reason);
                sender = letter.sender.map(|sender| (sender, letter.notice()));
            }
            report_events(caller, id, report, reported)
        };
        let changed = self.store().report_delivery(caller.scope, id, report, self.now(), events).await?;
        if let Some(recorded) = changed.ok_or(EngineError::DeliveryNotFound)? {
            self.announce(recorded);
            if let Some(reason) = reason {
                metrics::counter!(metric_names::DELIVERIES_DEAD_LETTERED, "reason" => reason.as_str()).increment(1);
            }
            if let Some((sender, notice)) = sender {
                self.hints().notify(caller.scope, vec![sender], "agent", event::DELIVERY_FAILED, notice);
            }
            if !matches!(report, DeliveryReport::Defer { .. }) {
                // The hole is to be filled with a tombstone, so that a broker does not wait for it; and what has taken
                // its place is to be sent.
                self.hints().mailbox_changed(caller.scope, caller.agent_id);
            }
        }
        self.delivery_row(caller.scope, id).await
    }

    async fn delivery_row(&self, scope: WorkspaceScope, id: DeliveryId) -> EngineResult<Delivery> {
        self.store().delivery(scope, id).await?.map(Delivery::from).ok_or(EngineError::DeliveryNotFound)
    }
}

/// What a report that changed a delivery is told as.
fn report_events(caller: &AgentCaller, id: DeliveryId, report: &DeliveryReport, reported: &Reported) -> Vec<NewEvent> {
    let place = reported.place.as_ref();
    let mut data = json!({
        "delivery_id": id.to_string(), "message_id": id.source.to_string(), "agent_id": id.agent.to_string(),
    });
    let kind = match report {
        DeliveryReport::Ack => {
            let read = reported.first_read_at.map(|at| {
                let data = json!({
                    "message_id": id.source.to_string(),
                    "agent_name": &*caller.name,
                    "agent_id": id.agent.to_string(),
                    "read_at": timestamp(at),
                });
                Place::of(place, NewEvent::new(event::MESSAGE_READ, data).by(id.agent))
            });
            return std::iter::once(delivered_event(id, place)).chain(read).collect();
        }
        DeliveryReport::Fail { error, .. } if reported.back_at.is_some() => {
            put(&mut data, "available_at", &reported.back_at.map(timestamp));
            put(&mut data, "reason", error);
            event::DELIVERY_DEFERRED
        }
        DeliveryReport::Fail { error, retryable } => {
            put(&mut data, "error", error);
            put(&mut data, "retryable", retryable);
            if let Some((fresh, seq)) = reported.redriven_as {
                data["redriven_as"] = json!(fresh.to_string());
                let mut accepted = json!({
                    "delivery_id": fresh.to_string(), "message_id": id.source.to_string(),
                    "agent_id": id.agent.to_string(), "seq": seq, "redrive_of": id.to_string(),
                });
                put(&mut accepted, "channel_id", &place.map(|place| place.channel_id.to_string()));
                let failed = Place::of(place, NewEvent::new(event::DELIVERY_FAILED, data).by(id.agent));
                let accepted = Place::of(place, NewEvent::new(event::DELIVERY_ACCEPTED, accepted).by(id.agent));
                return vec![failed, accepted];
            }
            // A dead letter is told like any other, and as what its recipient has said.
            if let (Some(letter), Some(told)) = (&reported.dead, data.as_object_mut())
                && let serde_json::Value::Object(notice) = letter.notice()
            {
                told.extend(notice);
            }
            event::DELIVERY_FAILED
        }
        DeliveryReport::Defer { available_at, reason } => {
            data["available_at"] = json!(timestamp(*available_at));
            put(&mut data, "reason", reason);
            event::DELIVERY_DEFERRED
        }
    };
    vec![Place::of(place, NewEvent::new(kind, data).by(id.agent))]
}

fn put<T: serde::Serialize>(data: &mut serde_json::Value, key: &str, value: &Option<T>) {
    if let Some(value) = value {
        data[key] = json!(value);
    }
}

fn own_delivery(caller: &AgentCaller, id: &str) -> EngineResult<DeliveryId> {
    let id: DeliveryId = id.parse().map_err(|_| EngineError::DeliveryNotFound)?;
    if id.agent == caller.agent_id { Ok(id) } else { Err(EngineError::DeliveryNotFound) }
}

fn check_report(report: &DeliveryReport) -> EngineResult<()> {
    let (field, text) = match report {
        DeliveryReport::Ack => return Ok(()),
        DeliveryReport::Fail { error, .. } => ("error", error),
        DeliveryReport::Defer { reason, .. } => ("reason", reason),
    };
    check_length(field, text.as_deref().unwrap_or_default(), MAX_NOTE_BYTES)?;
    Ok(())
}
