//! [`MessageLocation`]: where the message of a delivery is, for events about the delivery.

use crate::{ChannelId, events::Event};

/// Channel or conversation of a delivered message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageLocation {
    /// For a conversation, its backing channel.
    pub channel_id: ChannelId,
    pub channel_name: String,
    /// `None` for a channel.
    pub conversation_id: Option<String>,
}

impl MessageLocation {
    /// Places the event where the message is, so that the same observers see both.
    #[must_use]
    pub fn attach(this: Option<&Self>, event: Event) -> Event {
        match this {
            None => event,
            Some(Self { conversation_id: Some(id), .. }) => event.in_conversation(Some(id.clone())),
            Some(Self { channel_id, channel_name, .. }) => event.in_channel(*channel_id, channel_name.clone()),
        }
    }
}
