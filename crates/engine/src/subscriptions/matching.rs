//! Matching of events with subscriptions, and the bodies of their calls (docs/protocol/rest.md, "Subscription calls").

use chrono::{DateTime, Utc};
use relay_domain::{
    JsonEntries, JsonText, WorkspaceScope,
    events::{Event, EventBody},
    messages::Message,
    subscriptions::{EventFilter, call::mentions_name},
};
use relay_wire::{messages::payload, subscriptions::SubscriptionCall};
use serde::Deserialize;
use serde_json::Value;

/// Builds the data of an event as nodes get it: one flat object. `message` is the version that the event refers to.
/// The content of a message is not parsed.
pub(super) fn event_data(event: &Event, message: Option<&Message>) -> JsonEntries {
    #[derive(Deserialize)]
    struct Payload {
        data: JsonEntries,
    }
    let mut data = match &event.body {
        EventBody::Data(Value::Object(data)) => {
            data.iter().map(|(key, value)| (key.clone(), JsonText::encode(value))).collect()
        }
        EventBody::Data(_) => JsonEntries::default(),
        EventBody::Message(id) => match message {
            // The recipient of a direct message follows from the conversation; a subscription is no mailbox.
            Some(message) => {
                // The payload was encoded by `relay_wire` and always has `data`.
                let read: Option<Payload> = serde_json::from_str(payload::payload(message, "").get()).ok();
                let mut data = read.map(|payload| payload.data).unwrap_or_default();
                data.retain(|key| key != "to");
                data
            }
            // Retention has dropped it: only its id is still known.
            None => JsonEntries::from_iter([("id".to_owned(), JsonText::encode(&id.to_string()))]),
        },
    };
    let mut add = |key: &str, value: Option<JsonText>| {
        if let (Some(value), false) = (value, data.contains_key(key)) {
            data.insert(key.to_owned(), value);
        }
    };
    add("channel_id", event.channel_id.map(|id| JsonText::encode(&id.to_string())));
    add("channel_name", event.channel_name.as_deref().map(JsonText::encode));
    add("conversation_id", event.conversation_id.as_deref().map(JsonText::encode));
    data
}

/// Text in which an event may mention a name.
pub(super) fn event_text<'a>(event: &'a Event, message: Option<&'a Message>) -> &'a str {
    match &event.body {
        EventBody::Message(_) => message.map_or("", |message| &message.text),
        EventBody::Data(data) => {
            let text = data.get("text").or_else(|| data.get("message")?.get("text"));
            text.and_then(Value::as_str).unwrap_or_default()
        }
    }
}

/// True if the filter matches an event.
pub(super) fn matches_filter(filter: &EventFilter, channel_name: Option<&str>, text: &str) -> bool {
    filter.channel.as_deref().is_none_or(|channel| channel_name == Some(channel))
        && filter.mentions.as_deref().is_none_or(|name| mentions_name(text, name))
}

/// Builds the body, which is the same for each attempt.
pub(super) fn call_body(scope: WorkspaceScope, kind: &str, at: DateTime<Utc>, data: JsonEntries) -> String {
    let call = SubscriptionCall { kind, workspace_id: scope.workspace_id(), timestamp: at.into(), data };
    JsonText::encode(&call).get().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn filters_compare_channels_and_look_for_mentions() {
        let event = |data| Event::new("webhook.received", data);
        let flat = event(json!({ "text": "hi @bob" }));
        let nested = event(json!({ "message": { "text": "hi @bob" } }));
        let filter = |channel: Option<&str>, mentions: Option<&str>| EventFilter {
            channel: channel.map(str::to_owned),
            mentions: mentions.map(str::to_owned),
        };
        for (filter, channel, passed) in [
            (filter(None, None), None, true),
            (filter(Some("dev"), None), Some("dev"), true),
            (filter(Some("dev"), None), Some("ops"), false),
            (filter(Some("dev"), None), None, false),
            (filter(None, Some("bob")), None, true),
            (filter(None, Some("ann")), None, false),
            (filter(Some("dev"), Some("bob")), Some("ops"), false),
        ] {
            for event in [&flat, &nested] {
                assert_eq!(matches_filter(&filter, channel, event_text(event, None)), passed, "{filter:?} {channel:?}");
            }
        }
    }
}
