//! Reading messages back: channels, single messages, threads.

use relay_domain::{ChannelId, MessageId, WorkspaceScope, names::strip_hash};
use relay_store::{ListedMessage, MessagePage};
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
    /// The root messages of a channel, newest first. Every member of the workspace may read channels.
    ///
    /// # Errors
    /// When there is no channel of that name.
    pub async fn channel_messages(
        &self,
        scope: WorkspaceScope,
        channel: &str,
        page: MessagePage,
    ) -> EngineResult<Vec<Value>> {
        let name = strip_hash(channel);
        let id = self
            .store()
            .channel_of_name(scope, name)
            .await?
            .ok_or_else(|| EngineError::ChannelNotFound(name.to_owned()))?;
        let messages = self.store().channel_messages(scope, id, page).await?;
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
            self.store().replies(caller.scope(), MessageId::new(parent.message.message_id), page).await?
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
        if message.message.channel_type == 0 {
            return Ok(message);
        }
        let visible = match caller {
            Credential::Workspace { .. } => true,
            Credential::Agent(agent) => {
                let channel = ChannelId::new(message.message.channel_id);
                self.store().is_member(scope, channel, agent.agent_id).await?
            }
            Credential::Node(_) => false,
        };
        if visible { Ok(message) } else { Err(EngineError::MessageNotFound) }
    }
}
