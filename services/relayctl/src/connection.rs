//! Connection arguments of commands: Postgres, and a workspace in it.

use anyhow::{Context as _, Result};
use relay_admin::Admin;
use relay_domain::WorkspaceScope;

/// Postgres connection, for commands that need nothing else.
#[derive(Debug, clap::Args)]
pub(crate) struct Database {
    /// URL of the Postgres database.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    pub(crate) database_url: String,
}

impl Database {
    pub(crate) fn connect(&self) -> Result<Admin> {
        Admin::connect(&self.database_url).context("use DATABASE_URL")
    }
}

/// Workspace given by its id, or by its name if it is unique.
#[derive(Debug, clap::Args)]
pub(crate) struct WorkspaceArgument {
    #[command(flatten)]
    database: Database,
    /// Id or name of the workspace.
    #[arg(long, short)]
    workspace: String,
}

impl WorkspaceArgument {
    pub(crate) async fn find(&self) -> Result<(Admin, WorkspaceScope)> {
        let admin = self.database.connect()?;
        let scope = admin
            .find_workspace(&self.workspace)
            .await
            .with_context(|| format!("find workspace {}", self.workspace))?;
        Ok((admin, scope))
    }
}
