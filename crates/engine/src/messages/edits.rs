//! Edits of posted messages.

use relay_domain::{
    JsonText,
    access::rights::Operation,
    events::kind,
    messages::{ListedMessage, Message, extract_mentions, keep_hidden_metadata},
};
use relay_store::{MessageChange, channels::audience::AudienceKey, events::Event};
use relay_wire::{events::data::MessageUpdated, field::ToValue as _};

use super::Messages;
use crate::{
    EngineError, EngineResult,
    access::callers::{AgentCaller, Credential},
    channels::audiences::AudienceSource,
    error::{Denial, Missing},
    hints::SocketEvent,
    messages::posting::{Draft, check_draft, check_frame},
};

/// Larger texts are not part of the notice: clients read the message.
const MAX_NOTIFIED_BYTES: usize = 64 * 1024;

/// Changes of a message. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct MessageUpdate {
    pub text: Option<String>,
    /// `Some(None)` removes them.
    pub blocks: Option<Option<JsonText>>,
    /// Replaces the metadata; `Some(None)` empties it.
    pub data: Option<Option<JsonText>>,
}

impl Messages {
    /// Edits a message of the caller. Its recipients stay the same; replays and lists show the new version.
    ///
    /// # Errors
    /// When there is no such message for the caller, it is another agent's, or the new version could not be posted.
    pub async fn update(&self, caller: &AgentCaller, id: &str, update: &MessageUpdate) -> EngineResult<ListedMessage> {
        let credential = Credential::Agent(caller.clone());
        // Before the author is compared: a message that the caller may not see is missing, not another agent's.
        let old = self.visible(&credential, id).await?.message;
        if old.agent_id != caller.agent_id {
            return Err(EngineError::Forbidden(Denial::NotAuthor));
        }
        self.core.authorize(caller, Operation::Send).await?;
        if update.text.is_none() && update.blocks.is_none() && update.data.is_none() {
            return Err(EngineError::invalid_request("text, blocks or data is required"));
        }
        check_draft(&Draft {
            text: update.text.clone().unwrap_or_else(|| old.text.clone()),
            blocks: update.blocks.clone().flatten(),
            data: update.data.clone().flatten(),
            ..Draft::default()
        })?;
        // The engine's own entries stay: the author does not see them, and could not send them back.
        let metadata = update.data.as_ref().map(|data| keep_hidden_metadata(data.as_ref(), &old.metadata));
        let mut new = Message { metadata: metadata.clone().unwrap_or_else(|| old.metadata.clone()), ..old };
        if let Some(text) = &update.text {
            (new.text, new.mentions) = (text.clone(), extract_mentions(text));
        }
        if let Some(blocks) = &update.blocks {
            new.blocks.clone_from(blocks);
        }
        check_frame(&new)?;

        let change = MessageChange {
            text: update.text.as_deref().map(|text| (text, new.mentions.as_slice())),
            blocks: update.blocks.as_ref().map(Option::as_ref),
            metadata: metadata.as_ref(),
        };
        let event = Event::for_message(kind::MESSAGE_UPDATED, &new);
        let recorded = self
            .core
            .store
            .update_message(caller.scope, (new.id, caller.agent_id), change, self.core.now(), event)
            .await?
            .ok_or(EngineError::NotFound(Missing::Message))?;
        self.core.announce(recorded);
        // From memory; a concurrent edit sends its own notice.
        self.notify_updated(caller, &new).await;
        self.visible(&credential, id).await
    }

    /// Notifies the members' own sockets, best-effort.
    async fn notify_updated(&self, caller: &AgentCaller, message: &Message) {
        if message.text.len() > MAX_NOTIFIED_BYTES {
            return;
        }
        let data = MessageUpdated {
            id: message.id,
            channel_name: &message.channel_name,
            agent_id: message.agent_id,
            agent_name: &message.agent_name,
            from_name: &message.agent_name,
            text: &message.text,
            conversation_id: message.conversation_id.as_ref(),
        };
        // Messages of a channel are for the whole workspace; those of a conversation for its participants.
        let mut agents = None;
        if let Some(conversation) = &message.conversation_id {
            let key = AudienceKey::Conversation(conversation.clone());
            let Ok(Some(audience)) = self.audiences.load(caller.scope, key, AudienceSource::Cache).await else {
                return;
            };
            agents = Some(audience.members.iter().map(|m| m.agent_id).collect());
        }
        let event = SocketEvent {
            agents,
            topic: "thread",
            event: kind::MESSAGE_UPDATED,
            data: data.to_value(),
            event_id: None,
        };
        self.core.hints.notify_all(caller.scope, event);
    }
}
