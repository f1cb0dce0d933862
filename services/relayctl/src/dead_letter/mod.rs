//! `relayctl dead-letter`: lists, redrives and purges dead letters.

mod purge;
mod redrive;

use anyhow::{Context as _, Result, bail};
pub(crate) use redrive::Arguments as Redrive;
use relay_admin::ListedDeadLetter;
use relay_engine::mailboxes::dead_letters::{DeadLetterAdmin, DeadLetterQuery};

use crate::{
    connection::{Database, WorkspaceArgument},
    output::{Output, format_time, or_dash},
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// List dead letters that are neither expired nor purged, newest first. Redriven ones show their new delivery.
    List {
        #[command(flatten)]
        workspace: WorkspaceArgument,
        /// Only dead letters of the agent with this name.
        #[arg(long)]
        agent: Option<String>,
        /// Maximum number of rows.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Redrive dead letters: one, or all that match a filter.
    Redrive(Redrive),
    /// Purge dead letters. They are no longer listed and cannot be redriven.
    Purge(purge::Arguments),
}

/// Selection of dead letters.
#[derive(Debug, clap::Args)]
pub(crate) struct Filter {
    #[command(flatten)]
    database: Database,
    /// Id of the workspace, or its name if only one living workspace has it.
    #[arg(long, short)]
    workspace: String,
    /// Only dead letters of this agent, by name or id.
    #[arg(long)]
    agent: Option<String>,
    /// Only dead letters whose agent was on this node, by name or id.
    #[arg(long)]
    node: Option<String>,
    /// Only dead letters with this reason.
    #[arg(long)]
    reason: Option<String>,
    /// Only dead letters at least this many seconds old.
    #[arg(long)]
    older_than_seconds: Option<u32>,
    /// All dead letters of the workspace. Without it a filter is required.
    #[arg(long)]
    all: bool,
    /// Only show what would be done.
    #[arg(long)]
    dry_run: bool,
}

impl Filter {
    async fn admin(&self) -> Result<DeadLetterAdmin> {
        let admin = self.database.connect()?;
        let scope = admin
            .find_workspace(&self.workspace)
            .await
            .with_context(|| format!("find workspace {}", self.workspace))?;
        DeadLetterAdmin::open(self.database.url(), scope.workspace_id()).await.context("open the workspace")
    }

    /// Builds the query. Refuses to select everything without `--all`.
    fn query(&self, admin: &DeadLetterAdmin) -> Result<DeadLetterQuery> {
        let filters = [&self.agent, &self.node, &self.reason];
        if !self.all && self.older_than_seconds.is_none() && filters.iter().all(|filter| filter.is_none()) {
            bail!("name a dead letter or a filter, or say --all");
        }
        Ok(DeadLetterQuery {
            agent: self.agent.clone(),
            node: self.node.clone(),
            reason: self.reason.clone(),
            from: None,
            until: self.older_than_seconds.map(|seconds| admin.time_before_now(seconds)),
        })
    }
}

pub(crate) async fn run(command: Command, out: Output) -> Result<()> {
    let (workspace, agent, limit) = match command {
        Command::List { workspace, agent, limit } => (workspace, agent, limit),
        Command::Redrive(arguments) => return redrive::run(arguments, out).await,
        Command::Purge(arguments) => return purge::run(arguments, out).await,
    };
    let (admin, scope) = workspace.find().await?;
    let letters = admin.dead_letters(scope, agent.as_deref(), limit).await.context("list dead letters")?;
    let headings = ["DELIVERY", "AGENT", "SEQ", "REASON", "ERROR", "DIED", "SENT AGAIN AS"];
    let cells = |letter: &ListedDeadLetter| {
        let row = &letter.row;
        vec![
            letter.delivery_id.clone(),
            row.agent.clone(),
            row.seq.to_string(),
            or_dash(row.reason.as_ref()),
            or_dash(row.error.as_ref()),
            format_time(row.at),
            or_dash(letter.redriven_as.as_ref()),
        ]
    };
    out.print_rows(&letters, &headings, cells, "there are no dead letters")
}
