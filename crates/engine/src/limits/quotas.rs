//! What a workspace may use: its plan, and what an operator sets apart from it.

use relay_domain::{
    WorkspaceId, WorkspaceScope,
    plan::{Ceiling, Limits, OwnLimits, Plan},
};
use relay_store::LimitsInForce;

use crate::{Engine, EngineError, EngineResult};

/// A workspace's plan and limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    /// Its plan.
    pub plan: Plan,
    /// What differs from the plan.
    pub own: OwnLimits,
    /// What counts.
    pub limits: Limits,
}

impl Engine {
    /// What a workspace may use. Remembered for a minute; a change made at another gateway is heard of. What commits and
    /// workers go by is brought into line where it differs: after a change, and when the installation's plans are others.
    ///
    /// # Errors
    /// When the workspace is gone, or storage is away.
    pub async fn quotas(&self, scope: WorkspaceScope) -> EngineResult<Quotas> {
        let cache = &self.inner.limits.quotas;
        if let Some(known) = cache.get(&scope.workspace_id()).await {
            return Ok(known);
        }
        let row = self.store().quotas(scope).await?.ok_or(EngineError::WorkspaceNotFound)?;
        let limits = self.inner.limits.config.plans.of(row.plan).with(&row.own);
        let in_force = LimitsInForce { mailbox_depth: limits.mailbox_depth, message_days: limits.message_days };
        if row.in_force != in_force {
            self.store().put_in_force(scope, in_force).await?;
        }
        let quotas = Quotas { plan: row.plan, own: row.own, limits };
        cache.insert(scope.workspace_id(), quotas).await;
        Ok(quotas)
    }

    /// Puts a workspace on a plan, if one is given, and replaces what differs from it. Counts at once.
    ///
    /// # Errors
    /// When a number is out of range, the workspace is gone, or storage is away.
    pub async fn set_quotas(&self, scope: WorkspaceScope, plan: Option<Plan>, own: &OwnLimits) -> EngineResult<Quotas> {
        if !own.is_usable() {
            return Err(EngineError::InvalidRequest(OwnLimits::USABLE.into()));
        }
        if !self.store().set_quotas(scope, plan, own).await? {
            return Err(EngineError::WorkspaceNotFound);
        }
        self.forget_quotas(scope.workspace_id()).await;
        self.inner.hints.quotas_changed(scope);
        self.quotas(scope).await
    }

    /// How many of `ceiling` a workspace may have; `None` for any number. The count belongs into the
    /// transaction that adds one.
    ///
    /// # Errors
    /// When the workspace is gone, or storage is away.
    pub async fn ceiling(&self, scope: WorkspaceScope, ceiling: Ceiling) -> EngineResult<Option<i64>> {
        Ok(self.quotas(scope).await?.limits.of(ceiling))
    }

    /// Reads a workspace's quotas again at the next request.
    pub(crate) async fn forget_quotas(&self, workspace: WorkspaceId) {
        self.inner.limits.quotas.invalidate(&workspace).await;
    }
}
