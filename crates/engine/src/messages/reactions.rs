//! Reactions to messages.

use chrono::{DateTime, Utc};
pub use relay_domain::messages::ReactionCount;
use relay_domain::{
    MessageId, ReactionId,
    events::kind,
    names::{MAX_DISTINCT_EMOJI, MAX_EMOJI_BYTES, check_name},
};
use relay_store::{MessageHead, NewReaction, ReactionKey, ReactionOutcome, events::Event};
use relay_wire::{events::data::MessageReacted, field::ToValue as _};

use super::Messages;
use crate::{
    EngineError, EngineResult,
    access::callers::{AgentCaller, Credential},
    error::Missing,
};

/// Bound of the names per emoji in the reactions of one message.
const MAX_NAMES: i32 = 1000;

/// Reaction of the caller.
#[derive(Debug)]
pub struct OwnReaction {
    pub id: ReactionId,
    pub message_id: MessageId,
    pub emoji: String,
    pub created_at: DateTime<Utc>,
}

impl Messages {
    /// Adds a reaction to a message; idempotent.
    ///
    /// # Errors
    /// When there is no such message for the caller, the emoji is empty or too long, or the message has
    /// [`MAX_DISTINCT_EMOJI`] others.
    pub async fn add_reaction(&self, caller: &AgentCaller, message: &str, emoji: &str) -> EngineResult<OwnReaction> {
        check_name("emoji", emoji, MAX_EMOJI_BYTES)?;
        let message = self.visible_head(&Credential::Agent(caller.clone()), message).await?;
        let key = ReactionKey { message: message.message_id, agent: caller.agent_id, emoji };
        let new = NewReaction { key, author: message.agent_id, id: ReactionId::new(self.core.next_id()) };
        let event = reaction_event(&message, caller, emoji, "added");
        let reaction = match self.core.store.add_reaction(caller.scope, &new, self.core.now(), event).await? {
            ReactionOutcome::Added(reaction, recorded) => {
                self.core.announce(recorded);
                reaction
            }
            ReactionOutcome::Present(reaction) => reaction,
            ReactionOutcome::Full => {
                return Err(EngineError::invalid_request(format!(
                    "a message takes at most {MAX_DISTINCT_EMOJI} different reactions"
                )));
            }
        };
        let emoji = emoji.to_owned();
        Ok(OwnReaction {
            id: reaction.reaction_id,
            message_id: message.message_id,
            emoji,
            created_at: reaction.created_at,
        })
    }

    /// Removes a reaction of the caller; idempotent.
    ///
    /// # Errors
    /// When there is no such message for the caller.
    pub async fn remove_reaction(&self, caller: &AgentCaller, message: &str, emoji: &str) -> EngineResult<()> {
        let message = self.visible_head(&Credential::Agent(caller.clone()), message).await?;
        let event = reaction_event(&message, caller, emoji, "removed");
        let key = ReactionKey { message: message.message_id, agent: caller.agent_id, emoji };
        if let Some(recorded) = self.core.store.remove_reaction(caller.scope, key, self.core.now(), event).await? {
            self.core.announce(recorded);
        }
        Ok(())
    }

    /// Finds a message whose reactions the caller may see: an observer needs no scope for the message itself.
    async fn message_for_reactions(&self, caller: &Credential, id: &str) -> EngineResult<MessageHead> {
        let Credential::Observer(observer) = caller else {
            return self.visible_head(caller, id).await;
        };
        let id: MessageId = id.parse().map_err(|_| EngineError::NotFound(Missing::Message))?;
        let found = self.core.store.message_head(caller.scope(), id).await?;
        let message = found.ok_or(EngineError::NotFound(Missing::Message))?;
        if observer.view.sees_message(&message.facts()) {
            Ok(message)
        } else {
            Err(EngineError::NotFound(Missing::Message))
        }
    }

    /// Lists the reactions to a message by emoji, earliest first, with at most 1000 names each.
    ///
    /// # Errors
    /// When there is no such message for the caller.
    pub async fn reactions(&self, caller: &Credential, message: &str) -> EngineResult<Vec<ReactionCount>> {
        let message = self.message_for_reactions(caller, message).await?;
        Ok(self.core.store.reactions(caller.scope(), message.message_id, MAX_NAMES).await?)
    }
}

fn reaction_event(message: &MessageHead, caller: &AgentCaller, emoji: &str, action: &str) -> Event {
    let in_channel = message.conversation_id.is_none();
    let channel_name = in_channel.then_some(message.channel_name.as_str());
    let data = MessageReacted {
        message_id: message.message_id,
        emoji,
        agent_name: &caller.name,
        agent_id: caller.agent_id,
        action,
        conversation_id: message.conversation_id.as_ref(),
        channel: channel_name,
        channel_name,
        channel_id: in_channel.then_some(message.channel_id),
    };
    let event = Event::new(kind::MESSAGE_REACTED, data.to_value()).by_agent(caller.agent_id);
    match &message.conversation_id {
        Some(conversation) => event.in_conversation(Some(conversation.to_string())),
        None => event.in_channel(message.channel_id, message.channel_name.clone()),
    }
}
