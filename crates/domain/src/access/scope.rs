//! The workspace scope of a call, as a type.

use crate::WorkspaceId;

/// Proof that the caller may act inside one workspace. Every store call on tenant data takes it.
///
/// Only two kinds of code create one: authentication, from a verified token, and system loops, from the workspace id of
/// a row that they own (`grep from_` finds all of them), or as a column of that row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sqlx", derive(sqlx::Type), sqlx(transparent))]
pub struct WorkspaceScope(WorkspaceId);

impl WorkspaceScope {
    /// Creates the scope of the workspace that a verified token belongs to. For authentication only.
    #[must_use]
    pub const fn from_verified_token(workspace: WorkspaceId) -> Self {
        Self(workspace)
    }

    /// Creates the scope of a workspace named by a row of the engine's own tables or by a frame that the engine
    /// published. For system loops only.
    #[must_use]
    pub const fn from_engine_row(workspace: WorkspaceId) -> Self {
        Self(workspace)
    }

    /// Returns the id of the workspace.
    #[must_use]
    pub const fn workspace_id(self) -> WorkspaceId {
        self.0
    }
}
