//! Quotas of a workspace: its plan and the operator's overrides.

use relay_domain::{
    WorkspaceId, WorkspaceScope,
    workspaces::plan::{LimitOverrides, Plan, PlanLimits, Quota},
};
use relay_store::EffectiveLimits;

use crate::{Engine, EngineError, EngineResult, error::Missing};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    pub plan: Plan,
    pub overrides: LimitOverrides,
    pub limits: PlanLimits,
}

impl Engine {
    /// Returns the quotas of a workspace, cached for a minute; changes at other gateways arrive as hints. Also updates
    /// the copy that commits and workers read when it differs, after a change here or of the installation's plans.
    ///
    /// # Errors
    /// When the workspace has been deleted.
    pub async fn quotas(&self, scope: WorkspaceScope) -> EngineResult<Quotas> {
        let cache = &self.inner.limits.quotas;
        if let Some(known) = cache.get(&scope.workspace_id()).await {
            return Ok(known);
        }
        let row = self.store().quotas(scope).await?.ok_or(EngineError::NotFound(Missing::Workspace))?;
        let limits = self.inner.limits.config.plans.limits_of(row.plan).with_overrides(&row.overrides);
        let effective = EffectiveLimits { mailbox_depth: limits.mailbox_depth, message_days: limits.message_days };
        if row.effective != effective {
            self.store().set_effective_limits(scope, effective).await?;
        }
        let quotas = Quotas { plan: row.plan, overrides: row.overrides, limits };
        cache.insert(scope.workspace_id(), quotas).await;
        Ok(quotas)
    }

    /// Assigns a plan, if given, and replaces the overrides. Takes effect at once.
    ///
    /// # Errors
    /// When a number is out of range, or the workspace has been deleted.
    pub async fn set_quotas(
        &self,
        scope: WorkspaceScope,
        plan: Option<Plan>,
        overrides: &LimitOverrides,
    ) -> EngineResult<Quotas> {
        if !overrides.is_valid() {
            return Err(EngineError::invalid_request(LimitOverrides::VALID_RANGES));
        }
        if !self.store().set_quotas(scope, plan, overrides).await? {
            return Err(EngineError::NotFound(Missing::Workspace));
        }
        self.forget_quotas(scope.workspace_id()).await;
        self.inner.hints.quotas_changed(scope);
        self.quotas(scope).await
    }

    /// Returns the limit of one quota; `None` for unlimited. The count belongs into the transaction that adds one.
    pub async fn quota(&self, scope: WorkspaceScope, quota: Quota) -> EngineResult<Option<i64>> {
        Ok(self.quotas(scope).await?.limits.quota(quota))
    }

    /// Invalidates the cached quotas of a workspace.
    pub(crate) async fn forget_quotas(&self, workspace: WorkspaceId) {
        self.inner.limits.quotas.invalidate(&workspace).await;
    }
}
