//! `relayctl workspace`.

use std::{
    fs::File,
    io::{BufWriter, IsTerminal as _, Write},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use chrono::{DateTime, Utc};
use relay_domain::WorkspaceId;
use relay_engine::{
    EngineError,
    admin::{Erasure, WorkspaceSummary},
    usage::{Granularity, Usage, UsageQuery},
};
use serde_json::json;

use crate::{
    connection::Database,
    output::{Bar, Output, time},
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
    /// Delete a workspace: its tokens are dead at once, its files go soon. Messages, deliveries and events go with retention, the rest when a
    /// worker erases it 30 days later.
    Delete {
        #[command(flatten)]
        database: Database,
        /// Its id. A name is not enough.
        id: String,
        /// Remove everything of it now, and prove that nothing is left. Can be repeated if it was cut off, not undone.
        #[arg(long)]
        erase: bool,
        /// The NATS server, whose copies are removed too. Without it nothing can be proved.
        #[arg(long, env = "NATS_URL", hide_env_values = true)]
        nats_url: Option<String>,
        /// How long to wait for a worker to remove the bytes of files, in seconds.
        #[arg(long, default_value_t = 60)]
        wait_seconds: u64,
    },
}

/// Rows of an export between two looks at how far it is.
const ROWS_A_LOOK: u64 = 1000;

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
        Command::Export { database, workspace, output } => export(&database, &workspace, output, out).await,
        Command::Delete { database, id, erase, nats_url, wait_seconds } => {
            // An empty variable counts as unset, as for gateways and workers.
            let nats_url = nats_url.filter(|url| !url.is_empty());
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

async fn export(database: &Database, workspace: &str, output: Option<PathBuf>, out: Output) -> Result<()> {
    let admin = database.admin()?;
    let scope = admin.find(workspace).await.with_context(|| format!("find workspace {workspace}"))?;
    // A bar among the rows themselves would be read by nobody.
    let has_bar = output.is_some() || !std::io::stdout().is_terminal();
    let mut sink: BufWriter<Box<dyn Write>> = BufWriter::new(match &output {
        Some(path) => Box::new(File::create_new(path).with_context(|| format!("create {}", path.display()))?),
        None => Box::new(std::io::stdout()),
    });
    let mut bar = Bar::new("rows", out);
    let mut rows: u64 = 0;
    let exported = admin
        .export_workspace(scope, |exported| {
            rows = exported.nth;
            if has_bar && (rows.is_multiple_of(ROWS_A_LOOK) || rows == exported.of) {
                bar.show(rows, exported.of);
            }
            // The row is JSON as Postgres wrote it; the table's name is one of ours.
            writeln!(sink, "{{\"table\":\"{}\",\"row\":{}}}", exported.table, exported.row)
        })
        .await;
    bar.end();
    exported.context("export the workspace")?;
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
    let workspace: WorkspaceId =
        id.parse().ok().with_context(|| format!("{id:?} is no id: see `relayctl workspace list`"))?;
    let admin = database.admin()?;
    let deleted = admin.delete_workspace(workspace).await;
    let Some((nats_url, patience)) = erase else {
        let tokens = deleted.with_context(|| format!("delete workspace {id}"))?;
        return out.one(&json!({ "workspace_id": id, "tokens": tokens }), |_| {
            format!(
                "workspace {id} is deleted: {tokens} tokens are dead; gateways that remember one take it for 2 s more"
            )
        });
    };
    match deleted {
        // It may have been erased before: that is proved again.
        Ok(_) | Err(EngineError::WorkspaceNotFound) => {}
        Err(error) => return Err(error).with_context(|| format!("delete workspace {id}")),
    }
    let mut bar = Bar::new("tables", out);
    let erasing = admin.erase_workspace(workspace, nats_url.as_deref(), patience, |done, of| bar.show(done, of)).await;
    bar.end();
    let erasure = erasing
        .with_context(|| format!("erase workspace {id}, which can be repeated: what was removed stays removed"))?;
    out.one(&erasure, |erasure| told(id, erasure))?;
    ensure!(
        erasure.looked_at_jetstream(),
        "JetStream was not looked at: run this again with NATS_URL or --nats-url, or it is not proved that nothing of \
         workspace {id} is left"
    );
    ensure!(
        erasure.left.is_empty(),
        "something of workspace {id} is left: something still writes for it; run this again"
    );
    Ok(())
}

fn told(id: &str, erasure: &Erasure) -> String {
    let mut lines: Vec<String> = erasure
        .erased
        .iter()
        .filter(|table| table.rows > 0)
        .map(|table| format!("{:>10}  {}", table.rows, table.table))
        .collect();
    if !erasure.was_there {
        lines.insert(0, format!("there is no workspace {id}: it was erased before, or never was"));
    }
    match erasure.purged {
        Some(purged) => lines.push(format!("{purged:>10}  messages in JetStream")),
        None => lines.push("         ?  messages in JetStream: it was not looked at, no NATS was named".to_owned()),
    }
    if erasure.left.is_empty() {
        lines.push(format!("nothing of workspace {id} is left in {} tables and JetStream", erasure.looked_at));
    }
    for place in &erasure.left {
        let rows = place.rows.map_or_else(|| "not looked at".to_owned(), |rows| format!("{rows} left"));
        lines.push(format!("{}: {rows}", place.table));
    }
    lines.join("\n")
}
