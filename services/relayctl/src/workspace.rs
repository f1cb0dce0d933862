//! `relayctl workspace`.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use chrono::{DateTime, Utc};
use relay_engine::{
    admin::{Erasure, WorkspaceSummary},
    usage::{Granularity, Usage, UsageQuery},
};
use serde_json::json;

use crate::{
    connection::Database,
    output::{Output, or_dash, time},
    quotas::{self, Quotas},
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Make a workspace. Its key is shown once.
    Create {
        #[command(flatten)]
        database: Database,
        /// Its name.
        name: String,
    },
    /// List workspaces, deleted ones too, by age.
    List {
        #[command(flatten)]
        database: Database,
        /// Only those of this name.
        #[arg(long)]
        name: Option<String>,
        /// Only those made after the one of this id.
        #[arg(long, default_value_t = 0)]
        after: i64,
        /// How many at most.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Let nobody in: calls are refused with `workspace_suspended`, open sockets close within seconds. Nothing is removed.
    Suspend {
        #[command(flatten)]
        database: Database,
        /// Its id. A name is not enough.
        id: String,
    },
    /// Let a suspended workspace go on.
    Resume {
        #[command(flatten)]
        database: Database,
        /// Its id. A name is not enough.
        id: String,
    },
    /// Show a workspace's plan and what differs from it, or change that. Counts at gateways within a minute.
    Quotas(Quotas),
    /// Show what a workspace used, by the minute, hour or day (UTC). Minutes are kept for 92 days.
    Usage {
        #[command(flatten)]
        database: Database,
        /// Id or name.
        workspace: String,
        /// From the minute, hour or day that this is in, as 2026-03-01T12:00:00Z. Unless given: an hour by minutes, a day by hours, 30 days by days.
        #[arg(long)]
        since: Option<DateTime<Utc>>,
        /// Before this; now unless given.
        #[arg(long)]
        until: Option<DateTime<Utc>>,
        /// Into what minutes are added up.
        #[arg(long, value_enum, default_value_t = By::Hour)]
        granularity: By,
    },
    /// Write everything that a workspace has, a JSON object a line: `{"table":…,"row":{…}}`. Tokens and the bytes of files are not in it.
    Export {
        #[command(flatten)]
        database: Database,
        /// Id or name.
        workspace: String,
        /// The file to write, which must not exist; standard output if not given.
        #[arg(long, short)]
        output: Option<PathBuf>,
    },
    /// Delete a workspace: its tokens are dead at once, its rows go with retention.
    Delete {
        #[command(flatten)]
        database: Database,
        /// Its id. A name is not enough.
        id: String,
        /// Remove everything of it now, and prove that nothing is left. Cannot be undone.
        #[arg(long)]
        erase: bool,
        /// The NATS server, whose copies are removed too.
        #[arg(long, env = "NATS_URL", hide_env_values = true)]
        nats_url: Option<String>,
        /// How long to wait for a worker to remove the bytes of files, in seconds.
        #[arg(long, default_value_t = 60)]
        wait_seconds: u64,
    },
}

/// What `--granularity` takes.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum By {
    Minute,
    Hour,
    Day,
}

impl From<By> for Granularity {
    fn from(by: By) -> Self {
        match by {
            By::Minute => Self::Minute,
            By::Hour => Self::Hour,
            By::Day => Self::Day,
        }
    }
}

pub(crate) async fn run(command: Command, out: Output) -> Result<()> {
    match command {
        Command::Create { database, name } => {
            let made = database.admin()?.create_workspace(&name).await.context("make the workspace")?;
            out.one(&json!({ "workspace_id": made.workspace_id, "name": name, "api_key": made.key }), |_| {
                format!("workspace {}\nkey {}\nThe key is shown this once.", made.workspace_id, made.key)
            })
        }
        Command::List { database, name, after, limit } => {
            let found = database.admin()?.workspaces(name.as_deref(), after, limit).await.context("list workspaces")?;
            let headings = ["ID", "NAME", "PLAN", "STATE", "AGENTS", "CONNECTED", "CREATED"];
            out.rows(&found, &headings, cells, "there is no workspace")
        }
        Command::Suspend { database, id } => suspend(&database, &id, true, out).await,
        Command::Resume { database, id } => suspend(&database, &id, false, out).await,
        Command::Quotas(asked) => quotas::run(asked, out).await,
        Command::Usage { database, workspace, since, until, granularity } => {
            let query = UsageQuery { since, until, granularity: Some(granularity.into()) };
            usage(&database, &workspace, query, out).await
        }
        Command::Export { database, workspace, output } => export(&database, &workspace, output).await,
        Command::Delete { database, id, erase, nats_url, wait_seconds } => {
            delete(&database, &id, erase.then_some((nats_url, Duration::from_secs(wait_seconds))), out).await
        }
    }
}

fn cells(workspace: &WorkspaceSummary) -> Vec<String> {
    let state = match (workspace.deleted_at, workspace.suspended_at, workspace.expires_at) {
        (Some(at), _, _) => format!("deleted {}", time(at)),
        (None, Some(at), _) => format!("suspended {}", time(at)),
        (None, None, Some(at)) => format!("until {}", time(at)),
        (None, None, None) => "alive".to_owned(),
    };
    vec![
        workspace.workspace_id.to_string(),
        workspace.name.clone(),
        workspace.plan.clone(),
        state,
        workspace.agents.to_string(),
        workspace.connected.to_string(),
        time(workspace.created_at),
    ]
}

async fn usage(database: &Database, workspace: &str, query: UsageQuery, out: Output) -> Result<()> {
    let admin = database.admin()?;
    let scope = admin.find(workspace).await.with_context(|| format!("find workspace {workspace}"))?;
    let report = admin.usage(scope, query).await.context("read the usage")?;
    if out.is_json() {
        return out.one(&report, |_| String::new());
    }
    let headings = ["FROM", "MESSAGES", "DELIVERIES", "ACKED", "SETTLED", "DEAD", "INVOCATIONS", "PUSHED"];
    let cells = |usage: &Usage| {
        let numbers = [
            usage.messages,
            usage.deliveries,
            usage.acked,
            usage.settled,
            usage.dead_letters,
            usage.invocations,
            usage.push_attempts,
        ];
        std::iter::once(time(usage.at)).chain(numbers.map(|number| number.to_string())).collect()
    };
    out.rows(&report.usage, &headings, cells, "nothing was used, or no worker has counted it yet")
}

async fn export(database: &Database, workspace: &str, output: Option<PathBuf>) -> Result<()> {
    let admin = database.admin()?;
    let scope = admin.find(workspace).await.with_context(|| format!("find workspace {workspace}"))?;
    let mut sink: BufWriter<Box<dyn Write>> = BufWriter::new(match &output {
        Some(path) => Box::new(File::create_new(path).with_context(|| format!("create {}", path.display()))?),
        None => Box::new(std::io::stdout()),
    });
    let mut rows: u64 = 0;
    admin
        .export_workspace(scope, |table, row| {
            rows += 1;
            // The row is JSON as Postgres wrote it; the table's name is one of ours.
            writeln!(sink, "{{\"table\":\"{table}\",\"row\":{row}}}")
        })
        .await
        .context("export the workspace")?;
    sink.flush().context("write the export")?;
    eprintln!("exported {rows} rows of workspace {}", scope.workspace_id());
    Ok(())
}

async fn suspend(database: &Database, id: &str, suspended: bool, out: Output) -> Result<()> {
    ensure!(is_id(id), "{id:?} is no id: see `relayctl workspace list`");
    let admin = database.admin()?;
    let scope = admin.find(id).await.with_context(|| format!("find workspace {id}"))?;
    let changed = admin.suspend(scope, suspended).await.context("suspend or resume the workspace")?;
    out.one(&json!({ "workspace_id": id, "suspended": suspended, "changed": changed }), |_| {
        let state = if suspended { "suspended: gateways let nobody in within a second" } else { "let in again" };
        let already = if changed { "" } else { ", as before" };
        format!("workspace {id} is {state}{already}")
    })
}

fn is_id(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

async fn delete(database: &Database, id: &str, erase: Option<(Option<String>, Duration)>, out: Output) -> Result<()> {
    ensure!(is_id(id), "{id:?} is no id: see `relayctl workspace list`");
    let admin = database.admin()?;
    let scope = admin.find(id).await.with_context(|| format!("find workspace {id}"))?;
    let tokens = admin.delete_workspace(scope).await.context("delete the workspace")?;
    let Some((nats_url, patience)) = erase else {
        return out.one(&json!({ "workspace_id": id, "tokens": tokens }), |_| {
            format!(
                "workspace {id} is deleted: {tokens} tokens are dead; gateways that remember one take it for 2 s more"
            )
        });
    };
    let erasure = admin.erase_workspace(scope, nats_url.as_deref(), patience).await.context("erase the workspace")?;
    out.one(&erasure, |erasure| told(id, erasure))?;
    ensure!(erasure.left.is_empty(), "rows of workspace {id} are left: something still writes for it; run this again");
    Ok(())
}

fn told(id: &str, erasure: &Erasure) -> String {
    let mut lines: Vec<String> = erasure
        .erased
        .iter()
        .filter(|table| table.rows > 0)
        .map(|table| format!("{:>10}  {}", table.rows, table.table))
        .collect();
    lines.push(format!("{:>10}  messages in JetStream", or_dash(erasure.purged)));
    if erasure.left.is_empty() {
        lines.push(format!("nothing of workspace {id} is left in {} tables", erasure.looked_at));
    }
    lines.join("\n")
}
