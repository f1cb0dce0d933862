//! Worker's part of invocations: those with a lost or silent node, those that wait, and those that cannot be placed.

use relay_domain::actions::INVENTORY_RESULT_GRACE;
use relay_store::StoreError;

use super::Actions;
use crate::EngineResult;

/// Bound of the invocations that one step takes back or fails.
const MAX_PER_STEP: i64 = 500;
/// Bound of the invocations of one workspace in a step.
const MAX_PER_WORKSPACE: i64 = 50;

impl Actions {
    /// Processes open invocations once. Returns their number, and true if more are due.
    pub(crate) async fn process_open_invocations(&self) -> EngineResult<(u64, bool)> {
        let at = self.core.now();
        // First: a spawn whose agent runs must not be taken back or failed by the steps below.
        let mut up = self.core.store.finish_spawned(INVENTORY_RESULT_GRACE, MAX_PER_STEP, at).await?;
        self.announce_outcomes(&mut up);
        let lost = self.core.store.reclaim_lost_invocations(MAX_PER_STEP, at).await?;
        let mut hopeless = self.core.store.fail_unservable(MAX_PER_STEP, at).await?;
        let failed = hopeless.outcomes.len() as u64;
        self.announce_outcomes(&mut hopeless);
        let mut more = lost >= MAX_PER_STEP.unsigned_abs() || failed >= MAX_PER_STEP.unsigned_abs();
        let mut tried = 0;
        for scope in self.core.store.workspaces_with_due_invocations(at).await? {
            // A transaction for each: placements of a workspace take turns under its lock.
            let done = match self.core.store.redispatch(scope, MAX_PER_WORKSPACE, fastrand::u64(..), at).await {
                Ok(done) => done,
                // The workspace is invoking all the time. It gets its next turn in the next step; the others go on.
                Err(StoreError::Aborted { .. }) => {
                    tracing::debug!(workspace.id = %scope.workspace_id(), "waiting invocations of a workspace are locked, will retry");
                    continue;
                }
                // A corrupt row waits for an operator, and must not stop the retries of other workspaces.
                Err(error @ StoreError::Corrupt { .. }) => {
                    tracing::error!(
                        workspace.id = %scope.workspace_id(),
                        error = &error as &dyn std::error::Error,
                        "waiting invocations of a workspace cannot be read, skipped"
                    );
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            for sent in &done.sent {
                self.hint_redispatch(sent.scope, sent.invocation_id, &sent.dispatch);
            }
            tried += done.examined as u64;
            more |= i64::try_from(done.examined).is_ok_and(|examined| examined >= MAX_PER_WORKSPACE);
        }
        Ok((lost + failed + tried, more))
    }
}
