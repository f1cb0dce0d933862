//! Where Postgres and NATS are.

use anyhow::{Context as _, Result};
use relay_domain::WorkspaceScope;
use relay_engine::admin::Admin;

/// Postgres, for commands that need nothing else.
#[derive(Debug, clap::Args)]
pub(crate) struct Database {
    /// The Postgres database.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    pub(crate) database_url: String,
}

impl Database {
    pub(crate) fn admin(&self) -> Result<Admin> {
        Admin::connect(&self.database_url).context("use DATABASE_URL")
    }
}

/// A workspace by its id, or by its name if only one has it.
#[derive(Debug, clap::Args)]
pub(crate) struct Workspace {
    #[command(flatten)]
    database: Database,
    /// Id or name of the workspace.
    #[arg(long, short)]
    workspace: String,
}

impl Workspace {
    pub(crate) async fn find(&self) -> Result<(Admin, WorkspaceScope)> {
        let admin = self.database.admin()?;
        let scope = admin.find(&self.workspace).await.with_context(|| format!("find workspace {}", self.workspace))?;
        Ok((admin, scope))
    }
}
