//! Which workspace a call is about, as a type.

use crate::WorkspaceId;

/// Proof that the caller may act inside one workspace. Every store call on tenant data takes it.
///
/// Only two kinds of code make one: authentication, from a verified token, and the system loops
/// that read the workspace id from a row that they own (`grep from_` finds all of them).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkspaceScope(WorkspaceId);

impl WorkspaceScope {
    /// For authentication: the workspace that a verified token belongs to.
    #[must_use]
    pub const fn from_verified_token(workspace: WorkspaceId) -> Self {
        Self(workspace)
    }

    /// For system loops: the workspace named by a row of the engine's own tables or by a frame that
    /// the engine itself published.
    #[must_use]
    pub const fn from_engine_row(workspace: WorkspaceId) -> Self {
        Self(workspace)
    }

    /// The workspace.
    #[must_use]
    pub const fn workspace_id(self) -> WorkspaceId {
        self.0
    }
}
