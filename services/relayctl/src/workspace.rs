//! `relayctl workspace`: creates, lists, suspends, exports, measures and deletes workspaces.

use std::{
    fs::File,
    io::{BufWriter, IsTerminal as _, Write},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use chrono::{DateTime, Utc};
use relay_admin::{Erasure, WorkspaceSummary};
use relay_domain::{
    WorkspaceId,
    workspaces::{
        plan::Plan,
        usage::{Granularity, UsageBucket},
    },
};
use relay_engine::{
    EngineError,
    error::Missing,
    settings::{NatsServers, Switch},
    workspaces::usage::UsageQuery,
};
use serde_json::json;

use crate::{
    connection::Database,
    output::{Output, ProgressBar, format_time},
    quotas::{self, Quotas},
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Create a workspace. Its key is printed only once.
    Create {
        #[command(flatten)]
        database: Database,
        /// Name of the workspace.
        name: String,
        /// Plan of the workspace. By default `enterprise`, and `free` in a hosted installation.
        #[arg(long, env = "RELAY_DEFAULT_PLAN", value_parser = quotas::parse_plan)]
        plan: Option<Plan>,
        /// As for gateways. Only the default of the plan depends on it here.
        #[arg(long, env = "RELAY_HOSTED", value_enum, default_value_t = Switch::Off)]
        hosted: Switch,
    },
    /// List workspaces, including deleted ones, oldest first.
    List {
        #[command(flatten)]
        database: Database,
        /// Only workspaces with this name.
        #[arg(long)]
        name: Option<String>,
        /// Only workspaces created after the one with this id.
        #[arg(long, default_value_t = 0)]
        after: i64,
        /// Maximum number of rows.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Suspend a workspace: calls are refused with `workspace_suspended`, open sockets close within seconds. Nothing
    /// is removed.
    Suspend {
        #[command(flatten)]
        database: Database,
        /// Id of the workspace. A name is not accepted.
        id: String,
    },
    /// Resume a suspended workspace.
    Resume {
        #[command(flatten)]
        database: Database,
        /// Id of the workspace. A name is not accepted.
        id: String,
    },
    /// Show or change a workspace's plan and its own limits. Gateways apply changes within a minute.
    Quotas(Quotas),
    /// Show the usage of a workspace by minute, hour or day (UTC). Minutes are kept for 92 days.
    Usage {
        #[command(flatten)]
        database: Database,
        /// Id or name of the workspace.
        workspace: String,
        /// Start with the bucket that contains this time, such as 2026-03-01T12:00:00Z. By default an hour of minutes,
        /// a day of hours, 30 days of days.
        #[arg(long)]
        since: Option<DateTime<Utc>>,
        /// End before this time; now by default.
        #[arg(long)]
        until: Option<DateTime<Utc>>,
        /// Size of a bucket.
        #[arg(long, value_enum, default_value_t = UsageInterval::Hour)]
        granularity: UsageInterval,
    },
    /// Export all rows of a workspace, one JSON object per line: `{"table":…,"row":{…}}`. Tokens and the bytes of
    /// files are not included.
    Export {
        #[command(flatten)]
        database: Database,
        /// Id or name of the workspace.
        workspace: String,
        /// File to create; standard output by default.
        #[arg(long, short)]
        output: Option<PathBuf>,
    },
    /// Delete a workspace: its tokens are revoked at once, its files are removed soon. Messages, deliveries and events
    /// expire with retention; a worker erases the rest 30 days later.
    Delete {
        #[command(flatten)]
        database: Database,
        /// Id of the workspace. A name is not accepted.
        id: String,
        /// Remove all its data now, and verify that nothing is left. Can be repeated after an interruption, not
        /// undone.
        #[arg(long)]
        erase: bool,
        /// URL of the NATS server, whose copies are removed too. Required for the verification.
        #[arg(long, env = "NATS_URL", hide_env_values = true)]
        nats_url: Option<String>,
        /// As for gateways.
        #[arg(long, env = "RELAY_NATS_CA_FILE")]
        nats_ca_file: Option<PathBuf>,
        /// Time to wait for a worker to remove the bytes of files, in seconds.
        #[arg(long, default_value_t = 60)]
        wait_seconds: u64,
    },
}

/// Exported rows per update of the progress bar.
const ROWS_PER_PROGRESS_UPDATE: u64 = 1000;

/// Values of `--granularity`.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum UsageInterval {
    Minute,
    Hour,
    Day,
}

impl From<UsageInterval> for Granularity {
    fn from(by: UsageInterval) -> Self {
        match by {
            UsageInterval::Minute => Self::Minute,
            UsageInterval::Hour => Self::Hour,
            UsageInterval::Day => Self::Day,
        }
    }
}

pub(crate) async fn run(command: Command, out: Output) -> Result<()> {
    match command {
        Command::Create { database, name, plan, hosted } => {
            // The same default as that of gateways.
            let plan = plan.unwrap_or(match hosted {
                Switch::On => Plan::Free,
                Switch::Off => Plan::Enterprise,
            });
            let made = database.connect()?.create_workspace(&name, plan).await.context("create the workspace")?;
            out.print_value(&json!({ "workspace_id": made.workspace_id, "name": name, "api_key": made.key }), |_| {
                format!("workspace {}\nkey {}\nThe key is shown this once.", made.workspace_id, made.key)
            })
        }
        Command::List { database, name, after, limit } => {
            let found = database
                .connect()?
                .workspaces(name.as_deref(), WorkspaceId::new(after), limit)
                .await
                .context("list workspaces")?;
            let headings = ["ID", "NAME", "PLAN", "STATE", "AGENTS", "CONNECTED", "CREATED"];
            out.print_rows(&found, &headings, summary_cells, "there is no workspace")
        }
        Command::Suspend { database, id } => set_suspended(&database, &id, true, out).await,
        Command::Resume { database, id } => set_suspended(&database, &id, false, out).await,
        Command::Quotas(arguments) => quotas::run(arguments, out).await,
        Command::Usage { database, workspace, since, until, granularity } => {
            let query = UsageQuery { since, until, granularity: Some(granularity.into()) };
            print_usage(&database, &workspace, query, out).await
        }
        Command::Export { database, workspace, output } => export_workspace(&database, &workspace, output, out).await,
        Command::Delete { database, id, erase, nats_url, nats_ca_file, wait_seconds } => {
            // An empty variable counts as unset, as in gateways and workers.
            let nats = nats_url.filter(|url| !url.is_empty()).map(|url| NatsServers { url, ca_file: nats_ca_file });
            delete_workspace(&database, &id, erase.then_some((nats, Duration::from_secs(wait_seconds))), out).await
        }
    }
}

fn summary_cells(workspace: &WorkspaceSummary) -> Vec<String> {
    let state = match (workspace.deleted_at, workspace.suspended_at, workspace.expires_at) {
        (Some(at), _, _) => format!("deleted {}", format_time(at)),
        (None, Some(at), _) => format!("suspended {}", format_time(at)),
        (None, None, Some(at)) => format!("until {}", format_time(at)),
        (None, None, None) => "alive".to_owned(),
    };
    vec![
        workspace.workspace_id.to_string(),
        workspace.name.clone(),
        workspace.plan.as_str().to_owned(),
        state,
        workspace.agents.to_string(),
        workspace.connected.to_string(),
        format_time(workspace.created_at),
    ]
}

async fn print_usage(database: &Database, workspace: &str, query: UsageQuery, out: Output) -> Result<()> {
    let admin = database.connect()?;
    let scope = admin.find_workspace(workspace).await.with_context(|| format!("find workspace {workspace}"))?;
    let report = admin.usage(scope, query).await.context("read the usage")?;
    if out.is_json() {
        return out.print_value(&report, |_| String::new());
    }
    let headings = ["FROM", "MESSAGES", "DELIVERIES", "ACKED", "SETTLED", "DEAD", "INVOCATIONS", "PUSHED"];
    let cells = |usage: &UsageBucket| {
        let numbers = [
            usage.messages,
            usage.deliveries,
            usage.acked,
            usage.settled,
            usage.dead_letters,
            usage.invocations,
            usage.push_attempts,
        ];
        std::iter::once(format_time(usage.at)).chain(numbers.map(|number| number.to_string())).collect()
    };
    out.print_rows(&report.usage, &headings, cells, "nothing was used, or no worker has counted it yet")
}

async fn export_workspace(database: &Database, workspace: &str, output: Option<PathBuf>, out: Output) -> Result<()> {
    let admin = database.connect()?;
    let scope = admin.find_workspace(workspace).await.with_context(|| format!("find workspace {workspace}"))?;
    // A progress bar would mix with rows on the same terminal.
    let has_bar = output.is_some() || !std::io::stdout().is_terminal();
    let mut sink: BufWriter<Box<dyn Write>> = BufWriter::new(match &output {
        // `create_new`: an export must not overwrite another one.
        Some(path) => Box::new(File::create_new(path).with_context(|| format!("create {}", path.display()))?),
        None => Box::new(std::io::stdout()),
    });
    let mut bar = ProgressBar::new("rows", out);
    let mut rows: u64 = 0;
    let exported = admin
        .export_workspace(scope, |exported| {
            rows = exported.number;
            if has_bar && (rows.is_multiple_of(ROWS_PER_PROGRESS_UPDATE) || rows == exported.total) {
                bar.update(rows, exported.total);
            }
            // The row is JSON as Postgres wrote it; the table's name is one of ours.
            writeln!(sink, "{{\"table\":\"{}\",\"row\":{}}}", exported.table, exported.row)
        })
        .await;
    bar.finish();
    exported.context("export the workspace")?;
    // Explicit, because a dropped writer hides the error of its last write.
    sink.flush().context("write the export")?;
    eprintln!("exported {rows} rows of workspace {}", scope.workspace_id());
    Ok(())
}

async fn set_suspended(database: &Database, id: &str, suspended: bool, out: Output) -> Result<()> {
    ensure!(is_id(id), "{id:?} is no id: see `relayctl workspace list`");
    let admin = database.connect()?;
    let scope = admin.find_workspace(id).await.with_context(|| format!("find workspace {id}"))?;
    let changed = admin.suspend(scope, suspended).await.context("suspend or resume the workspace")?;
    out.print_value(&json!({ "workspace_id": id, "suspended": suspended, "changed": changed }), |_| {
        let state = if suspended { "suspended: gateways refuse its tokens within a second" } else { "admitted again" };
        let already = if changed { "" } else { ", as before" };
        format!("workspace {id} is {state}{already}")
    })
}

fn is_id(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

async fn delete_workspace(
    database: &Database,
    id: &str,
    erase: Option<(Option<NatsServers>, Duration)>,
    out: Output,
) -> Result<()> {
    let workspace: WorkspaceId =
        id.parse().ok().with_context(|| format!("{id:?} is no id: see `relayctl workspace list`"))?;
    let admin = database.connect()?;
    let deleted = admin.delete_workspace(workspace).await;
    let Some((nats, wait)) = erase else {
        let tokens = deleted.with_context(|| format!("delete workspace {id}"))?;
        return out.print_value(&json!({ "workspace_id": id, "tokens": tokens }), |_| {
            format!(
                "workspace {id} is deleted: {tokens} tokens are revoked; gateways that have cached one accept it for up to 1 s more"
            )
        });
    };
    match deleted {
        // An already erased workspace is verified again.
        Ok(_) | Err(EngineError::NotFound(Missing::Workspace)) => {}
        Err(error) => return Err(error).with_context(|| format!("delete workspace {id}")),
    }
    let mut bar = ProgressBar::new("tables", out);
    let erasing = admin.erase_workspace(workspace, nats.as_ref(), wait, |done, of| bar.update(done, of)).await;
    bar.finish();
    let erasure = erasing
        .with_context(|| format!("erase workspace {id}, which can be repeated: what was removed stays removed"))?;
    // Printed before the checks that may fail: the report names the leftovers.
    out.print_value(&erasure, |erasure| format_erasure(id, erasure))?;
    ensure!(
        erasure.includes_jetstream(),
        "JetStream was not looked at: run this again with NATS_URL or --nats-url, or it is not proved that nothing of \
         workspace {id} is left"
    );
    ensure!(
        erasure.left.is_empty(),
        "something of workspace {id} is left: something still writes for it; run this again"
    );
    Ok(())
}

fn format_erasure(id: &str, erasure: &Erasure) -> String {
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

#[cfg(test)]
mod tests {
    use clap::{Parser as _, error::ErrorKind};

    use crate::Arguments;

    #[test]
    fn hosted_takes_on_and_off_only() {
        for command in [&["workspace", "create", "w"][..], &["doctor", "--nats-url", "nats://n"]] {
            let parse = |value| {
                let line = [&["relayctl"], command, &["--database-url", "postgres://p", "--hosted", value]].concat();
                Arguments::try_parse_from(line).map(drop).map_err(|error| error.kind())
            };
            assert_eq!([parse("on"), parse("off")], [Ok(()), Ok(())], "{command:?}");
            assert_eq!(parse("true"), Err(ErrorKind::InvalidValue), "{command:?}");
        }
    }
}
