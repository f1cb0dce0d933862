//! Plans and quotas. Gateways cache them for a minute.

use relay_domain::{
    WorkspaceScope,
    workspaces::plan::{LimitOverrides, Plan},
};

use super::Admin;
use relay_engine::{EngineError, EngineResult, error::Missing};

impl Admin {
    /// Returns a workspace's plan and its overrides.
    ///
    /// # Errors
    /// When it has been deleted.
    pub async fn quotas(&self, scope: WorkspaceScope) -> EngineResult<(Plan, LimitOverrides)> {
        let row = self.store.quotas(scope).await?.ok_or(EngineError::NotFound(Missing::Workspace))?;
        Ok((row.plan, row.overrides))
    }

    /// Assigns a plan, if given, and replaces the overrides.
    ///
    /// # Errors
    /// When a number is out of range, or the workspace has been deleted.
    pub async fn set_quotas(
        &self,
        scope: WorkspaceScope,
        plan: Option<Plan>,
        own: &LimitOverrides,
    ) -> EngineResult<()> {
        if !own.is_valid() {
            return Err(EngineError::invalid_request(LimitOverrides::VALID_RANGES));
        }
        if self.store.set_quotas(scope, plan, own).await? {
            Ok(())
        } else {
            Err(EngineError::NotFound(Missing::Workspace))
        }
    }
}
