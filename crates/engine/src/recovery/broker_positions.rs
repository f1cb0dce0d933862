//! Brokers whose last seen seq is above the restored database's head.

use std::time::Duration;

use relay_domain::{AgentId, mailboxes::stream::Seq, recovery::REPORT_WINDOW};
use relay_store::{
    mailboxes::cursors::MailboxPosition,
    nodes::fence::Fence,
    recovery::{ReportOutcome, ReportedSeq},
};

use super::Recovery;
use crate::EngineResult;

impl Recovery {
    /// True if the database was recovered so recently that a broker may know higher numbers.
    #[must_use]
    pub fn was_restored_recently(&self) -> bool {
        let recovered_at = *self.state.recovered_at.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // A recovery in the future, by the clock of a process that is ahead, counts as recent.
        recovered_at.is_some_and(|at| (self.core.now() - at).to_std().unwrap_or(Duration::ZERO) <= REPORT_WINDOW)
    }

    /// Accepts a broker's position `reported` that exceeds the last sent seq of this database: raises the head of its
    /// agent's mailbox, within bounds. Rows written since the restore with such a seq move above it, because
    /// the broker would drop them as repeated. Returns the position of the mailbox afterwards.
    pub async fn accept_broker_position(
        &self,
        fence: &Fence,
        agent: AgentId,
        reported: Seq,
    ) -> EngineResult<Option<MailboxPosition>> {
        self.raise_to(fence, agent, reported).await?;
        Ok(self.core.store.positions(&[(fence.scope, agent)]).await?.pop())
    }

    /// Raises the head of a mailbox above a seq that was sent before the last recovery.
    pub(super) async fn raise_to(&self, fence: &Fence, agent: AgentId, reported: Seq) -> EngineResult<()> {
        let margin = self.state.margin;
        let report = ReportedSeq { fence, agent_id: agent, seq: reported };
        let outcome =
            self.core.store.raise_to_reported(report, margin, self.core.now(), || self.core.ids.next_id()).await?;
        match outcome {
            ReportOutcome::NotAhead => {}
            ReportOutcome::Raised { lost, moved } => {
                tracing::warn!(agent.id = %agent, reported, lost, moved, "raised a mailbox head above a seq that was sent before the recovery");
            }
            ReportOutcome::Refused => {
                tracing::warn!(agent.id = %agent, reported, margin, "refused a seq that was sent before the recovery: far above the mailbox head");
            }
        }
        Ok(())
    }
}
