//! Connection arguments of commands: Postgres, and a workspace in it.

use anyhow::{Context as _, Result};
use relay_admin::Admin;
use relay_domain::WorkspaceScope;

/// Postgres connection, for commands that need nothing else.
#[derive(Debug, clap::Args)]
pub(crate) struct Database {
    /// URL of the Postgres database.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    database_url: String,
    /// URL that leads past a pooler, for which commands use it instead.
    #[arg(long, env = "DATABASE_DIRECT_URL", hide_env_values = true)]
    database_direct_url: Option<String>,
}

impl Database {
    /// Returns the URL of a connection that keeps its session.
    pub(crate) fn url(&self) -> &str {
        // An empty variable counts as unset, as in gateways and workers.
        self.database_direct_url.as_deref().filter(|url| !url.is_empty()).unwrap_or(&self.database_url)
    }

    pub(crate) fn connect(&self) -> Result<Admin> {
        Admin::connect(self.url()).context("use DATABASE_URL")
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
