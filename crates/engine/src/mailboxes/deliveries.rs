//! An agent's own deliveries: listing and settling them one by one.

use relay_domain::{
    DeliveryId, MessageId, WorkspaceScope,
    events::kind,
    mailboxes::{Delivery, DeliveryReport, MessageLocation, delivery::DeliveryState},
    metric_names,
    names::{MAX_NOTE_BYTES, check_length},
    push::attempt::DeliveryAttempt,
};
use relay_store::{ReportOutcome, delivered_event, events::Event, mailboxes::expiry::DeadLetteredDelivery};
use relay_wire::{
    events::data::{DeliveryRedriven, DeliveryReported, MessageRead},
    field::ToValue as _,
};

use super::Mailboxes;
use crate::{EngineError, EngineResult, access::callers::AgentCaller, error::Missing, parts::Parts};

/// Default and maximum page size.
pub const PAGE: (i64, i64) = (100, 200);

/// Bound of the attempts shown for one delivery: the newest.
const MAX_ATTEMPTS: i64 = 1000;

impl Mailboxes {
    /// Lists the caller's deliveries, oldest first: those in `state`, or without one the unexpired queued and delivered
    /// ones.
    pub async fn deliveries(
        &self,
        caller: &AgentCaller,
        state: Option<DeliveryState>,
        limit: i64,
    ) -> EngineResult<Parts<Delivery>> {
        let rows = self.core.store.deliveries(caller.scope, caller.agent_id, state, limit).await?;
        self.core.read_texts(caller.scope, rows, text_slot).await
    }

    /// Lists the attempts of one of the caller's deliveries, oldest first.
    ///
    /// # Errors
    /// When there is no such delivery of the caller's.
    pub async fn attempts(&self, caller: &AgentCaller, id: &str) -> EngineResult<Vec<DeliveryAttempt>> {
        let delivery = self.stored_delivery(caller.scope, own_delivery(caller, id)?).await?;
        Ok(self.core.store.attempts(caller.scope, caller.agent_id, delivery.seq, MAX_ATTEMPTS).await?)
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
            if let Some(letter) = &reported.dead_lettered {
                reason = Some(letter.reason);
                sender = letter.sender.map(|sender| (sender, letter.notice()));
            }
            report_events(caller, id, report, reported)
        };
        let changed = self.core.store.report_delivery(caller.scope, id, report, self.core.now(), events).await?;
        if let Some(recorded) = changed.ok_or(EngineError::NotFound(Missing::Delivery))? {
            self.core.announce(recorded);
            if let Some(reason) = reason {
                metrics::counter!(metric_names::DELIVERIES_DEAD_LETTERED, "reason" => reason.as_str()).increment(1);
            }
            // The event of a dead letter concerns its sender, so sockets of the recipient do not receive it.
            if let (DeliveryReport::Fail { error, retryable }, Some(_)) = (report, reason) {
                let (error, retryable) = (error.as_deref(), *retryable);
                let data = DeliveryReported { error, retryable, ..DeliveryReported::new(id) }.to_value();
                self.core.hints.notify(caller.scope, vec![caller.agent_id], "agent", kind::DELIVERY_FAILED, data);
            }
            if let Some((sender, notice)) = sender {
                self.core.hints.notify(caller.scope, vec![sender], "agent", kind::DELIVERY_FAILED, notice);
            }
            if !matches!(report, DeliveryReport::Defer { .. }) {
                // A tombstone must fill the gap, so that a broker does not wait for it, and a replacement must be sent.
                self.core.hints.mailbox_changed(caller.scope, caller.agent_id);
            }
        }
        // Read back: a final state stays as it was, whatever was reported.
        self.stored_delivery(caller.scope, id).await
    }

    async fn stored_delivery(&self, scope: WorkspaceScope, id: DeliveryId) -> EngineResult<Delivery> {
        self.core.store.delivery(scope, id).await?.ok_or(EngineError::NotFound(Missing::Delivery))
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
    let event = |kind, data| MessageLocation::attach(place, Event::new(kind, data).by_agent(id.agent));
    let unchanged = DeliveryReported::new(id);
    match report {
        DeliveryReport::Ack => {
            let read = reported.first_read_at.map(|at| {
                let data = MessageRead {
                    message_id: id.source.message_id(),
                    agent_name: &caller.name,
                    agent_id: id.agent,
                    read_at: at.into(),
                };
                event(kind::MESSAGE_READ, data.to_value())
            });
            std::iter::once(delivered_event(id, place)).chain(read).collect()
        }
        DeliveryReport::Fail { error: reason, .. } if let Some(back_at) = reported.back_at => {
            let data = DeliveryReported { available_at: Some(back_at.into()), reason: reason.as_deref(), ..unchanged };
            vec![event(kind::DELIVERY_DEFERRED, data.to_value())]
        }
        DeliveryReport::Fail { error, retryable } => {
            let data = DeliveryReported {
                error: error.as_deref(),
                retryable: *retryable,
                redriven_as: reported.redriven_as.map(|(fresh, _)| fresh),
                ..unchanged
            };
            if let Some((fresh, seq)) = reported.redriven_as {
                let accepted = DeliveryRedriven {
                    delivery_id: fresh,
                    message_id: id.source.message_id(),
                    agent_id: id.agent,
                    seq,
                    redrive_of: id,
                    channel_id: place.map(|place| place.channel_id),
                };
                return vec![
                    event(kind::DELIVERY_FAILED, data.to_value()),
                    event(kind::DELIVERY_ACCEPTED, accepted.to_value()),
                ];
            }
            // The event has the fields of a dead letter and those of the recipient's report.
            let dead_letter = reported.dead_lettered.as_ref().map(DeadLetteredDelivery::notice);
            vec![event(kind::DELIVERY_FAILED, DeliveryReported { dead_letter, ..data }.to_value())]
        }
        DeliveryReport::Defer { available_at, reason } => {
            let data =
                DeliveryReported { available_at: Some((*available_at).into()), reason: reason.as_deref(), ..unchanged };
            vec![event(kind::DELIVERY_DEFERRED, data.to_value())]
        }
    }
}

fn own_delivery(caller: &AgentCaller, id: &str) -> EngineResult<DeliveryId> {
    let id: DeliveryId = id.parse().map_err(|_| EngineError::NotFound(Missing::Delivery))?;
    // Another agent's is answered like a missing one.
    if id.agent == caller.agent_id { Ok(id) } else { Err(EngineError::NotFound(Missing::Delivery)) }
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

/// Returns the message of a delivery and the place of its text, which is read apart from the list.
pub(super) fn text_slot(delivery: &mut Delivery) -> Option<(MessageId, &mut String)> {
    let message = delivery.message.as_mut()?;
    Some((delivery.id.source.message_id(), &mut message.text))
}
