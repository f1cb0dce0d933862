//! `relayctl token`: creates and revokes tokens.

use std::io::Read as _;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::{
    connection::{Database, WorkspaceArgument},
    output::{Output, or_dash},
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Create another key of a workspace. It is printed only once.
    Create {
        #[command(flatten)]
        workspace: WorkspaceArgument,
    },
    /// Revoke a workspace key, or the token of an agent or node. It is read from standard input, so that it is not in
    /// the shell's history.
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
            out.print_value(&json!({ "workspace_id": scope.workspace_id(), "api_key": key }), |_| {
                format!("key {key}\nIt is shown this once.")
            })
        }
        Command::Revoke { database } => {
            let mut token = String::new();
            std::io::stdin().read_to_string(&mut token).context("read the token from standard input")?;
            let revoked = database.connect()?.revoke_token(token.trim()).await.context("revoke the token")?;
            let revoked = revoked.context("there is no such token")?;
            out.print_value(&revoked, |revoked| {
                let whose =
                    or_dash(revoked.agent.clone().or_else(|| revoked.node_id.as_ref().map(ToString::to_string)));
                format!(
                    "the {} token of {whose} in workspace {} is revoked; gateways that have cached it accept it for up to 1 s more",
                    revoked.kind.as_str(),
                    revoked.workspace_id
                )
            })
        }
    }
}
