//! Reading messages back: channels, single messages, threads.

use relay_domain::{
    AgentId, ChannelId, MessageId,
    names::strip_hash,
    observer::{MessageFacts, ObserverScope, ScopeSet},
};
use relay_store::{ListedMessage, MessagePage, MessageRow};
use serde_json::Value;

use crate::{Engine, EngineError, EngineResult, auth::Credential, render};

/// What a page of messages holds unless a limit is given, and at most.
pub const PAGE: (i64, i64) = (50, 100);

/// A thread: its root, or the reply that was asked for, and the replies.
#[derive(Debug)]
pub struct Thread {
    /// The message that was asked for.
    pub parent: Value,
    /// Its replies, oldest first; a reply has none.
    pub replies: Vec<Value>,
}

impl Engine {
    /// The root messages of a channel that the caller may see, newest first. Every member of the workspace
    /// may read channels.
    ///
    /// # Errors
    /// When there is no channel of that name for this caller.
    pub async fn channel_messages(
        &self,
        caller: &Credential,
        channel: &str,
        page: MessagePage,
    ) -> EngineResult<Vec<Value>> {
        let (scope, view) = (caller.scope(), caller.view());
        let name = strip_hash(channel);
        let id = self
            .store()
            .channel_of_name(scope, name)
            .await?
            .filter(|id| view.sees_channel(*id, name))
            .ok_or_else(|| EngineError::ChannelNotFound(name.to_owned()))?;
        let messages = self.store().channel_messages(scope, id, page, &view.filters).await?;
        Ok(messages.iter().map(render::listed).collect())
    }

    /// One message; one of a conversation only for those who take part in it, and for the workspace.
    ///
    /// # Errors
    /// When there is no such message for this caller.
    pub async fn message(&self, caller: &Credential, id: &str) -> EngineResult<Value> {
        Ok(render::listed(&self.visible_message(caller, id).await?))
    }

    /// A message and its replies, oldest first.
    ///
    /// # Errors
    /// When there is no such message for this caller.
    pub async fn thread(&self, caller: &Credential, id: &str, page: MessagePage) -> EngineResult<Thread> {
        let parent = self.visible_message(caller, id).await?;
        let replies = if parent.message.thread_id.is_none() {
            let root = MessageId::new(parent.message.message_id);
            self.store().replies(caller.scope(), root, page, &caller.view().filters).await?
        } else {
            Vec::new()
        };
        Ok(Thread { parent: render::listed(&parent), replies: replies.iter().map(render::listed).collect() })
    }

    /// The message of an id if the caller may see it. A node may see none of a conversation.
    pub(crate) async fn visible_message(&self, caller: &Credential, id: &str) -> EngineResult<ListedMessage> {
        let id: MessageId = id.parse().map_err(|_| EngineError::MessageNotFound)?;
        let scope = caller.scope();
        let message = self.store().message(scope, id).await?.ok_or(EngineError::MessageNotFound)?;
        let is_dm = message.message.channel_type != 0;
        let visible = match caller {
            Credential::Observer(observer) => {
                // Messages of channels need a scope of their own; the door may have let `dms:read` pass.
                let of_channels = ScopeSet::of(&[ObserverScope::Messages, ObserverScope::Threads]);
                observer.view.sees_message(&facts(&message.message))
                    && (is_dm || observer.view.scopes.meets(of_channels))
            }
            Credential::Workspace { .. } => true,
            Credential::Agent(_) | Credential::Node(_) if !is_dm => true,
            Credential::Agent(agent) => {
                let channel = ChannelId::new(message.message.channel_id);
                self.store().is_member(scope, channel, agent.agent_id).await?
            }
            Credential::Node(_) => false,
        };
        if visible { Ok(message) } else { Err(EngineError::MessageNotFound) }
    }
}

/// What decides who may see a message.
pub(crate) fn facts(message: &MessageRow) -> MessageFacts<'_> {
    MessageFacts {
        channel_id: ChannelId::new(message.channel_id),
        channel_name: &message.channel_name,
        conversation_id: message.conversation_id.as_deref(),
        agent_id: AgentId::new(message.agent_id),
        created_at: message.created_at,
    }
}
