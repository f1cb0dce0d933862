//! [`Families`]: families of the workspaces that this process serves, for shares of its resources.

use moka::sync::Cache;
use relay_domain::{WorkspaceId, workspaces::family::FamilyId};

/// Bound of the remembered workspaces; the least used one is read again.
const MAX_REMEMBERED: u64 = 200_000;

/// Families by workspace. They never change. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Families(Cache<WorkspaceId, FamilyId>);

impl Default for Families {
    fn default() -> Self {
        Self(Cache::new(MAX_REMEMBERED))
    }
}

impl Families {
    /// Returns the family of a workspace that was met before.
    pub(crate) fn find(&self, workspace: WorkspaceId) -> Option<FamilyId> {
        self.0.get(&workspace)
    }

    /// Remembers the family of a workspace for which `answerable` answers, if another workspace does.
    pub(crate) fn remember(&self, workspace: WorkspaceId, answerable: Option<WorkspaceId>) -> FamilyId {
        let family = FamilyId::of_workspace(workspace, answerable);
        if self.find(workspace).is_none() {
            self.0.insert(workspace, family);
        }
        family
    }
}
