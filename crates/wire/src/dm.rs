//! Bodies of the routes for direct-message conversations.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{
    agent::AgentType,
    field::Timestamp,
    message::{Attachment, ConversationMessage, InjectionMode},
    words,
};

/// `POST /v1/dm/group`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateGroupBody {
    /// Names of those who are to take part beside the caller.
    pub participants: Vec<String>,
    /// The group's own name.
    #[serde(default)]
    pub name: Option<String>,
    /// The first message, if not empty.
    #[serde(default)]
    pub text: Option<String>,
}

/// `POST /v1/dm/:id/participants`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct AddParticipantBody {
    /// Whom.
    #[serde(alias = "agent")]
    pub agent_name: String,
}

/// `GET /v1/dm/conversations/all`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct AllConversationsQuery {
    /// How many at most: 500 unless given, never more than 500.
    #[serde(default)]
    pub limit: Option<String>,
    /// Where the page before ended.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `GET /v1/dm/conversations/:id/messages`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct AnyMessagesQuery {
    /// How many at most: 50 unless given, never more than 100.
    #[serde(default)]
    pub limit: Option<String>,
    /// Only older messages than this one.
    #[serde(default)]
    pub before: Option<String>,
    /// Only newer messages than this one.
    #[serde(default)]
    pub after: Option<String>,
    /// `1`: the answer says where the next page begins.
    #[serde(default)]
    pub page: Option<String>,
}

/// A conversation of `GET /v1/dm/conversations/all`.
#[derive(Debug, Serialize, ToSchema)]
pub struct AnyConversation {
    /// The conversation.
    pub id: String,
    /// Its channel.
    pub channel_id: String,
    /// `1:1` or `group`.
    #[serde(rename = "type")]
    #[schema(value_type = words::ConversationType)]
    pub kind: &'static str,
    /// A group's own name.
    pub name: Option<String>,
    /// Names of those who take part.
    pub participants: Vec<String>,
    /// The newest message.
    pub last_message: Option<AnyLastMessage>,
    /// Messages in it, counted up to 1000.
    pub message_count: i64,
    /// When it began.
    pub created_at: Timestamp,
}

/// The newest message of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct AnyLastMessage {
    /// Its text.
    pub text: String,
    /// Who wrote it.
    pub agent_id: String,
    /// Its author's name.
    pub agent_name: String,
    /// When it was accepted.
    pub created_at: Timestamp,
}

/// A page of messages of `GET /v1/dm/conversations/:id/messages?page=1`.
#[derive(Debug, Serialize, ToSchema)]
pub struct MessagesPage {
    /// Newest first.
    #[schema(value_type = Vec<ConversationMessage>)]
    pub messages: Vec<Value>,
    /// What to give as `before` to get the next page.
    pub next_before: Option<String>,
    /// Whether there is no next page.
    pub exhausted: bool,
}

/// Answer to `POST /v1/dm/:id/participants`.
#[derive(Debug, Serialize, ToSchema)]
pub struct AddedParticipant {
    /// The conversation.
    pub conversation_id: String,
    /// The agent's name.
    pub agent: String,
    /// Whether nothing changed.
    pub already_member: bool,
}

/// An agent that takes part in a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct Participant {
    /// The agent.
    pub agent_id: String,
    /// Its name.
    pub agent_name: String,
}

/// Who takes part, as the client understands it (`X-Relaycast-Origin-Client`).
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ShownParticipant {
    /// An object, for all but one.
    Agent(Participant),
    /// The name alone, for `@relaycast/python-sdk`.
    Name(String),
}

/// The newest message of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct LastMessage {
    /// The message.
    pub id: String,
    /// Its text.
    pub text: String,
    /// Its author.
    pub agent_id: Option<String>,
    /// The author's name.
    pub agent_name: Option<String>,
    /// What the author is.
    #[schema(value_type = Option<AgentType>)]
    pub agent_type: Option<String>,
    /// When it was accepted.
    pub created_at: Timestamp,
}

/// The newest message, as the client understands it (`X-Relaycast-Origin-Client`).
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ShownLastMessage {
    /// An object, for all but one.
    Message(LastMessage),
    /// The text alone, for `@relaycast/python-sdk`.
    Text(String),
}

/// A conversation of `GET /v1/dm/conversations`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Conversation {
    /// The conversation.
    pub id: String,
    /// Its channel.
    pub channel_id: String,
    /// `1:1` or `group`.
    #[serde(rename = "type")]
    #[schema(value_type = words::ConversationType)]
    pub kind: &'static str,
    /// A group's own name.
    pub name: Option<String>,
    /// Who takes part: objects, or names alone for clients that know no objects.
    #[schema(value_type = Vec<ShownParticipant>)]
    pub participants: Vec<Value>,
    /// The newest message: an object, or its text alone.
    #[schema(value_type = Option<ShownLastMessage>)]
    pub last_message: Option<Value>,
    /// Messages of others that the caller has not read.
    pub unread_count: i64,
    /// When it began.
    pub created_at: Timestamp,
}

/// Answer to `POST /v1/dm` and `POST /v1/dm/:id/messages`. What is beside `message` is for older clients.
#[derive(Debug, Serialize, ToSchema)]
pub struct Sent {
    /// The conversation.
    pub conversation_id: String,
    /// The message.
    pub message: ConversationMessage,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// The message.
    pub id: String,
    /// Its author.
    pub agent_id: String,
    /// Its author.
    pub from_agent_id: String,
    /// Its text.
    pub text: String,
    /// How it asks to be injected.
    pub injection_mode: InjectionMode,
    /// Its files.
    pub attachments: Vec<Attachment>,
    /// Whom it is for, where an agent was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub to: Option<String>,
}

/// Answer to `POST /v1/dm/group`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Group {
    /// The conversation.
    pub id: String,
    /// Its channel.
    pub channel_id: String,
    /// `group`.
    #[schema(example = "group")]
    pub dm_type: String,
    /// The group's own name.
    pub name: Option<String>,
    /// Who takes part, the caller too.
    pub participants: Vec<Participant>,
    /// When it was made.
    pub created_at: Timestamp,
}
