//! Read receipts and read positions.

use relay_domain::{
    MessageId,
    events::kind,
    messages::{ReadLocation, ReadPosition, Reader},
};
use relay_store::{ReadReceipt, events::Event};
use relay_wire::{
    events::data::MessageRead,
    field::{Timestamp, ToValue as _},
};

use super::Messages;
use crate::{
    EngineError, EngineResult,
    access::callers::{AgentCaller, Credential},
    error::Missing,
};

impl Messages {
    /// Marks a message as read: records a receipt (once), moves the last-read pointer (forward only), and acknowledges
    /// the agent's delivery of the message, if any.
    ///
    /// # Errors
    /// When there is no such message, or the agent is not a member of its channel.
    pub async fn mark_read(&self, caller: &AgentCaller, id: &str) -> EngineResult<(MessageId, ReadReceipt)> {
        let id: MessageId = id.parse().map_err(|_| EngineError::NotFound(Missing::Message))?;
        let event = |place: ReadLocation, read_at| {
            let data = MessageRead {
                message_id: id,
                agent_name: &caller.name,
                agent_id: caller.agent_id,
                read_at: Timestamp(read_at),
            };
            let event = Event::new(kind::MESSAGE_READ, data.to_value()).by_agent(caller.agent_id);
            match place.conversation_id {
                Some(conversation) => event.in_conversation(Some(conversation.to_string())),
                None => event.in_channel(place.channel_id, place.channel_name),
            }
        };
        let receipt = self
            .core
            .store
            .mark_read(caller.scope, id, caller.agent_id, self.core.now(), event)
            .await?
            .ok_or(EngineError::NotFound(Missing::Message))?;
        if receipt.settled {
            // The delivery was settled without its socket, whose stream must learn of it.
            self.core.hints.mailbox_changed(caller.scope, caller.agent_id);
        }
        self.core.announce(receipt.recorded.clone());
        Ok((id, receipt))
    }

    /// Lists the readers of a message in the order of reading.
    ///
    /// # Errors
    /// When there is no such message for the caller.
    pub async fn readers(&self, caller: &Credential, message: &str) -> EngineResult<Vec<Reader>> {
        let message = self.visible_head(caller, message).await?;
        Ok(self.core.store.readers(caller.scope(), message.message_id).await?)
    }

    /// Lists the read position of each member of a channel, in the order of joining.
    ///
    /// # Errors
    /// When there is no channel of that name for the caller.
    pub async fn read_status(&self, caller: &Credential, channel: &str) -> EngineResult<Vec<ReadPosition>> {
        let channel = self.channels.visible(caller, channel).await?;
        Ok(self.core.store.read_status(caller.scope(), channel.channel_id, &caller.view().filters).await?)
    }
}
