//! Quotas of a workspace: its plan and the operator's overrides.

use std::time::Duration;

use moka::future::Cache;
use relay_domain::{
    WorkspaceId, WorkspaceScope,
    workspaces::plan::{LimitOverrides, Plan, PlanLimits, Plans, Quota},
};
use relay_store::EffectiveLimits;

use crate::{EngineError, EngineResult, core::Core, error::Missing};

const MAX_CACHED: u64 = 100_000;
/// Longest time for which a changed quota stays unnoticed when its hint was lost.
const CACHE_TTL: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    pub plan: Plan,
    pub overrides: LimitOverrides,
    pub limits: PlanLimits,
}

/// Quotas of all workspaces, cached for a minute; changes at other gateways arrive as hints.
#[derive(Clone)]
pub struct QuotaCache {
    core: Core,
    plans: Plans,
    known: Cache<WorkspaceId, Quotas>,
}

impl QuotaCache {
    pub(crate) fn new(core: Core, plans: Plans) -> Self {
        Self { core, plans, known: Cache::builder().max_capacity(MAX_CACHED).time_to_live(CACHE_TTL).build() }
    }

    /// Returns the quotas of a workspace. Also updates the copy that commits and workers read when it differs, after a
    /// change here or of the installation's plans.
    ///
    /// # Errors
    /// When the workspace has been deleted.
    pub async fn of(&self, scope: WorkspaceScope) -> EngineResult<Quotas> {
        if let Some(known) = self.known.get(&scope.workspace_id()).await {
            return Ok(known);
        }
        let store = &self.core.store;
        let row = store.quotas(scope).await?.ok_or(EngineError::NotFound(Missing::Workspace))?;
        let limits = self.plans.limits_of(row.plan).with_overrides(&row.overrides);
        let effective = EffectiveLimits { mailbox_depth: limits.mailbox_depth, message_days: limits.message_days };
        if row.effective != effective {
            store.set_effective_limits(scope, effective).await?;
        }
        let quotas = Quotas { plan: row.plan, overrides: row.overrides, limits };
        self.known.insert(scope.workspace_id(), quotas).await;
        Ok(quotas)
    }

    /// Assigns a plan, if given, and replaces the overrides. Takes effect at once.
    ///
    /// # Errors
    /// When a number is out of range, or the workspace has been deleted.
    pub async fn set(
        &self,
        scope: WorkspaceScope,
        plan: Option<Plan>,
        overrides: &LimitOverrides,
    ) -> EngineResult<Quotas> {
        if !overrides.is_valid() {
            return Err(EngineError::invalid_request(LimitOverrides::VALID_RANGES));
        }
        if !self.core.store.set_quotas(scope, plan, overrides).await? {
            return Err(EngineError::NotFound(Missing::Workspace));
        }
        self.forget(scope.workspace_id()).await;
        self.core.hints.quotas_changed(scope);
        self.of(scope).await
    }

    /// Returns the limit of one quota; `None` for unlimited. The count belongs into the transaction that adds one.
    pub async fn limit(&self, scope: WorkspaceScope, quota: Quota) -> EngineResult<Option<i64>> {
        Ok(self.of(scope).await?.limits.quota(quota))
    }

    /// Invalidates the cached quotas of a workspace.
    pub(crate) async fn forget(&self, workspace: WorkspaceId) {
        self.known.invalidate(&workspace).await;
    }
}
