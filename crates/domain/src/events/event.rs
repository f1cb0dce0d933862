//! [`Event`]: something that happened in a workspace, as its log keeps it.

use std::borrow::Cow;

use serde_json::Value;

use crate::{AgentId, ChannelId, MessageId, messages::Message};

/// An event without its seq, which the log assigns.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Event type, such as `message.created`.
    pub kind: Cow<'static, str>,
    /// `None` in a conversation, and for an event without a location.
    pub channel_id: Option<ChannelId>,
    pub channel_name: Option<String>,
    pub conversation_id: Option<String>,
    /// Author or subject of the event.
    pub agent_id: Option<AgentId>,
    /// Content of the event.
    pub body: EventBody,
}

/// Content of an event.
#[derive(Debug, Clone, PartialEq)]
pub enum EventBody {
    /// Reference to the stored message, which is read with the event.
    Message(MessageId),
    /// Flat JSON object, as subscriptions and nodes receive it.
    Data(Value),
}

impl Event {
    /// Creates an event without a location and without an author.
    #[must_use]
    pub fn new(kind: impl Into<Cow<'static, str>>, data: Value) -> Self {
        Self {
            kind: kind.into(),
            channel_id: None,
            channel_name: None,
            conversation_id: None,
            agent_id: None,
            body: EventBody::Data(data),
        }
    }

    /// Places the event in a channel.
    #[must_use]
    pub fn in_channel(self, id: ChannelId, name: impl Into<String>) -> Self {
        Self { channel_id: Some(id), channel_name: Some(name.into()), ..self }
    }

    /// Places the event in a conversation, if one is given.
    #[must_use]
    pub fn in_conversation(self, id: Option<String>) -> Self {
        Self { conversation_id: id, ..self }
    }

    /// Sets the author or subject of the event.
    #[must_use]
    pub fn by_agent(self, agent: AgentId) -> Self {
        Self { agent_id: Some(agent), ..self }
    }

    /// Creates the event of a stored message.
    #[must_use]
    pub fn for_message(kind: &'static str, message: &Message) -> Self {
        let channel = message.conversation_id.is_none();
        Self {
            kind: kind.into(),
            channel_id: channel.then_some(message.channel_id),
            channel_name: channel.then(|| message.channel_name.clone()),
            conversation_id: message.conversation_id.as_ref().map(ToString::to_string),
            agent_id: Some(message.agent_id),
            body: EventBody::Message(message.id),
        }
    }
}
