//! Replay of posts that were repeated under the idempotency key of the first request.

use std::time::Duration;

use relay_domain::channels::ChannelKind;
use relay_store::{PostRecord, channels::audience::AudienceKey};
use serde_json::Value;

use super::{AudienceSource, PostRequest, PostedMessage, Sender, Target, direct_recipient};
use crate::messages::Messages;
use crate::{
    EngineError, EngineResult,
    access::idempotency::ClientKey,
    error::{BadCredential, Missing},
};

/// Longest wait of a repeated post for others, far below the 30 s that a request may take.
const REPEAT_WAIT: Duration = Duration::from_secs(5);

impl Messages {
    /// Returns the post that was committed under the key of a request that failed for good, or the error.
    pub(in crate::messages) async fn find_post_after(
        &self,
        error: EngineError,
        sender: &Sender,
        request: &PostRequest,
    ) -> EngineResult<PostedMessage> {
        // The token was rotated meanwhile: it may no longer read earlier posts.
        let lost_token = matches!(error, EngineError::Unauthenticated(BadCredential::UnknownToken { .. }));
        if lost_token || error.is_transient() {
            return Err(error);
        }
        self.find_repeated_post(sender, &request.target, request.key.as_ref()).await?.ok_or(error)
    }

    /// Finds the post that was committed under this key: it stays posted, whatever has happened to its target since.
    pub(in crate::messages) async fn find_repeated_post(
        &self,
        sender: &Sender,
        target: &Target,
        key: Option<&ClientKey>,
    ) -> EngineResult<Option<PostedMessage>> {
        let Some(key) = key else { return Ok(None) };
        match self.core.replay(sender.scope, &target.stored_key(sender, key)).await? {
            Some(before) => Ok(Some(self.replay_post(sender, before.data).await?)),
            None => Ok(None),
        }
    }

    /// Returns the response of the first request with this key.
    pub(super) async fn replay_post(&self, sender: &Sender, response: Value) -> EngineResult<PostedMessage> {
        // A client may repeat a post as often as it likes, and the message is read for each repetition.
        let _permit = self.core.acquire_single_request_permit(sender.scope, REPEAT_WAIT).await?;
        let message = match serde_json::from_value::<PostRecord>(response) {
            Ok(record) => self.core.store.message(sender.scope, record.message_id).await?,
            Err(_) => None,
        };
        let message = message.ok_or(EngineError::NotFound(Missing::Message))?.message;
        // The stored response holds the id only, so the recipient's name is derived again.
        let to = match &message.conversation_id {
            Some(conversation) if message.channel_kind == ChannelKind::Direct => self
                .audiences
                .load(sender.scope, AudienceKey::Conversation(conversation.clone()), AudienceSource::Cache)
                .await?
                .and_then(|audience| direct_recipient(&audience, sender)),
            _ => None,
        };
        Ok(PostedMessage { message, replayed: true, to })
    }
}
