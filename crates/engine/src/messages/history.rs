//! Reading of messages: channels, single messages, threads.

use futures::{FutureExt as _, future::BoxFuture};
use relay_domain::{
    ChannelId, MessageId, WorkspaceScope,
    messages::{ListedMessage, MessagePage},
    names::{MAX_NOTE_BYTES, check_length, strip_hash},
    observers::{ObserverFilters, ObserverScope, ScopeSet},
};
use relay_store::{
    MessageHead,
    messages::pages::{ChannelKey, ChannelPage, ChannelPageQuery},
};
use relay_tasks::byte_budget::ByteLease;

use super::Messages;
use crate::{
    EngineError, EngineResult,
    access::callers::Credential,
    core::Core,
    error::Missing,
    parts::{LARGE_PART_BYTES, Part, Parts, ROW_BYTES},
};

/// Default and maximum page size.
pub const PAGE: (i64, i64) = (50, 100);

impl Core {
    /// Reads these messages, each given with an upper bound of its bytes.
    pub(crate) async fn read_messages(
        &self,
        scope: WorkspaceScope,
        messages: Vec<(MessageId, usize)>,
    ) -> EngineResult<Parts<ListedMessage>> {
        self.read_in_parts(scope, messages, self.message_reader(scope)).await
    }

    /// Returns the function that reads the messages of one part.
    fn message_reader(
        &self,
        scope: WorkspaceScope,
    ) -> impl Fn(Vec<MessageId>) -> BoxFuture<'static, EngineResult<Vec<ListedMessage>>> + Send + Sync + use<> {
        let store = self.store.clone();
        move |ids| {
            let store = store.clone();
            async move { Ok(store.listed_messages(scope, &ids).await?) }.boxed()
        }
    }

    /// Reads a page of the root messages of a channel that pass the filters, newest first. `None` without such a
    /// channel.
    pub(crate) async fn read_channel_page(
        &self,
        scope: WorkspaceScope,
        channel: ChannelKey<'_>,
        page: MessagePage,
        filters: &ObserverFilters,
    ) -> EngineResult<Option<FoundPage>> {
        // The limit was checked, so it is positive.
        let row_bytes = usize::try_from(page.limit).unwrap_or(0).saturating_mul(ROW_BYTES);
        // The memory is not waited for: there may be no message. Without it the contents are read afterwards.
        let memory = self.answers.try_reserve(self.family(scope).await, LARGE_PART_BYTES + row_bytes);
        let max_bytes = memory.is_some().then_some(LARGE_PART_BYTES);
        let query = ChannelPageQuery { channel, page, filters, at: self.now(), max_bytes };
        let Some(ChannelPage { channel_id, is_readable, messages: rows, bytes, rest }) =
            self.store.channel_page(scope, &query).await?
        else {
            return Ok(None);
        };
        // Memory is reserved for one part at a time: without rows it is free again here.
        let messages = match memory.filter(|_| !rows.is_empty()) {
            Some(mut memory) => {
                memory.shrink_to(bytes + rows.len() * ROW_BYTES);
                self.continue_parts(scope, Part { rows, memory }, rest.into(), self.message_reader(scope))
            }
            None => self.read_messages(scope, rest).await?,
        };
        Ok(Some(FoundPage { channel_id, is_readable, messages }))
    }
}

/// Page of a channel that exists.
pub(crate) struct FoundPage {
    pub(crate) channel_id: ChannelId,
    /// False if the reader takes no part in the conversation. The page is empty then.
    pub(crate) is_readable: bool,
    pub(crate) messages: Parts<ListedMessage>,
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
        let found = self.core.read_channel_page(scope, ChannelKey::Name(name), page, &view.filters).await?;
        found
            .filter(|found| view.sees_channel(found.channel_id, name))
            .map(|found| found.messages)
            .ok_or_else(|| EngineError::NotFound(Missing::Channel(name.to_owned())))
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
        let mut listed = vec![(parent.message_id, parent.content_bytes)];
        if parent.thread_id.is_none() {
            let filters = &caller.view().filters;
            listed.append(&mut self.core.store.replies(caller.scope(), parent.message_id, page, filters).await?);
        }
        let thread = self.core.read_messages(caller.scope(), listed).await?;
        // Retention may have removed the message since its head was read; replies alone are no thread.
        let is_complete = thread.first.rows.first().is_some_and(|first| first.message.id == parent.message_id);
        if is_complete { Ok(thread) } else { Err(EngineError::NotFound(Missing::Message)) }
    }

    /// Finds a message if the caller may see it, and the memory that it takes until it is sent.
    ///
    /// # Errors
    /// When there is no such message for this caller.
    pub async fn message(&self, caller: &Credential, id: &str) -> EngineResult<(ListedMessage, ByteLease)> {
        let head = self.visible_head(caller, id).await?;
        let memory = self.core.reserve_answer(caller.scope(), head.content_bytes).await?;
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
