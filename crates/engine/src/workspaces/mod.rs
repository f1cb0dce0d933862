//! Workspaces: life cycle, suspension, activity, usage and the system prompt. Handle: [`Workspaces`]. Main types:
//! [`lifecycle::CreateWorkspace`], [`suspensions::Suspensions`], [`usage::UsageReport`].

pub mod activity;
pub mod erasure;
pub(crate) mod families;
pub mod lifecycle;
pub mod prompt;
pub mod suspensions;
pub mod usage;
pub mod usage_rollup;

use std::sync::Arc;

use relay_domain::{
    WorkspaceScope,
    workspaces::{family::FamilyId, plan::Plan},
};

use crate::{
    access::{limits::QuotaCache, secrets::Secrets, tokens::Tokens},
    core::Core,
    observers::Observers,
};

/// Handle of workspaces.
#[derive(Clone)]
pub struct Workspaces {
    pub(crate) core: Core,
    pub(crate) tokens: Tokens,
    pub(crate) secrets: Arc<Secrets>,
    pub(crate) observers: Observers,
    pub(crate) quotas: QuotaCache,
    /// Plan of workspaces that are created without a workspace key.
    pub(crate) default_plan: Plan,
}

impl Workspaces {
    /// Returns the family for which shares of a workspace are counted.
    pub async fn family(&self, scope: WorkspaceScope) -> FamilyId {
        self.core.family(scope).await
    }
}
