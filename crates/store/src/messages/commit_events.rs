//! Events of a committed send: the message's own and, in a watched workspace, one per delivery.

use relay_domain::{DeliveryId, MessageId, events::kind};
use relay_wire::{
    events::recorded_data::{DeliveryAccepted, DeliveryNotWritten},
    field::ToValue as _,
};

use crate::{
    events::{Event, EventBody},
    messages::batch::{NewRecipient, NewSend, WrittenDelivery},
};

/// Returns the message's event, then the events of its deliveries if the workspace is watched.
pub(crate) fn message_events(send: &NewSend, rows: &[Option<WrittenDelivery>], watched: bool) -> Vec<Event> {
    let message = &send.message;
    let mut events = vec![Event::for_message(message.event_kind(), message)];
    events.extend(send.events.iter().cloned().map(|event| with_message_id(event, message.id)));
    if watched {
        events.extend(send.recipients.iter().zip(rows).map(|(recipient, row)| delivery_event(send, recipient, row)));
    }
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

fn delivery_event(send: &NewSend, recipient: &NewRecipient, row: &Option<WrittenDelivery>) -> Event {
    let message = &send.message;
    let (kind, data) = match row {
        Some(row) => {
            let id = DeliveryId { source: message.id.get(), agent: recipient.agent_id, redrive_no: 0 };
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
