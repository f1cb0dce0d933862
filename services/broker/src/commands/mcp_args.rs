//! `mcp-args`: prints the arguments by which an agent program is configured with the Relay MCP server, without starting
//! it.

use std::io::Write as _;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::{
    cli,
    harness::{HarnessTable, RelayContext, relay_server},
};

pub(crate) fn mcp_args(arguments: cli::McpArgs) -> Result<()> {
    let harnesses = HarnessTable::read(arguments.harnesses.as_deref())?;
    let words = shell_words::split(&arguments.cli).context("--cli cannot be split")?;
    let program = words.first().context("--cli names no program")?;
    let existing: Vec<String> = match &arguments.existing_args {
        Some(text) => serde_json::from_str(text).context("--existing-args is not a JSON array of texts")?,
        None => Vec::new(),
    };
    let given: Vec<String> = words.iter().skip(1).cloned().chain(existing).collect();
    let server = relay_server(&RelayContext {
        command: &arguments.mcp_command,
        agent_name: &arguments.agent_name,
        agent_token: arguments.agent_token.as_deref(),
        base_url: arguments.base_url.as_deref(),
        workspace_key: arguments.api_key.as_deref(),
        workspaces: arguments.workspaces_json.as_deref(),
        default_workspace: arguments.default_workspace.as_deref(),
    });
    let harness = harnesses.find(program);
    let args = harness.as_ref().map(|harness| harness.mcp_arguments(server.as_slice(), &given));
    let file = harness.as_ref().and_then(|harness| harness.mcp_file.as_ref()).map(|file| {
        let folder = arguments.cwd.unwrap_or_default();
        folder.join(&file.path)
    });
    let answer = json!({
        "args": args.unwrap_or_default(),
        "sideEffectFiles": file.as_slice(),
        "agentToken": arguments.agent_token,
    });
    writeln!(std::io::stdout(), "{answer:#}").context("print the arguments")
}
