//! Messages, sends and audiences for unit tests.

use chrono::DateTime;
use relay_domain::{
    AgentId, ChannelId, MessageId, WorkspaceId, WorkspaceScope,
    agents::AgentKind,
    channels::ChannelKind,
    mailboxes::delivery::{Mode, Reason},
    messages::Message,
};
use relay_store::messages::batch::{NewRecipient, NewSend};
use serde_json::{Map, Value};

pub(crate) fn scope() -> WorkspaceScope {
    WorkspaceScope::from_engine_row(WorkspaceId::new(7))
}

/// Message of agent 1, ada, in `general`.
pub(crate) fn message(id: i64, text: &str) -> Message {
    Message {
        id: MessageId::new(id),
        channel_id: ChannelId::new(10),
        channel_name: "general".to_owned(),
        channel_kind: ChannelKind::Channel,
        conversation_id: None,
        agent_id: AgentId::new(1),
        agent_name: "ada".to_owned(),
        agent_kind: AgentKind::Agent,
        thread_id: None,
        text: text.to_owned(),
        blocks: None,
        metadata: Value::Object(Map::new()).into(),
        attachments: Value::Array(Vec::new()),
        mentions: Vec::new(),
        mode: Mode::Wait,
        content_type: None,
        created_at: DateTime::UNIX_EPOCH,
    }
}

/// Send of a message to these agents.
pub(crate) fn send(message: Message, recipients: &[i64]) -> NewSend {
    let recipient = |id: &i64| NewRecipient { agent_id: AgentId::new(*id), mode: Mode::Wait, reason: Reason::Message };
    NewSend {
        scope: scope(),
        message,
        recipients: recipients.iter().map(recipient).collect(),
        members_version: 1,
        token_generation: None,
        hidden_sender: false,
        key: None,
        ttl_ms: None,
        traceparent: None,
        events: Vec::new(),
        arrived: MessageId::new(1),
        sequence: None,
    }
}
