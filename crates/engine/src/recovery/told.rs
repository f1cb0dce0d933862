//! Brokers that have had numbers which a restored database does not know of.

use std::time::Duration;

use relay_domain::{AgentId, recovery::TOLD_WITHIN, session::Seq};
use relay_store::{cursors::Position, hosting::Fence, recovery::Told};

use crate::{Engine, EngineResult};

impl Engine {
    /// Whether the database was recovered so lately that a broker may know more than it.
    #[must_use]
    pub fn was_restored_lately(&self) -> bool {
        let recovered_at = *self.inner.recovery.recovered_at.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        recovered_at.is_some_and(|at| (self.now() - at).to_std().unwrap_or(Duration::ZERO) <= TOLD_WITHIN)
    }

    /// Takes the word of a broker that it has had everything up to `told`, above the head of its agent's mailbox: the head
    /// is raised, within bounds. What was written since the restore with such a number gets another one, for the broker
    /// would take it for what it has had. Returns where the mailbox stands then.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn position_told(&self, fence: &Fence, agent: AgentId, told: Seq) -> EngineResult<Option<Position>> {
        let margin = self.inner.recovery.margin;
        let outcome =
            self.store().raise_to_told(fence, agent, told, margin, self.now(), || self.inner.ids.next_id()).await?;
        match outcome {
            Told::Known => {}
            Told::Raised { given_up, moved } => {
                tracing::warn!(agent.id = %agent, told, given_up, moved, "a broker has had more than the restored database gave: its mailbox goes on above");
            }
            Told::Refused => {
                tracing::warn!(agent.id = %agent, told, margin, "a broker claims to have had far more than its mailbox holds, and is not believed");
            }
        }
        Ok(self.store().positions(&[(fence.scope, agent)]).await?.pop())
    }
}
