//! Reading of messages: channels, single messages, threads.

use relay_domain::{
    MessageId, WorkspaceScope,
    messages::{ListedMessage, MessagePage},
    names::{MAX_NOTE_BYTES, check_length, strip_hash},
    observers::{ObserverScope, ScopeSet},
};
use relay_store::MessageHead;
use relay_tasks::byte_budget::ByteLease;

use super::Messages;
use crate::{EngineError, EngineResult, access::callers::Credential, core::Core, error::Missing, parts::Parts};

/// Default and maximum page size.
pub const PAGE: (i64, i64) = (50, 100);

impl Core {
    /// Reads these messages, each given with an upper bound of its bytes.
    pub(crate) async fn read_messages(
        &self,
        scope: WorkspaceScope,
        messages: Vec<(MessageId, usize)>,
    ) -> EngineResult<Parts<ListedMessage>> {
        let store = self.store.clone();
        let read = move |ids: Vec<MessageId>| {
            let store = store.clone();
            async move { Ok(store.listed_messages(scope, &ids).await?) }
        };
        self.read_in_parts(scope, messages, read).await
    }
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
    ) -> EngineResult<Parts<ListedMessage>> {
        let (scope, view) = (caller.scope(), caller.view());
        let name = strip_hash(channel);
        let found = self.core.store.messages_of_channel_named(scope, name, page, &view.filters).await?;
        let (_, listed) = found
            .filter(|(id, _)| view.sees_channel(*id, name))
            .ok_or_else(|| EngineError::NotFound(Missing::Channel(name.to_owned())))?;
        self.core.read_messages(scope, listed).await
    }

    /// Lists the messages of a session, newest first, those of conversations too.
    pub async fn of_session(
        &self,
        scope: WorkspaceScope,
        session_ref: &str,
        page: MessagePage,
    ) -> EngineResult<Parts<ListedMessage>> {
        check_length("session_ref", session_ref, MAX_NOTE_BYTES)?;
        let listed = self.core.store.session_messages(scope, session_ref, page).await?;
        self.core.read_messages(scope, listed).await
    }

    /// Returns a message, then its replies, oldest first; a reply has none.
    ///
    /// # Errors
    /// When there is no such message for this caller.
    pub async fn thread(&self, caller: &Credential, id: &str, page: MessagePage) -> EngineResult<Parts<ListedMessage>> {
        let parent = self.visible_head(caller, id).await?;
        let mut listed = vec![(parent.message_id, parent.content_bytes())];
        if parent.thread_id.is_none() {
            let filters = &caller.view().filters;
            listed.append(&mut self.core.store.replies(caller.scope(), parent.message_id, page, filters).await?);
        }
        let thread = self.core.read_messages(caller.scope(), listed).await?;
        let is_complete = thread.first.rows.first().is_some_and(|first| first.message.id == parent.message_id);
        if is_complete { Ok(thread) } else { Err(EngineError::NotFound(Missing::Message)) }
    }

    /// Finds a message if the caller may see it, and the memory that it takes until it is sent.
    ///
    /// # Errors
    /// When there is no such message for this caller.
    pub async fn message(&self, caller: &Credential, id: &str) -> EngineResult<(ListedMessage, ByteLease)> {
        let head = self.visible_head(caller, id).await?;
        let memory = self.core.reserve_answer(caller.scope(), head.content_bytes()).await?;
        Ok((self.read_message(caller.scope(), head.message_id).await?, memory))
    }

    pub(crate) async fn visible(&self, caller: &Credential, id: &str) -> EngineResult<ListedMessage> {
        let head = self.visible_head(caller, id).await?;
        self.read_message(caller.scope(), head.message_id).await
    }

    async fn read_message(&self, scope: WorkspaceScope, id: MessageId) -> EngineResult<ListedMessage> {
        self.core.store.message(scope, id).await?.ok_or(EngineError::NotFound(Missing::Message))
    }

    /// Finds a message without its contents if the caller may see it; one of a conversation only its participants and
    /// the workspace key do.
    ///
    /// # Errors
    /// When there is no such message for this caller.
    pub(crate) async fn visible_head(&self, caller: &Credential, id: &str) -> EngineResult<MessageHead> {
        let id: MessageId = id.parse().map_err(|_| EngineError::NotFound(Missing::Message))?;
        let scope = caller.scope();
        let message = self.core.store.message_head(scope, id).await?.ok_or(EngineError::NotFound(Missing::Message))?;
        let is_dm = message.channel_kind.is_conversation();
        let visible = match caller {
            Credential::Observer(observer) => {
                // Messages of channels need a scope of their own; the route may have accepted `dms:read`.
                let of_channels = ScopeSet::from_scopes(&[ObserverScope::Messages, ObserverScope::Threads]);
                observer.view.sees_message(&message.facts()) && (is_dm || observer.view.scopes.intersects(of_channels))
            }
            Credential::Workspace { .. } => true,
            Credential::Agent(_) | Credential::Node(_) if !is_dm => true,
            Credential::Agent(agent) => self.core.store.is_member(scope, message.channel_id, agent.agent_id).await?,
            Credential::Node(_) => false,
        };
        if visible { Ok(message) } else { Err(EngineError::NotFound(Missing::Message)) }
    }
}
