//! Quotas of a workspace: its plan and the operator's overrides.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use moka::future::Cache;
use relay_domain::{
    WorkspaceId, WorkspaceScope,
    workspaces::plan::{LimitOverrides, Plan, PlanLimits, Plans, Quota},
};
use relay_store::EffectiveLimits;

use crate::{
    EngineError, EngineResult,
    access::credential_cache::{LatestInvalidations, place_of_workspace},
    core::Core,
    error::Missing,
};

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
    known: Arc<KnownQuotas>,
}

/// Quotas by workspace. Those that were read before an invalidation are never served after it, even if the read ends
/// and is cached later; see [`CredentialCache`](crate::access::credential_cache::CredentialCache).
#[derive(Debug)]
struct KnownQuotas {
    /// Quotas, and the number of invalidations before they were read.
    quotas: Cache<WorkspaceId, (Quotas, u64)>,
    invalidation_count: AtomicU64,
    latest_invalidations: LatestInvalidations,
}

impl KnownQuotas {
    fn new() -> Self {
        Self {
            quotas: Cache::builder().max_capacity(MAX_CACHED).time_to_live(CACHE_TTL).build(),
            invalidation_count: AtomicU64::new(0),
            latest_invalidations: LatestInvalidations::new(),
        }
    }

    async fn get(&self, workspace: WorkspaceId) -> Option<Quotas> {
        let (quotas, invalidations) = self.quotas.get(&workspace).await?;
        (self.latest_invalidations.latest(place_of_workspace(workspace)) <= invalidations).then_some(quotas)
    }

    /// Begins a read of storage whose outcome [`Self::insert`] caches.
    fn begin_read(&self) -> u64 {
        self.invalidation_count.load(Ordering::SeqCst)
    }

    async fn insert(&self, workspace: WorkspaceId, quotas: Quotas, invalidations: u64) {
        self.quotas.insert(workspace, (quotas, invalidations)).await;
    }

    /// Invalidates the quotas of a workspace, and reads of them that have begun.
    fn forget(&self, workspace: WorkspaceId) {
        let number = self.invalidation_count.fetch_add(1, Ordering::SeqCst) + 1;
        self.latest_invalidations.record(place_of_workspace(workspace), number);
    }
}

impl QuotaCache {
    pub(crate) fn new(core: Core, plans: Plans) -> Self {
        Self { core, plans, known: Arc::new(KnownQuotas::new()) }
    }

    /// Returns the quotas of a workspace. Also updates the copy that commits and workers read when it differs, after a
    /// change here or of the installation's plans.
    ///
    /// # Errors
    /// When the workspace has been deleted.
    pub async fn load(&self, scope: WorkspaceScope) -> EngineResult<Quotas> {
        if let Some(known) = self.known.get(scope.workspace_id()).await {
            return Ok(known);
        }
        // Noted before the read, so that a change during it is not hidden by the older row.
        let (store, invalidations) = (&self.core.store, self.known.begin_read());
        let row = store.quotas(scope).await?.ok_or(EngineError::NotFound(Missing::Workspace))?;
        let limits = self.plans.limits_of(row.plan).with_overrides(&row.overrides);
        let effective = EffectiveLimits { mailbox_depth: limits.mailbox_depth, message_days: limits.message_days };
        if row.effective != effective {
            store.set_effective_limits(scope, effective).await?;
        }
        let quotas = Quotas { plan: row.plan, overrides: row.overrides, limits };
        self.known.insert(scope.workspace_id(), quotas, invalidations).await;
        Ok(quotas)
    }

    /// Assigns a plan, if given, also to the child workspaces, and replaces the overrides. Takes effect at once; for
    /// the children within [`CACHE_TTL`].
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
        // After the write: a read that began before it is not cached any more.
        self.forget(scope.workspace_id());
        self.core.hints.quotas_changed(scope);
        self.load(scope).await
    }

    /// Returns the limit of one quota; `None` for unlimited. The count belongs into the transaction that adds one.
    pub async fn limit(&self, scope: WorkspaceScope, quota: Quota) -> EngineResult<Option<i64>> {
        Ok(self.load(scope).await?.limits.quota(quota))
    }

    /// Invalidates the cached quotas of a workspace.
    pub(crate) fn forget(&self, workspace: WorkspaceId) {
        self.known.forget(workspace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quotas(plan: Plan) -> Quotas {
        let overrides = LimitOverrides::default();
        Quotas { plan, overrides, limits: Plans::default().limits_of(plan) }
    }

    #[tokio::test]
    async fn a_read_that_began_before_an_invalidation_is_not_served_after_it() {
        let (known, changed, other) = (KnownQuotas::new(), WorkspaceId::new(7), WorkspaceId::new(8));
        known.insert(changed, quotas(Plan::Free), known.begin_read()).await;
        known.insert(other, quotas(Plan::Free), known.begin_read()).await;
        assert!(known.get(changed).await.is_some(), "cached");
        let begun = known.begin_read();
        known.forget(changed);
        assert!(known.get(changed).await.is_none(), "cached before the invalidation");
        known.insert(changed, quotas(Plan::Free), begun).await;
        assert!(known.get(changed).await.is_none(), "read before the invalidation and cached after it");
        known.insert(changed, quotas(Plan::Pro), known.begin_read()).await;
        assert_eq!(known.get(changed).await, Some(quotas(Plan::Pro)), "read after the invalidation");
        assert_eq!(known.get(other).await, Some(quotas(Plan::Free)), "another workspace");
    }
}
