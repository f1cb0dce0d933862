//! Changing a message that was posted.

use relay_domain::{MessageId, event, mentions::mentions};
use relay_store::{MessageChange, MessageRow, audience::AudienceKey, events::NewEvent};
use serde_json::{Value, json};

use crate::{
    Engine, EngineError, EngineResult,
    auth::{AgentCaller, Credential},
    draft::{Draft, check_draft, check_frame},
    render,
};

/// Texts above this size are not told to sockets: whoever wants one reads the message.
const TOLD_BYTES: usize = 64 * 1024;

/// What to change of a message. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct MessageUpdate {
    /// The text.
    pub text: Option<String>,
    /// Rich blocks; `Some(None)` removes them.
    pub blocks: Option<Option<Value>>,
    /// Replaces the metadata; `Some(None)` empties it.
    pub data: Option<Option<Value>>,
}

impl Engine {
    /// Changes a message of the caller's own. Who got it stays as it was; replays and lists show the new one.
    ///
    /// # Errors
    /// When there is no such message for the caller, it is another's, or what it would become could not be
    /// posted.
    pub async fn update_message(&self, caller: &AgentCaller, id: &str, update: &MessageUpdate) -> EngineResult<Value> {
        let credential = Credential::Agent(caller.clone());
        let old = self.visible_message(&credential, id).await?.message;
        if old.agent_id != caller.agent_id.get() {
            return Err(EngineError::NotTheAuthor);
        }
        if update.text.is_none() && update.blocks.is_none() && update.data.is_none() {
            return Err(EngineError::InvalidRequest("text, blocks or data is required".into()));
        }
        check_draft(&Draft {
            text: update.text.clone().unwrap_or_else(|| old.text.clone()),
            blocks: update.blocks.clone().flatten(),
            data: update.data.clone().flatten(),
            ..Draft::default()
        })?;
        let metadata = update.data.as_ref().map(|data| with_own_keys(data.as_ref(), &old.metadata));
        let mut new = MessageRow { metadata: metadata.clone().unwrap_or_else(|| old.metadata.clone()), ..old };
        if let Some(text) = &update.text {
            (new.text, new.mentions) = (text.clone(), mentions(text));
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
        let message = MessageId::new(new.message_id);
        let event = NewEvent::of_message(event::MESSAGE_UPDATED, &new);
        let recorded = self
            .store()
            .update_message(caller.scope, (message, caller.agent_id), change, self.now(), event)
            .await?
            .ok_or(EngineError::MessageNotFound)?;
        self.announce(recorded);
        self.tell_updated(caller, &new).await;
        Ok(render::listed(&self.visible_message(&credential, id).await?))
    }

    /// Best-effort, to the members' own sockets.
    async fn tell_updated(&self, caller: &AgentCaller, message: &MessageRow) {
        if message.text.len() > TOLD_BYTES {
            return;
        }
        let mut data = json!({
            "id": message.message_id.to_string(),
            "channel_name": message.channel_name,
            "agent_id": message.agent_id.to_string(),
            "agent_name": message.agent_name,
            "from_name": message.agent_name,
            "text": message.text,
        });
        // A channel's messages are for the whole workspace; a conversation's for those who take part.
        let mut agents = None;
        if let Some(conversation) = &message.conversation_id {
            data["conversation_id"] = json!(conversation);
            let key = AudienceKey::Conversation(conversation.clone());
            let Ok(Some(audience)) = self.audience(caller.scope, key, false).await else { return };
            agents = Some(audience.members.iter().map(|m| relay_domain::AgentId::new(m.agent_id)).collect());
        }
        self.hints().notify_all(caller.scope, agents, "thread", event::MESSAGE_UPDATED, data, None);
    }
}

/// New metadata with the engine's own keys of the old, which its author cannot see.
fn with_own_keys(data: Option<&Value>, old: &Value) -> Value {
    let mut all = data.and_then(Value::as_object).cloned().unwrap_or_default();
    for (key, value) in old.as_object().into_iter().flatten() {
        if key.starts_with(render::HIDDEN_METADATA) {
            all.insert(key.clone(), value.clone());
        }
    }
    Value::Object(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engines_own_metadata_survives_its_authors() {
        let old = json!({ "a": 1, "__relaycast_x": 2 });
        assert_eq!(with_own_keys(Some(&json!({ "b": 1 })), &old), json!({ "b": 1, "__relaycast_x": 2 }));
        assert_eq!(with_own_keys(None, &old), json!({ "__relaycast_x": 2 }));
    }
}
