//! Request and response bodies of the direct-message routes.

use relay_domain::messages::Message;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{
    agents::AgentType,
    field::Timestamp,
    messages::{Attachment, ConversationMessage, InjectionMode},
    words,
};

/// Body of `POST /v1/dm/group`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateGroupBody {
    /// Names of the participants besides the caller.
    pub participants: Vec<String>,
    /// Name of the group.
    #[serde(default)]
    pub name: Option<String>,
    /// Text of the first message, unless empty.
    #[serde(default)]
    pub text: Option<String>,
}

/// Body of `POST /v1/dm/:id/participants`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct AddParticipantBody {
    /// Name of the agent to add.
    #[serde(alias = "agent")]
    pub agent_name: String,
}

/// Query of `GET /v1/dm/conversations`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ConversationsQuery {
    /// Maximum number of conversations: 1 to 100. Without it 500 are listed.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Query of `GET /v1/dm/conversations/all`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct AllConversationsQuery {
    /// Page size: 500 by default, at most 500.
    #[serde(default)]
    pub limit: Option<String>,
    /// Cursor of the next page, from the previous one.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// Query of `GET /v1/dm/conversations/:id/messages`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct AnyMessagesQuery {
    /// Page size: 50 by default, at most 100.
    #[serde(default)]
    pub limit: Option<String>,
    /// Only messages older than this message id.
    #[serde(default)]
    pub before: Option<String>,
    /// Only messages newer than this message id.
    #[serde(default)]
    pub after: Option<String>,
    /// `1` adds the start of the next page to the answer.
    #[serde(default)]
    pub page: Option<String>,
}

/// Entry of `GET /v1/dm/conversations/all`.
#[derive(Debug, Serialize, ToSchema)]
pub struct AnyConversation {
    /// Id of the conversation.
    pub id: String,
    /// Id of the backing channel.
    pub channel_id: String,
    /// `1:1` or `group`.
    #[serde(rename = "type")]
    #[schema(value_type = words::ConversationType)]
    pub kind: &'static str,
    /// Name of the group, if it has one.
    pub name: Option<String>,
    /// Names of the participants.
    pub participants: Vec<String>,
    /// Newest message of the conversation.
    pub last_message: Option<AnyLastMessage>,
    /// Number of messages, counted up to 1000.
    pub message_count: i64,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// Newest message of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct AnyLastMessage {
    /// Text of the message.
    pub text: String,
    /// Id of the author.
    pub agent_id: String,
    /// Name of the author.
    pub agent_name: String,
    /// Time of acceptance.
    pub created_at: Timestamp,
}

/// Page of `GET /v1/dm/conversations/:id/messages?page=1`.
#[derive(Debug, Serialize, ToSchema)]
pub struct MessagesPage {
    /// Messages, newest first.
    pub messages: Vec<ConversationMessage>,
    /// Value of `before` for the next page.
    pub next_before: Option<String>,
    /// `true` if there is no next page.
    pub exhausted: bool,
}

/// Response of `POST /v1/dm/:id/participants`.
#[derive(Debug, Serialize, ToSchema)]
pub struct AddedParticipant {
    /// Id of the conversation.
    pub conversation_id: String,
    /// Name of the added agent.
    pub agent: String,
    /// `true` if the agent was a participant already.
    pub already_member: bool,
}

/// Participant of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct Participant {
    /// Id of the agent.
    pub agent_id: String,
    /// Name of the agent.
    pub agent_name: String,
}

/// Participant, in the form that the client expects (`X-Relaycast-Origin-Client`).
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ShownParticipant {
    /// An object, the form for most clients.
    Agent(Participant),
    /// The name alone, for `@relaycast/python-sdk`.
    Name(String),
}

/// Newest message of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct LastMessage {
    /// Id of the message.
    pub id: String,
    /// Text of the message.
    pub text: String,
    /// Id of the author.
    pub agent_id: Option<String>,
    /// Name of the author.
    pub agent_name: Option<String>,
    /// Type of the author.
    pub agent_type: Option<AgentType>,
    /// Time of acceptance.
    pub created_at: Timestamp,
}

/// Newest message, in the form that the client expects (`X-Relaycast-Origin-Client`).
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ShownLastMessage {
    /// An object, the form for most clients.
    Message(LastMessage),
    /// The text alone, for `@relaycast/python-sdk`.
    Text(String),
}

/// Entry of `GET /v1/dm/conversations`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Conversation {
    /// Id of the conversation.
    pub id: String,
    /// Id of the backing channel.
    pub channel_id: String,
    /// `1:1` or `group`.
    #[serde(rename = "type")]
    #[schema(value_type = words::ConversationType)]
    pub kind: &'static str,
    /// Name of the group, if it has one.
    pub name: Option<String>,
    /// Participants: objects, or names alone for clients that do not accept objects.
    pub participants: Vec<ShownParticipant>,
    /// Newest message: an object, or its text alone.
    pub last_message: Option<ShownLastMessage>,
    /// Number of unread messages of other participants.
    pub unread_count: i64,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// Response of `POST /v1/dm` and `POST /v1/dm/:id/messages`. The fields besides `message` serve older clients.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Sent)]
pub struct SentMessage {
    /// Id of the conversation.
    #[schema(value_type = String)]
    pub conversation_id: Option<String>,
    /// The accepted message.
    pub message: ConversationMessage,
    /// Time of acceptance.
    pub created_at: Timestamp,
    /// Id of the message.
    pub id: String,
    /// Id of the author.
    pub agent_id: String,
    /// Id of the author.
    pub from_agent_id: String,
    /// Text of the message.
    pub text: String,
    /// Injection mode that the author requested.
    pub injection_mode: InjectionMode,
    /// Files attached to it.
    #[schema(value_type = Vec<Attachment>)]
    pub attachments: Value,
    /// Name of the addressed agent, if one was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub to: Option<String>,
}

impl SentMessage {
    /// `to` is the addressed agent, if one was given.
    #[must_use]
    pub fn new(message: Message, to: Option<String>) -> Self {
        Self {
            conversation_id: message.conversation_id.as_ref().map(ToString::to_string),
            created_at: message.created_at.into(),
            id: message.id.to_string(),
            agent_id: message.agent_id.to_string(),
            from_agent_id: message.agent_id.to_string(),
            text: message.text.clone(),
            injection_mode: message.mode.into(),
            attachments: message.attachments.clone(),
            to,
            message: message.into(),
        }
    }
}

/// Response of `POST /v1/dm/group`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Group {
    /// Id of the group conversation.
    pub id: String,
    /// Id of the backing channel.
    pub channel_id: String,
    /// Always `group`.
    #[schema(example = "group")]
    pub dm_type: String,
    /// Name of the group.
    pub name: Option<String>,
    /// Participants, including the caller.
    pub participants: Vec<Participant>,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// [`Group`] as it is stored with its idempotency key, so that a repeated request gets the same bytes.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct StoredGroup(pub Value);
