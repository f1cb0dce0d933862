//! `relayctl node`: lists and drains nodes.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_domain::nodes::RosterNode;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    connection::WorkspaceArgument,
    output::{Output, ProgressBar, or_dash},
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// List a workspace's nodes and their providers.
    List {
        #[command(flatten)]
        workspace: WorkspaceArgument,
        /// Maximum number of nodes.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Drain a node: it gets no new placements, its sockets close after the grace period, and it cannot connect until
    /// `undrain`. Unfinished invocations go elsewhere. Its agents keep their mailboxes.
    Drain {
        #[command(flatten)]
        workspace: WorkspaceArgument,
        /// Id or name of the node.
        node: String,
        /// Grace period in seconds. Its sockets close earlier when no work is left.
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(i32).range(0..=86_400))]
        grace_seconds: i32,
    },
    /// Let a drained node connect again.
    Undrain {
        #[command(flatten)]
        workspace: WorkspaceArgument,
        /// Id or name of the node.
        node: String,
    },
}

/// Gateways close sockets within a second or two; a longer time means that none is running.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which the progress is read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub(crate) async fn run(command: Command, out: Output) -> Result<()> {
    match command {
        Command::List { workspace, limit } => list_nodes(&workspace, limit, out).await,
        Command::Drain { workspace, node, grace_seconds } => drain_node(&workspace, &node, grace_seconds, out).await,
        Command::Undrain { workspace, node } => {
            let (admin, scope) = workspace.find().await?;
            let node_id = admin.drain_node(scope, &node, None).await.context("undrain the node")?;
            out.print_value(&json!({ "node_id": node_id, "drained": false }), |_| format!("{node_id} may come back"))
        }
    }
}

async fn drain_node(workspace: &WorkspaceArgument, node: &str, grace_seconds: i32, out: Output) -> Result<()> {
    let (admin, scope) = workspace.find().await?;
    let node_id = admin.drain_node(scope, node, Some(grace_seconds)).await.context("drain the node")?;
    let grace = Duration::from_secs(grace_seconds.unsigned_abs().into());
    let (began, mut closing, mut at_first) = (Instant::now(), grace_seconds == 0, 0);
    let mut bar = ProgressBar::new("invocations done", out);
    loop {
        let workload = admin.node_workload(scope, &node_id).await.context("read the node")?;
        let open = workload.dispatched_invocations;
        // Nothing new is placed there, but work that was placed a moment before may appear after the first read.
        at_first = at_first.max(open);
        bar.update((at_first - open).unsigned_abs(), at_first.unsigned_abs());
        if workload.connected_providers == 0 {
            break;
        }
        // No work is left, so the rest of the grace period would only delay the end.
        if !closing && open == 0 {
            admin.drain_node(scope, node_id.as_str(), Some(0)).await.context("close the node's sockets")?;
            closing = true;
        }
        ensure!(
            began.elapsed() < grace + CLOSE_TIMEOUT,
            "{node_id} is drained, but still connected: does a gateway run?"
        );
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    bar.finish();
    out.print_value(&json!({ "node_id": node_id, "drained": true }), |_| {
        format!("{node_id} is drained: nothing is placed there and it cannot connect until `relayctl node undrain`")
    })
}

async fn list_nodes(workspace: &WorkspaceArgument, limit: i64, out: Output) -> Result<()> {
    let (admin, scope) = workspace.find().await?;
    let mut rows: Vec<Value> = Vec::new();
    for RosterNode { node, providers } in admin.nodes(scope, limit).await.context("list nodes")? {
        let row = json!({
            "node_id": node.node_id, "name": node.name, "kind": node.kind.as_str(), "role": node.role.as_str(),
            "provider": null, "live": false, "active_agents": null, "max_agents": node.max_agents,
            "load": null, "last_heartbeat_at": null, "version": node.version,
        });
        if providers.is_empty() {
            rows.push(row);
            continue;
        }
        for provider in providers {
            let mut row = row.clone();
            row["provider"] = json!(provider.name);
            row["live"] = json!(provider.liveness.is_online());
            row["active_agents"] = json!(provider.active_agents);
            row["max_agents"] = json!(provider.max_agents);
            row["load"] = json!(provider.load);
            row["last_heartbeat_at"] = json!(crate::output::format_time(provider.last_heartbeat_at));
            row["version"] = json!(provider.version.as_ref().or(node.version.as_ref()));
            rows.push(row);
        }
    }
    let headings = ["NODE", "NAME", "KIND", "PROVIDER", "LIVE", "AGENTS", "LOAD", "HEARD OF"];
    let cells = |row: &Value| {
        let text = |key: &str| or_dash(row[key].as_str());
        let number = |key: &str| if row[key].is_null() { "-".to_owned() } else { row[key].to_string() };
        let live = if row["live"] == true { "yes" } else { "no" };
        vec![
            text("node_id"),
            text("name"),
            text("kind"),
            text("provider"),
            live.to_owned(),
            number("active_agents"),
            number("load"),
            text("last_heartbeat_at"),
        ]
    };
    out.print_rows(&rows, &headings, cells, "the workspace has no nodes")
}
