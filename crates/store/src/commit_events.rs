//! What a committed send puts into the event log.

use relay_domain::{AgentId, DeliveryId, conversation::public_channel_id, delivery::Reason};
use serde_json::json;

use crate::{
    commit::{NewRecipient, NewSend, Written},
    events::{EventBody, NewEvent},
};

/// The message's event, then those of its deliveries if anybody may be looking.
pub(crate) fn message_events(send: &NewSend, rows: &[Option<Written>], watched: bool) -> Vec<NewEvent> {
    let message = &send.message;
    let kind = match (message.thread_id, message.channel_type) {
        (Some(_), _) => "thread.reply",
        (None, 1) => "dm.received",
        (None, 2) => "group_dm.received",
        (None, _) => "message.created",
    };
    let mut events = vec![NewEvent::of_message(kind, message)];
    events.extend(send.events.iter().cloned().map(|event| about(event, message.message_id)));
    if watched {
        events.extend(send.recipients.iter().zip(rows).map(|(recipient, row)| delivery_event(send, recipient, row)));
    }
    events
}

/// The event with the id of its message, which it could not know before.
fn about(mut event: NewEvent, message_id: i64) -> NewEvent {
    if let EventBody::Data(data) = &mut event.body
        && let Some(id) = data.pointer_mut("/message/id").filter(|id| id.is_null())
    {
        *id = json!(message_id.to_string());
    }
    event
}

fn delivery_event(send: &NewSend, recipient: &NewRecipient, row: &Option<Written>) -> NewEvent {
    let message = &send.message;
    let (kind, data) = match row {
        Some(row) => {
            let id = DeliveryId { source: message.message_id, agent: recipient.agent_id, redrive_no: 0 };
            let reason = Reason::from_code(recipient.reason).ok().map(Reason::as_str);
            // As REST names it: the channel behind a one-to-one conversation is called after that.
            let channel = message.conversation_id.as_deref().and_then(public_channel_id);
            let data = json!({
                "delivery_id": id.to_string(),
                "message_id": message.message_id.to_string(),
                "channel_id": channel.unwrap_or_else(|| message.channel_id.to_string()),
                "agent_id": recipient.agent_id.to_string(),
                "reason": reason,
                "seq": row.seq,
            });
            ("delivery.accepted", data)
        }
        None => {
            let data = json!({
                "delivery_id": null,
                "message_id": message.message_id.to_string(),
                "target_agent_id": recipient.agent_id.to_string(),
                "reason": "depth_cap",
                "error": "mailbox depth cap exceeded",
                "retryable": false,
            });
            ("delivery.failed", data)
        }
    };
    let event = NewEvent { kind: kind.into(), ..NewEvent::of_message("", message) };
    NewEvent { body: EventBody::Data(data), ..event.by(AgentId::new(recipient.agent_id.get())) }
}
