//! Reactions to messages.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, ChannelId, MessageId, event,
    names::{MAX_DISTINCT_EMOJI, MAX_EMOJI_BYTES, check_name},
};
pub use relay_store::ReactionCount;
use relay_store::{MessageRow, NewReaction, Reacted, events::NewEvent};
use serde_json::json;

use crate::{
    Engine, EngineError, EngineResult,
    auth::{AgentCaller, Credential},
    history::facts,
};

/// Names shown of one emoji where the reactions of one message are asked for.
const NAMES: i32 = 1000;

/// A reaction that is there.
#[derive(Debug)]
pub struct OwnReaction {
    /// Its id.
    pub id: i64,
    /// The message.
    pub message_id: MessageId,
    /// With what.
    pub emoji: String,
    /// Since when.
    pub created_at: DateTime<Utc>,
}

impl Engine {
    /// Reacts to a message; again is fine.
    ///
    /// # Errors
    /// When there is no such message for the caller, the emoji is empty or too long, or the message has
    /// [`MAX_DISTINCT_EMOJI`] others.
    pub async fn react(&self, caller: &AgentCaller, message: &str, emoji: &str) -> EngineResult<OwnReaction> {
        check_name("emoji", emoji, MAX_EMOJI_BYTES)?;
        let message = self.visible_message(&Credential::Agent(caller.clone()), message).await?.message;
        let id = MessageId::new(message.message_id);
        let new = NewReaction {
            message: id,
            author: AgentId::new(message.agent_id),
            agent: caller.agent_id,
            emoji,
            id: self.next_id(),
        };
        let event = reacted(&message, caller, emoji, "added");
        let reaction = match self.store().add_reaction(caller.scope, &new, self.now(), event).await? {
            Reacted::Added(reaction, recorded) => {
                self.announce(recorded);
                reaction
            }
            Reacted::Present(reaction) => reaction,
            Reacted::Full => {
                return Err(EngineError::InvalidRequest(format!(
                    "a message takes at most {MAX_DISTINCT_EMOJI} different reactions"
                )));
            }
        };
        let emoji = emoji.to_owned();
        Ok(OwnReaction { id: reaction.reaction_id, message_id: id, emoji, created_at: reaction.created_at })
    }

    /// Takes a reaction of the caller's back; one that is not there is fine.
    ///
    /// # Errors
    /// When there is no such message for the caller.
    pub async fn unreact(&self, caller: &AgentCaller, message: &str, emoji: &str) -> EngineResult<()> {
        let message = self.visible_message(&Credential::Agent(caller.clone()), message).await?.message;
        let event = reacted(&message, caller, emoji, "removed");
        let id = MessageId::new(message.message_id);
        let removed = self.store().remove_reaction(caller.scope, id, caller.agent_id, emoji, self.now(), event);
        if let Some(recorded) = removed.await? {
            self.announce(recorded);
        }
        Ok(())
    }

    /// The message, if the caller may see reactions to it: an observer needs no scope for the message itself.
    async fn reacted_message(&self, caller: &Credential, id: &str) -> EngineResult<MessageRow> {
        let Credential::Observer(observer) = caller else {
            return Ok(self.visible_message(caller, id).await?.message);
        };
        let id: MessageId = id.parse().map_err(|_| EngineError::MessageNotFound)?;
        let message = self.store().message(caller.scope(), id).await?.ok_or(EngineError::MessageNotFound)?.message;
        if observer.view.sees_message(&facts(&message)) { Ok(message) } else { Err(EngineError::MessageNotFound) }
    }

    /// The reactions to a message by emoji, the earliest first, with at most 1000 names each.
    ///
    /// # Errors
    /// When there is no such message for the caller.
    pub async fn reactions(&self, caller: &Credential, message: &str) -> EngineResult<Vec<ReactionCount>> {
        let message = self.reacted_message(caller, message).await?;
        Ok(self.store().reactions(caller.scope(), MessageId::new(message.message_id), NAMES).await?)
    }
}

fn reacted(message: &MessageRow, caller: &AgentCaller, emoji: &str, action: &str) -> NewEvent {
    let mut data = json!({
        "message_id": message.message_id.to_string(),
        "emoji": emoji,
        "agent_name": &*caller.name,
        "agent_id": caller.agent_id.to_string(),
        "action": action,
    });
    let place = NewEvent::new(event::MESSAGE_REACTED, json!({})).by(caller.agent_id);
    let place = match &message.conversation_id {
        Some(conversation) => {
            data["conversation_id"] = json!(conversation);
            place.in_conversation(Some(conversation.clone()))
        }
        None => {
            // One client reads the one name, one the other.
            data["channel"] = json!(message.channel_name);
            data["channel_name"] = json!(message.channel_name);
            data["channel_id"] = json!(message.channel_id.to_string());
            place.in_channel(ChannelId::new(message.channel_id), message.channel_name.clone())
        }
    };
    NewEvent { body: relay_store::events::EventBody::Data(data), ..place }
}
