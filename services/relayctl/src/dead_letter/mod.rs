//! `relayctl dead-letter`.

mod purge;
mod redrive;

use anyhow::{Context as _, Result, bail};
pub(crate) use redrive::Arguments as Redrive;
use relay_engine::{
    admin::ListedLetter,
    dead_letters::{Desk, LetterQuery},
};

use crate::{
    connection::{Database, Workspace},
    output::{Output, or_dash, time},
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// List deliveries that could not be made, whose rows are still kept and which were not purged, newest first. Those that were sent again
    /// say as what.
    List {
        #[command(flatten)]
        workspace: Workspace,
        /// Only those of the agent of this name.
        #[arg(long)]
        agent: Option<String>,
        /// How many at most.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Send dead letters again: one, or all that a filter asks for.
    Redrive(Redrive),
    /// Put dead letters out of sight. They cannot be sent again afterwards.
    Purge(purge::Arguments),
}

/// Which letters.
#[derive(Debug, clap::Args)]
pub(crate) struct Filter {
    #[command(flatten)]
    database: Database,
    /// The workspace, by id, or by a name that only one living workspace has.
    #[arg(long, short)]
    workspace: String,
    /// Letters of this agent, by name or id.
    #[arg(long)]
    agent: Option<String>,
    /// Letters whose agent was on this node, by name or id.
    #[arg(long)]
    node: Option<String>,
    /// Letters given up for this reason.
    #[arg(long)]
    reason: Option<String>,
    /// Letters given up this many seconds ago or more.
    #[arg(long)]
    older_than_seconds: Option<u32>,
    /// All letters of the workspace. Without it some filter is needed.
    #[arg(long)]
    all: bool,
    /// Only tell what would be done.
    #[arg(long)]
    dry_run: bool,
}

impl Filter {
    async fn desk(&self) -> Result<Desk> {
        let admin = self.database.admin()?;
        let scope = admin.find(&self.workspace).await.with_context(|| format!("find workspace {}", self.workspace))?;
        Desk::open(&self.database.database_url, scope.workspace_id()).await.context("open the workspace")
    }

    /// What the options ask for. Refuses to mean everything without being told so.
    fn query(&self, desk: &Desk) -> Result<LetterQuery> {
        let filters = [&self.agent, &self.node, &self.reason];
        if !self.all && self.older_than_seconds.is_none() && filters.iter().all(|filter| filter.is_none()) {
            bail!("name a letter or a filter, or say --all");
        }
        Ok(LetterQuery {
            agent: self.agent.clone(),
            node: self.node.clone(),
            reason: self.reason.clone(),
            from: None,
            until: self.older_than_seconds.map(|seconds| desk.ago(seconds)),
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
    let cells = |letter: &ListedLetter| {
        let row = &letter.row;
        vec![
            letter.delivery_id.clone(),
            row.agent.clone(),
            row.seq.to_string(),
            or_dash(row.reason.as_ref()),
            or_dash(row.error.as_ref()),
            time(row.at),
            or_dash(letter.redriven_as.as_ref()),
        ]
    };
    out.rows(&letters, &headings, cells, "there are no dead letters")
}
