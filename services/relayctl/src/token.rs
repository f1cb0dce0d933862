//! `relayctl token`.

use std::io::Read as _;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::{
    connection::{Database, Workspace},
    output::{Output, or_dash},
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Give a workspace one more key, beside those it has. It is shown once.
    Create {
        #[command(flatten)]
        workspace: Workspace,
    },
    /// Kill a workspace key, an agent's or a node's token. It is read from standard input, so that it is in no shell's history.
    Revoke {
        #[command(flatten)]
        database: Database,
    },
}

pub(crate) async fn run(command: Command, out: Output) -> Result<()> {
    match command {
        Command::Create { workspace } => {
            let (admin, scope) = workspace.find().await?;
            let key = admin.add_key(scope).await.context("add a key")?;
            out.one(&json!({ "workspace_id": scope.workspace_id(), "api_key": key }), |_| {
                format!("key {key}\nIt is shown this once.")
            })
        }
        Command::Revoke { database } => {
            let mut token = String::new();
            std::io::stdin().read_to_string(&mut token).context("read the token from standard input")?;
            let killed = database.admin()?.kill_token(token.trim()).await.context("kill the token")?;
            let killed = killed.context("there is no such token")?;
            out.one(&killed, |killed| {
                let whose = or_dash(killed.agent.as_ref().or(killed.node_id.as_ref()));
                format!(
                    "the {} token of {whose} in workspace {} is dead; gateways that remember it take it for 2 s more",
                    killed.kind, killed.workspace_id
                )
            })
        }
    }
}
