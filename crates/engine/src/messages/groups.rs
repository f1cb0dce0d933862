//! Groups that begin with a message.

use relay_domain::{
    access::rights::Operation,
    names::{MAX_TEXT_BYTES, check_length},
};
use relay_wire::{channels::conversation::CreateGroupBody, nodes::deliver_frame::FRAME_LIMIT};
use serde_json::Value;

use super::{
    Messages,
    posting::{Draft, Target},
};
use crate::{
    EngineError, EngineResult,
    access::{callers::AgentCaller, idempotency::ClientKey},
    channels::conversations::CreatedGroup,
    error::TooLarge,
};

/// Bound of a frame's fields beside the text.
const FRAME_OVERHEAD: usize = 16 * 1024;

impl Messages {
    /// Creates a group conversation with the caller in it, and posts its first message. Under an idempotency key both
    /// happen once.
    ///
    /// # Errors
    /// When a participant is unknown, there are too many, the text is too long, or the key was used with another body.
    /// When the first message cannot be committed, the group exists all the same: a request with the same key finds it
    /// and posts the message, one without a key gets no status.
    pub async fn create_group(
        &self,
        caller: &AgentCaller,
        request: &CreateGroupBody,
        key: Option<&ClientKey>,
    ) -> EngineResult<CreatedGroup> {
        self.core.authorize(caller, Operation::Send).await?;
        let text = request.text.as_deref().filter(|text| !text.is_empty());
        if let Some(text) = text {
            check_length("text", text, MAX_TEXT_BYTES)?;
            // Refused before the group is created: a conversation's frame holds the text twice.
            if Value::from(text).to_string().len() * 2 + FRAME_OVERHEAD > FRAME_LIMIT {
                return Err(EngineError::TooLarge(TooLarge::Message));
            }
        }
        // Two transactions, because the post needs the committed conversation.
        let group = self.channels.group_under_key(caller, request, key).await?;
        if let Some(text) = text
            && let Some(id) = group.id()
        {
            // The key hash covers the conversation, so the same key posts the message once.
            let draft = Draft { text: text.to_owned(), ..Draft::default() };
            let posted = self.post(caller, Target::Conversation(id.to_owned()), draft, key.cloned()).await;
            // Without a key, a repeated request would create another group.
            posted.map_err(|error| if key.is_none() { error.after_commit() } else { error })?;
        }
        Ok(group)
    }
}
