//! [`FamilyId`]: the tenant that shares of a process are counted for.

use crate::WorkspaceId;

/// Family of workspaces: one that was created without a workspace key, and those that were created with its key or with
/// that of another member. They share one part of each resource, so that child workspaces do not multiply it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FamilyId(WorkspaceId);

impl FamilyId {
    /// Family of a workspace. `answerable` is the workspace that answers for it, if another one does.
    #[must_use]
    pub const fn of_workspace(workspace: WorkspaceId, answerable: Option<WorkspaceId>) -> Self {
        match answerable {
            Some(root) => Self(root),
            None => Self(workspace),
        }
    }

    /// Returns the workspace that answers for the family.
    #[must_use]
    pub const fn root(self) -> WorkspaceId {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_of_the_family_of_their_root() {
        let (root, child, other) = (WorkspaceId::new(1), WorkspaceId::new(2), WorkspaceId::new(3));
        let family = FamilyId::of_workspace(root, None);
        assert_eq!(FamilyId::of_workspace(child, Some(root)), family);
        assert_eq!(family.root(), root);
        assert_ne!(FamilyId::of_workspace(other, None), family);
    }
}
