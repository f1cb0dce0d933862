//! Reading of messages: channels, single messages, threads.

use relay_domain::{
    MessageId, WorkspaceScope,
    messages::ListedMessage,
    names::{MAX_NOTE_BYTES, check_length, strip_hash},
    observers::{ObserverScope, ScopeSet},
};
use relay_store::MessagePage;

use super::Messages;
use crate::{EngineError, EngineResult, access::authentication::Credential, error::Missing};

/// Default and maximum page size.
pub const PAGE: (i64, i64) = (50, 100);

/// Message and its replies.
#[derive(Debug)]
pub struct Thread {
    pub parent: ListedMessage,
    /// Replies, oldest first; a reply has none.
    pub replies: Vec<ListedMessage>,
}

impl Messages {
    /// Lists the root messages of a channel that the caller may see, newest first. Every agent of the workspace may
    /// read channels.
    ///
    /// # Errors
    /// When there is no channel of that name for this caller.
    pub async fn channel_messages(
        &self,
        caller: &Credential,
        channel: &str,
        page: MessagePage,
    ) -> EngineResult<Vec<ListedMessage>> {
        let (scope, view) = (caller.scope(), caller.view());
        let name = strip_hash(channel);
        let id = self
            .core
            .store
            .channel_id_by_name(scope, name)
            .await?
            .filter(|id| view.sees_channel(*id, name))
            .ok_or_else(|| EngineError::NotFound(Missing::Channel(name.to_owned())))?;
        Ok(self.core.store.channel_messages(scope, id, page, &view.filters).await?)
    }

    /// Lists the messages of a session, newest first, those of conversations too.
    pub async fn of_session(
        &self,
        scope: WorkspaceScope,
        session_ref: &str,
        page: MessagePage,
    ) -> EngineResult<Vec<ListedMessage>> {
        check_length("session_ref", session_ref, MAX_NOTE_BYTES)?;
        Ok(self.core.store.session_messages(scope, session_ref, page).await?)
    }

    /// Returns a message and its replies, oldest first.
    ///
    /// # Errors
    /// When there is no such message for this caller.
    pub async fn thread(&self, caller: &Credential, id: &str, page: MessagePage) -> EngineResult<Thread> {
        let parent = self.visible(caller, id).await?;
        let replies = if parent.message.thread_id.is_none() {
            self.core.store.replies(caller.scope(), parent.message.id, page, &caller.view().filters).await?
        } else {
            Vec::new()
        };
        Ok(Thread { parent, replies })
    }

    /// Finds a message if the caller may see it; one of a conversation only its participants and the workspace key do.
    ///
    /// # Errors
    /// When there is no such message for this caller.
    pub async fn visible(&self, caller: &Credential, id: &str) -> EngineResult<ListedMessage> {
        let id: MessageId = id.parse().map_err(|_| EngineError::NotFound(Missing::Message))?;
        let scope = caller.scope();
        let message = self.core.store.message(scope, id).await?.ok_or(EngineError::NotFound(Missing::Message))?;
        let is_dm = message.message.channel_kind.is_conversation();
        let visible = match caller {
            Credential::Observer(observer) => {
                // Messages of channels need a scope of their own; the route may have accepted `dms:read`.
                let of_channels = ScopeSet::from_scopes(&[ObserverScope::Messages, ObserverScope::Threads]);
                observer.view.sees_message(&message.message.facts())
                    && (is_dm || observer.view.scopes.intersects(of_channels))
            }
            Credential::Workspace { .. } => true,
            Credential::Agent(_) | Credential::Node(_) if !is_dm => true,
            Credential::Agent(agent) => {
                self.core.store.is_member(scope, message.message.channel_id, agent.agent_id).await?
            }
            Credential::Node(_) => false,
        };
        if visible { Ok(message) } else { Err(EngineError::NotFound(Missing::Message)) }
    }
}
