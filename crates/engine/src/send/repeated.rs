//! Posts that are asked for once more, under the idempotency key of the first time.

use relay_domain::MessageId;
use relay_store::audience::AudienceKey;
use serde_json::Value;

use super::{Posted, Sender, Target, recipient_of};
use crate::{Engine, EngineError, EngineResult, auth::AgentCaller, idempotency::ClientKey};

impl Engine {
    /// What was posted under this key: it stays posted, whatever has become of its target since.
    pub(super) async fn posted_before(
        &self,
        sender: &Sender,
        target: &Target,
        key: Option<&ClientKey>,
    ) -> EngineResult<Option<Posted>> {
        let Some(key) = key else { return Ok(None) };
        let hash = target.key_hash(sender, key);
        match self.replay(sender.scope, &hash, &key.fingerprint()).await? {
            Some(before) => Ok(Some(self.replayed(sender, &before.data).await?)),
            None => Ok(None),
        }
    }

    /// [`Engine::posted_before`] for a direct message to an agent of this name.
    ///
    /// # Errors
    /// When the key was used with another body, or storage is away.
    pub(crate) async fn sent_before(
        &self,
        caller: &AgentCaller,
        to: &str,
        key: Option<&ClientKey>,
    ) -> EngineResult<Option<Posted>> {
        self.posted_before(&caller.into(), &Target::Agent(to.to_owned()), key).await
    }

    /// The answer that the first request with this key got.
    pub(super) async fn replayed(&self, sender: &Sender, response: &Value) -> EngineResult<Posted> {
        let id = response["message_id"].as_str().and_then(|id| id.parse::<MessageId>().ok());
        let message = match id {
            Some(id) => self.store().message(sender.scope, id).await?,
            None => None,
        };
        let message = message.ok_or(EngineError::MessageNotFound)?.message;
        let to = match &message.conversation_id {
            Some(conversation) if message.channel_type == 1 => self
                .audience(sender.scope, AudienceKey::Conversation(conversation.clone()), false)
                .await?
                .and_then(|audience| recipient_of(&audience, sender)),
            _ => None,
        };
        Ok(Posted { message, replayed: true, to })
    }
}
