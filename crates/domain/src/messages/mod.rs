//! Messages: the [`Message`] itself, its reactions, and the mentions in its text. Used by storage, the engine and the
//! gateway.

mod reading;
mod webhook;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    AgentId, ChannelId, ConversationId, JsonText, MessageId,
    agents::AgentKind,
    channels::{ChannelKind, client_channel_id},
    encoded_length,
    events::kind,
    mailboxes::delivery::Mode,
    observers::MessageFacts,
};

pub use reading::{ReadLocation, ReadPosition, Reader};
pub use webhook::Webhook;

/// Maximum number of mentions of one message. Further ones are plain text.
pub const MAX_MENTIONS: usize = 100;
/// Prefix of the engine's own metadata keys, hidden from clients.
pub const HIDDEN_METADATA: &str = "__relaycast_";
/// Metadata key with the id of the broker node that posted a message in the name of its author. Edits keep it.
pub const POSTED_BY_NODE: &str = "posted_by_node";

/// Returns metadata without the engine's own keys; always an object.
#[must_use]
pub fn client_metadata(stored: &JsonText) -> JsonText {
    if !stored.is_object() {
        return JsonText::empty_object();
    }
    // Most metadata has no such key; searching the text is cheaper than parsing it.
    if !stored.get().contains(HIDDEN_METADATA) {
        return stored.clone();
    }
    let mut shown = stored.entries();
    shown.retain(|key| !key.starts_with(HIDDEN_METADATA));
    JsonText::encode(&shown)
}

/// Metadata key with the address of the author of a direct message.
pub const FROM_ADDRESS: &str = "__relaycast_from_address";

/// Returns metadata with the address that the author of a direct message had.
#[must_use]
pub fn with_from_address(metadata: &JsonText, address: &str) -> JsonText {
    let mut all = metadata.entries();
    all.insert(FROM_ADDRESS.to_owned(), JsonText::encode(&address));
    JsonText::encode(&all)
}

/// Returns the address that the author of a direct message had.
#[must_use]
pub fn from_address(metadata: &JsonText) -> Option<String> {
    if !metadata.get().contains(FROM_ADDRESS) {
        return None;
    }
    let (_, address) = metadata.entries().into_iter().find(|(key, _)| key == FROM_ADDRESS)?;
    serde_json::from_str(address.get()).ok()
}

/// Returns new metadata with the engine's own keys of the old, which authors can neither see nor set.
#[must_use]
pub fn keep_hidden_metadata(new: Option<&JsonText>, old: &JsonText) -> JsonText {
    let mut all = new.map(JsonText::entries).unwrap_or_default();
    all.retain(|key| !key.starts_with(HIDDEN_METADATA));
    for (key, value) in old.entries() {
        if key.starts_with(HIDDEN_METADATA) || key == POSTED_BY_NODE {
            all.insert(key, value);
        }
    }
    JsonText::encode(&all)
}

/// Returns the names mentioned as `@name`, each once, in the order of first mention.
///
/// A mention is at the start or after white space, so addresses are not mentions; the name is `[A-Za-z0-9_-]+`. The
/// names may not belong to any agent.
#[must_use]
pub fn extract_mentions(text: &str) -> Vec<String> {
    // Searching for one byte is many times faster than the loop.
    if !text.contains('@') {
        return Vec::new();
    }
    let mut found: Vec<String> = Vec::new();
    let mut after_space = true;
    for (at, c) in text.char_indices() {
        if c == '@' && after_space {
            let rest = &text[at + 1..];
            let end = rest.bytes().position(|b| !is_name_byte(b)).unwrap_or(rest.len());
            let name = &rest[..end];
            if !name.is_empty() && !found.iter().any(|known| known == name) {
                found.push(name.to_owned());
                if found.len() == MAX_MENTIONS {
                    break;
                }
            }
        }
        after_space = c.is_whitespace();
    }
    found
}

const fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

/// A posted message, with the names of its channel and author.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Id, which also gives the time of creation.
    pub id: MessageId,
    /// Channel, or the backing channel of the conversation.
    pub channel_id: ChannelId,
    pub channel_name: String,
    pub channel_kind: ChannelKind,
    /// Public id of the conversation; `None` in a channel.
    pub conversation_id: Option<ConversationId>,
    /// Agent that posted it.
    pub agent_id: AgentId,
    /// The author's name when the message was posted.
    pub agent_name: String,
    /// The author's type when the message was posted.
    pub agent_kind: AgentKind,
    /// Root of the thread; `None` for a root.
    pub thread_id: Option<MessageId>,
    /// Text as last edited.
    pub text: String,
    /// Rich blocks, passed through.
    pub blocks: Option<JsonText>,
    /// JSON object of the client, with the engine's own keys.
    pub metadata: JsonText,
    /// Array of file descriptions.
    pub attachments: Value,
    /// Names mentioned in the text.
    pub mentions: Vec<String>,
    /// Requested injection mode.
    pub mode: Mode,
    /// Free text of the client.
    pub content_type: Option<String>,
    /// Time of acceptance.
    pub created_at: DateTime<Utc>,
}

impl Message {
    /// Returns the kind of the message's event, which is also the type of its payload.
    #[must_use]
    pub const fn event_kind(&self) -> &'static str {
        match (self.thread_id, self.channel_kind) {
            (Some(_), ChannelKind::Channel | ChannelKind::Direct | ChannelKind::Group) => kind::THREAD_REPLY,
            (None, ChannelKind::Channel) => kind::MESSAGE_CREATED,
            (None, ChannelKind::Direct) => kind::DM_RECEIVED,
            (None, ChannelKind::Group) => kind::GROUP_DM_RECEIVED,
        }
    }

    /// Returns the bytes that it holds in memory, apart from parts that are small in every message.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let blocks = self.blocks.as_ref().map_or(0, JsonText::byte_len);
        self.text.len() + blocks + self.metadata.byte_len() + encoded_length(&self.attachments)
    }

    /// Returns the channel id that clients see. The channel of a one-to-one conversation is named after the
    /// conversation.
    #[must_use]
    pub fn client_channel_id(&self) -> String {
        client_channel_id(self.channel_id, self.conversation_id.as_ref().map(ConversationId::as_str))
    }

    /// Returns true if files are attached.
    #[must_use]
    pub fn has_attachments(&self) -> bool {
        self.attachments.as_array().is_some_and(|list| !list.is_empty())
    }

    /// Returns the properties that decide which observers see the message.
    #[must_use]
    pub fn facts(&self) -> MessageFacts<'_> {
        MessageFacts {
            channel_id: self.channel_id,
            channel_name: &self.channel_name,
            conversation_id: self.conversation_id.as_ref().map(ConversationId::as_str),
            agent_id: self.agent_id,
            created_at: self.created_at,
        }
    }
}

/// A message with the counts that lists show.
#[derive(Debug, Clone, PartialEq)]
pub struct ListedMessage {
    /// The message itself.
    pub message: Message,
    /// Number of replies.
    pub reply_count: i64,
    /// Number of agents that have read it, up to a bound.
    pub read_by_count: i64,
    /// Reactions by emoji, the earliest first.
    pub reactions: Vec<ReactionCount>,
}

impl From<Message> for ListedMessage {
    /// Wraps a message that was just posted, which has no replies, readers or reactions.
    fn from(message: Message) -> Self {
        Self { message, reply_count: 0, read_by_count: 0, reactions: Vec::new() }
    }
}

/// All reactions to a message with one emoji.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReactionCount {
    /// Emoji of these reactions.
    pub emoji: String,
    /// Number of agents.
    pub count: i64,
    /// Names of the agents in the order of their reactions, up to a bound.
    pub agents: Vec<String>,
}

/// A page of messages: ids strictly between `after` and `before`, at most `limit`.
#[derive(Debug, Clone, Copy)]
pub struct MessagePage {
    pub before: Option<MessageId>,
    pub after: Option<MessageId>,
    pub limit: i64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message() -> Message {
        Message {
            id: MessageId::new(5),
            channel_id: ChannelId::new(6),
            channel_name: "general".into(),
            channel_kind: ChannelKind::Channel,
            conversation_id: None,
            agent_id: AgentId::new(7),
            agent_name: "ada".into(),
            agent_kind: AgentKind::Agent,
            thread_id: None,
            text: "hello".into(),
            blocks: None,
            metadata: JsonText::empty_object(),
            attachments: Value::Array(Vec::new()),
            mentions: Vec::new(),
            mode: Mode::Wait,
            content_type: None,
            created_at: DateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn hidden_metadata_is_kept_and_not_shown() {
        let stored = JsonText::from(serde_json::json!({ "a": 1, "__relaycast_x": [2], "b": "__relaycast_" }));
        assert_eq!(client_metadata(&stored).get(), r#"{"a":1,"b":"__relaycast_"}"#);
        let new = JsonText::from(serde_json::json!({ "c": {} }));
        assert_eq!(keep_hidden_metadata(Some(&new), &stored).get(), r#"{"c":{},"__relaycast_x":[2]}"#);
        assert_eq!(keep_hidden_metadata(None, &stored).get(), r#"{"__relaycast_x":[2]}"#);
        let forged = JsonText::from(serde_json::json!({ "c": {}, "__relaycast_x": 3, "__relaycast_y": 4 }));
        assert_eq!(keep_hidden_metadata(Some(&forged), &stored).get(), r#"{"c":{},"__relaycast_x":[2]}"#);
        assert_eq!(client_metadata(&JsonText::encode(&())).get(), "{}");
        let addressed = with_from_address(&with_from_address(&new, "forged"), "ada@box");
        assert_eq!(from_address(&addressed).as_deref(), Some("ada@box"));
        assert_eq!((client_metadata(&addressed), from_address(&new)), (new, None));
    }

    #[test]
    fn the_event_kind_follows_from_thread_and_channel() {
        let thread_id = Some(MessageId::new(4));
        for (channel_kind, root) in [
            (ChannelKind::Channel, "message.created"),
            (ChannelKind::Direct, "dm.received"),
            (ChannelKind::Group, "group_dm.received"),
        ] {
            assert_eq!(Message { channel_kind, ..message() }.event_kind(), root);
            assert_eq!(Message { channel_kind, thread_id, ..message() }.event_kind(), "thread.reply");
        }
    }

    #[test]
    fn the_channel_of_a_direct_conversation_is_named_after_it() {
        let of_conversation = |id: &str| Message { conversation_id: Some(ConversationId::new(id)), ..message() };
        assert_eq!(message().client_channel_id(), "6");
        let direct = of_conversation("dm_0123456789abcdef01234567");
        assert_eq!(direct.client_channel_id(), "dmch_0123456789abcdef01234567");
        assert_eq!(of_conversation("99").client_channel_id(), "6", "a group's channel keeps its own id");
    }

    #[test]
    fn mentions_follow_white_space() {
        for (text, expected) in [
            ("@bob", vec!["bob"]),
            ("hi @bob, @al-ice_2!", vec!["bob", "al-ice_2"]),
            ("@bob @ada @bob", vec!["bob", "ada"]),
            ("mail bob@example.org", vec![]),
            ("(@bob)", vec![]),
            ("@@bob", vec![]),
            ("@ bob", vec![]),
            ("line\n@bob\t@Bob", vec!["bob", "Bob"]),
            ("@bobé", vec!["bob"]),
            ("é@bob \u{3000}@ada", vec!["ada"]),
            ("", vec![]),
        ] {
            assert_eq!(extract_mentions(text), expected, "{text:?}");
        }
    }

    #[test]
    fn mentions_are_bounded() {
        let text: String = (0..1000).map(|n| format!("@a{n} ")).collect();
        assert_eq!(extract_mentions(&text).len(), MAX_MENTIONS);
    }

    proptest! {
        #[test]
        fn a_mention_is_in_the_text_and_named_once(text in "[@a-c \n.é-]{0,60}") {
            let found = extract_mentions(&text);
            for (at, name) in found.iter().enumerate() {
                let mention = format!("@{name}");
                prop_assert!(text.contains(&mention));
                prop_assert!(!found[..at].contains(name));
            }
        }
    }
}
