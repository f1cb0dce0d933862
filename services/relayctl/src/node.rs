//! `relayctl node`.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{
    connection::Workspace,
    output::{Bar, Output, or_dash},
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// List a workspace's nodes, and the processes that serve them.
    List {
        #[command(flatten)]
        workspace: Workspace,
        /// How many nodes at most.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Empty a node: nothing new is placed there at once, its sockets are closed after the grace, and none is opened
    /// until `undrain`. What it was given and has not done goes elsewhere. Its agents keep their mail.
    Drain {
        #[command(flatten)]
        workspace: Workspace,
        /// Id or name of the node.
        node: String,
        /// How long it may finish what it does, in seconds. Its sockets close earlier when it has nothing left.
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(i32).range(0..=86_400))]
        grace_seconds: i32,
    },
    /// Let a drained node come back.
    Undrain {
        #[command(flatten)]
        workspace: Workspace,
        /// Id or name of the node.
        node: String,
    },
}

/// Gateways close sockets within a second or two; longer means that none of them runs.
const CLOSED_WITHIN: Duration = Duration::from_secs(30);
/// How often a drain looks how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(200);

pub(crate) async fn run(command: Command, out: Output) -> Result<()> {
    match command {
        Command::List { workspace, limit } => list(&workspace, limit, out).await,
        Command::Drain { workspace, node, grace_seconds } => drain(&workspace, &node, grace_seconds, out).await,
        Command::Undrain { workspace, node } => {
            let (admin, scope) = workspace.find().await?;
            let node_id = admin.drain_node(scope, &node, None).await.context("let the node come back")?;
            out.one(&json!({ "node_id": node_id, "drained": false }), |_| format!("{node_id} may come back"))
        }
    }
}

async fn drain(workspace: &Workspace, node: &str, grace_seconds: i32, out: Output) -> Result<()> {
    let (admin, scope) = workspace.find().await?;
    let node_id = admin.drain_node(scope, node, Some(grace_seconds)).await.context("drain the node")?;
    let grace = Duration::from_secs(grace_seconds.unsigned_abs().into());
    let (began, mut closing, mut at_first) = (Instant::now(), grace_seconds == 0, 0);
    let mut bar = Bar::new("invocations done", out);
    loop {
        let (connected, given) = admin.work_of_node(scope, &node_id).await.context("look at the node")?;
        at_first = at_first.max(given);
        bar.show((at_first - given).unsigned_abs(), at_first.unsigned_abs());
        if connected == 0 {
            break;
        }
        if !closing && given == 0 {
            admin.drain_node(scope, &node_id, Some(0)).await.context("close the node's sockets")?;
            closing = true;
        }
        ensure!(
            began.elapsed() < grace + CLOSED_WITHIN,
            "{node_id} is drained, but still connected: does a gateway run?"
        );
        tokio::time::sleep(LOOK_EVERY).await;
    }
    bar.end();
    out.one(&json!({ "node_id": node_id, "drained": true }), |_| {
        format!("{node_id} is drained: nothing is placed there and it cannot connect until `relayctl node undrain`")
    })
}

async fn list(workspace: &Workspace, limit: i64, out: Output) -> Result<()> {
    let (admin, scope) = workspace.find().await?;
    let mut rows: Vec<Value> = Vec::new();
    for (node, providers) in admin.nodes(scope, limit).await.context("list nodes")? {
        let row = json!({
            "node_id": node.node_id, "name": node.name, "kind": node.kind, "role": node.role,
            "provider": null, "live": false, "active_agents": null, "max_agents": node.max_agents,
            "load": null, "last_heartbeat_at": null, "version": node.version,
        });
        if providers.is_empty() {
            rows.push(row);
            continue;
        }
        for provider in providers {
            let mut row = row.clone();
            row["provider"] = json!(provider.provider);
            row["live"] = json!(provider.live);
            row["active_agents"] = json!(provider.active_agents);
            row["max_agents"] = json!(provider.max_agents);
            row["load"] = json!(provider.load);
            row["last_heartbeat_at"] = json!(crate::output::time(provider.last_heartbeat_at));
            row["version"] = json!(provider.version.as_ref().or(node.version.as_ref()));
            rows.push(row);
            continue;
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
    out.rows(&rows, &headings, cells, "the workspace has no nodes")
}
