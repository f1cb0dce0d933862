//! Marking messages as read.

use relay_domain::MessageId;
use relay_store::ReadReceipt;

use crate::{Engine, EngineError, EngineResult, auth::AgentCaller};

impl Engine {
    /// The agent has read the message: a receipt (once), its last-read pointer (forward only), and its
    /// delivery of the message, if any, acknowledged.
    ///
    /// # Errors
    /// When there is no such message, or the agent is not a member of its channel.
    pub async fn mark_read(&self, caller: &AgentCaller, id: &str) -> EngineResult<(MessageId, ReadReceipt)> {
        let id: MessageId = id.parse().map_err(|_| EngineError::MessageNotFound)?;
        let receipt =
            self.store().mark_read(caller.scope, id, caller.agent_id).await?.ok_or(EngineError::MessageNotFound)?;
        if receipt.settled {
            self.hints().mailbox_changed(caller.scope, caller.agent_id);
        }
        Ok((id, receipt))
    }
}
