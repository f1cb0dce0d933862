//! Marking messages as read, and who has read what.

use relay_domain::{ChannelId, MessageId, event};
pub use relay_store::{
    ReadPlace,
    read_state::{ReadPosition, ReaderRow},
};
use relay_store::{ReadReceipt, events::NewEvent};
use serde_json::json;

use crate::{
    Engine, EngineError, EngineResult,
    auth::{AgentCaller, Credential},
    render::timestamp,
};

impl Engine {
    /// The agent has read the message: a receipt (once), its last-read pointer (forward only), and its
    /// delivery of the message, if any, acknowledged.
    ///
    /// # Errors
    /// When there is no such message, or the agent is not a member of its channel.
    pub async fn mark_read(&self, caller: &AgentCaller, id: &str) -> EngineResult<(MessageId, ReadReceipt)> {
        let id: MessageId = id.parse().map_err(|_| EngineError::MessageNotFound)?;
        let event = |place: ReadPlace, read_at| {
            let data = json!({
                "message_id": id.to_string(),
                "agent_name": &*caller.name,
                "agent_id": caller.agent_id.to_string(),
                "read_at": timestamp(read_at),
            });
            let event = NewEvent::new(event::MESSAGE_READ, data).by(caller.agent_id);
            match place.conversation_id {
                Some(conversation) => event.in_conversation(Some(conversation)),
                None => event.in_channel(ChannelId::new(place.channel_id), place.channel_name),
            }
        };
        let receipt = self
            .store()
            .mark_read(caller.scope, id, caller.agent_id, self.now(), event)
            .await?
            .ok_or(EngineError::MessageNotFound)?;
        if receipt.settled {
            self.hints().mailbox_changed(caller.scope, caller.agent_id);
        }
        self.announce(receipt.recorded.clone());
        Ok((id, receipt))
    }

    /// Who has read a message, each once, in the order of reading.
    ///
    /// # Errors
    /// When there is no such message for the caller.
    pub async fn readers(&self, caller: &Credential, message: &str) -> EngineResult<Vec<ReaderRow>> {
        let message = self.visible_message(caller, message).await?.message;
        Ok(self.store().readers(caller.scope(), MessageId::new(message.message_id)).await?)
    }

    /// How far each member has read a channel, in the order of joining.
    ///
    /// # Errors
    /// When there is no channel of that name for the caller.
    pub async fn read_status(&self, caller: &Credential, channel: &str) -> EngineResult<Vec<ReadPosition>> {
        let channel = self.visible_channel(caller, channel).await?;
        Ok(self.store().read_status(caller.scope(), channel.channel_id, &caller.view().filters).await?)
    }
}
