//! The worker's part: invocations whose node was lost or silent, those that wait, and those that are hopeless.

use relay_domain::action::CAME_UP_QUIET;
use relay_store::StoreError;

use crate::{Engine, EngineResult};

/// Invocations that one step takes back or fails.
const PER_STEP: i64 = 500;
/// Invocations of one workspace that have their turn at once.
const PER_TURN: i64 = 50;

impl Engine {
    /// Looks after open invocations once. Returns how many it dealt with, and whether more are waiting right now.
    ///
    /// # Errors
    /// When storage is away.
    pub(crate) async fn look_after_invocations(&self) -> EngineResult<(u64, bool)> {
        let at = self.now();
        let mut up = self.store().finish_came_up(CAME_UP_QUIET, PER_STEP, at).await?;
        self.tell_outcomes(&mut up);
        let lost = self.store().take_back_lost(PER_STEP, at).await?;
        let mut hopeless = self.store().fail_hopeless(PER_STEP, at).await?;
        let failed = hopeless.outcomes.len() as u64;
        self.tell_outcomes(&mut hopeless);
        let mut more = lost >= PER_STEP.unsigned_abs() || failed >= PER_STEP.unsigned_abs();
        let mut tried = 0;
        for scope in self.store().workspaces_with_due_invocations(at).await? {
            let done = match self.store().redispatch(scope, PER_TURN, fastrand::u64(..), at).await {
                Ok(done) => done,
                // Somebody invokes there all the time. It has its next turn in the next step, and the others have theirs now.
                Err(StoreError::Aborted { .. }) => {
                    tracing::debug!(workspace.id = %scope.workspace_id(), "a workspace's waiting invocations were locked");
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            for sent in &done.sent {
                self.hint_redispatch(sent.scope, sent.invocation_id, &sent.dispatch);
            }
            tried += done.looked_at as u64;
            more |= i64::try_from(done.looked_at).is_ok_and(|looked_at| looked_at >= PER_TURN);
        }
        Ok((lost + failed + tried, more))
    }
}
