//! Plans and quotas. Gateways remember them for a minute.

use relay_domain::{
    WorkspaceScope,
    plan::{OwnLimits, Plan},
};

use super::Admin;
use crate::{EngineError, EngineResult};

impl Admin {
    /// A workspace's plan, and what differs from it.
    ///
    /// # Errors
    /// When it is gone, or storage is away.
    pub async fn quotas(&self, scope: WorkspaceScope) -> EngineResult<(Plan, OwnLimits)> {
        let row = self.store.quotas(scope).await?.ok_or(EngineError::WorkspaceNotFound)?;
        Ok((row.plan, row.own))
    }

    /// Puts a workspace on a plan, if one is given, and replaces what differs from it.
    ///
    /// # Errors
    /// When a number is out of range, the workspace is gone, or storage is away.
    pub async fn set_quotas(&self, scope: WorkspaceScope, plan: Option<Plan>, own: &OwnLimits) -> EngineResult<()> {
        if !own.is_usable() {
            return Err(EngineError::InvalidRequest(OwnLimits::USABLE.into()));
        }
        if self.store.set_quotas(scope, plan, own).await? { Ok(()) } else { Err(EngineError::WorkspaceNotFound) }
    }
}
