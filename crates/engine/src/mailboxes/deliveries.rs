//! An agent's own deliveries: listing and settling them one by one.

use relay_domain::{
    DeliveryId, WorkspaceScope,
    events::kind,
    mailboxes::{Delivery, delivery::DeliveryState},
    metric_names,
    names::{MAX_NOTE_BYTES, check_length},
};
pub use relay_store::{DeliveryReport, mailboxes::attempts::AttemptRow};
use relay_store::{MessageLocation, ReportOutcome, delivered_event, events::Event};
use serde_json::json;

use crate::{Engine, EngineError, EngineResult, access::authentication::AgentCaller, messages::render::timestamp};

/// Default and maximum page size.
pub const PAGE: (i64, i64) = (100, 200);

/// Bound of the attempts shown for one delivery: the newest.
const MAX_ATTEMPTS: i64 = 1000;

impl Engine {
    /// Lists the caller's deliveries, oldest first: those in `state`, or without one the unexpired queued and delivered
    /// ones.
    pub async fn deliveries(
        &self,
        caller: &AgentCaller,
        state: Option<DeliveryState>,
        limit: i64,
    ) -> EngineResult<Vec<Delivery>> {
        Ok(self.store().deliveries(caller.scope, caller.agent_id, state, limit).await?)
    }

    /// Lists the attempts of one of the caller's deliveries, oldest first.
    ///
    /// # Errors
    /// When there is no such delivery of the caller's.
    pub async fn attempts(&self, caller: &AgentCaller, id: &str) -> EngineResult<Vec<AttemptRow>> {
        let delivery = self.stored_delivery(caller.scope, own_delivery(caller, id)?).await?;
        Ok(self.store().attempts(caller.scope, caller.agent_id, delivery.seq, MAX_ATTEMPTS).await?)
    }

    /// Settles or defers one of the caller's deliveries. A final state stays as it is, and the response is the same.
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
        let events = |reported: &ReportOutcome| {
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
                self.hints().notify(caller.scope, vec![sender], "agent", kind::DELIVERY_FAILED, notice);
            }
            if !matches!(report, DeliveryReport::Defer { .. }) {
                // A tombstone must fill the gap, so that a broker does not wait for it, and a replacement must be sent.
                self.hints().mailbox_changed(caller.scope, caller.agent_id);
            }
        }
        self.stored_delivery(caller.scope, id).await
    }

    async fn stored_delivery(&self, scope: WorkspaceScope, id: DeliveryId) -> EngineResult<Delivery> {
        self.store().delivery(scope, id).await?.ok_or(EngineError::DeliveryNotFound)
    }
}

/// Creates the events of a report that changed a delivery.
fn report_events(
    caller: &AgentCaller,
    id: DeliveryId,
    report: &DeliveryReport,
    reported: &ReportOutcome,
) -> Vec<Event> {
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
                MessageLocation::attach(place, Event::new(kind::MESSAGE_READ, data).by_agent(id.agent))
            });
            return std::iter::once(delivered_event(id, place)).chain(read).collect();
        }
        DeliveryReport::Fail { error, .. } if reported.back_at.is_some() => {
            put_some(&mut data, "available_at", &reported.back_at.map(timestamp));
            put_some(&mut data, "reason", error);
            kind::DELIVERY_DEFERRED
        }
        DeliveryReport::Fail { error, retryable } => {
            put_some(&mut data, "error", error);
            put_some(&mut data, "retryable", retryable);
            if let Some((fresh, seq)) = reported.redriven_as {
                data["redriven_as"] = json!(fresh.to_string());
                let mut accepted = json!({
                    "delivery_id": fresh.to_string(), "message_id": id.source.to_string(),
                    "agent_id": id.agent.to_string(), "seq": seq, "redrive_of": id.to_string(),
                });
                put_some(&mut accepted, "channel_id", &place.map(|place| place.channel_id.to_string()));
                let failed = MessageLocation::attach(place, Event::new(kind::DELIVERY_FAILED, data).by_agent(id.agent));
                let accepted =
                    MessageLocation::attach(place, Event::new(kind::DELIVERY_ACCEPTED, accepted).by_agent(id.agent));
                return vec![failed, accepted];
            }
            // The event has the fields of a dead letter and those of the recipient's report.
            if let (Some(letter), Some(fields)) = (&reported.dead, data.as_object_mut())
                && let serde_json::Value::Object(notice) = letter.notice()
            {
                fields.extend(notice);
            }
            kind::DELIVERY_FAILED
        }
        DeliveryReport::Defer { available_at, reason } => {
            data["available_at"] = json!(timestamp(*available_at));
            put_some(&mut data, "reason", reason);
            kind::DELIVERY_DEFERRED
        }
    };
    vec![MessageLocation::attach(place, Event::new(kind, data).by_agent(id.agent))]
}

fn put_some<T: serde::Serialize>(data: &mut serde_json::Value, key: &str, value: &Option<T>) {
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
