//! MCP servers of an agent, given in the way of its program.

use std::path::Path;

use super::{AgentHandle, Services};
use crate::{
    harness::{Harness, McpServer, RelayContext, node_server, relay_server},
    state::ProjectPath,
};

/// Servers of one agent: the published one for messages, and the broker's own.
pub(super) fn mcp_servers(services: &Services, handle: &AgentHandle) -> Vec<McpServer> {
    let settings = &services.settings;
    let relay = relay_server(&RelayContext {
        command: &settings.mcp_command,
        agent_name: &handle.spec.name,
        agent_token: Some(&handle.token),
        base_url: Some(services.engine.base_url()),
        workspace_key: None,
        workspaces: None,
        default_workspace: None,
    });
    let mut environment = vec![
        ("AGENT_RELAY_ACK_URL".to_owned(), format!("{}/api/delivery-ack", settings.api_url)),
        ("AGENT_RELAY_ACK_TOKEN".to_owned(), handle.ack_token.clone()),
    ];
    if let Some(schema) = &handle.spec.result_schema {
        environment.push(("AGENT_RELAY_RESULT_URL".to_owned(), format!("{}/api/agent-result", settings.api_url)));
        environment.push(("AGENT_RELAY_RESULT_TOKEN".to_owned(), handle.result_token.clone()));
        environment.push(("AGENT_RELAY_RESULT_SCHEMA".to_owned(), schema.to_string()));
    }
    relay.into_iter().chain(node_server(environment)).collect()
}

/// Sees to it that the program finds its servers. Returns `false` for a program without any.
pub(super) async fn configure_servers(
    services: &Services,
    handle: &AgentHandle,
    harness: Option<&Harness>,
    working_directory: &Path,
) -> bool {
    let Some(harness) = harness.filter(|_| !handle.spec.skip_relay_prompt) else { return false };
    let Some(file) = &harness.mcp_file else { return harness.mcp.is_some() };
    let location = ProjectPath { project: working_directory.to_owned(), file: file.path.clone() };
    let (shown, key) = (working_directory.join(&file.path), file.key.clone());
    let mut servers = mcp_servers(services, handle);
    // Agents of one project share the file, and only some have a result to hand in.
    for server in servers.iter_mut().filter(|server| server.name == McpServer::NODE) {
        server.environment = McpServer::NODE_VARIABLES.map(|name| (name.to_owned(), String::new())).to_vec();
    }
    let entries = file.entries(&servers);
    let (files, agent) = (services.project_files.clone(), handle.spec.name.clone());
    let added = tokio::task::spawn_blocking(move || files.add(&agent, &location, &key, &entries)).await;
    let problem = match added {
        Ok(Ok(())) => return true,
        Ok(Err(error)) => format!("{error:#}"),
        Err(error) => error.to_string(),
    };
    tracing::warn!(
        agent.name = handle.spec.name,
        path = %shown.display(),
        problem,
        "a file of the project is left as it is, the agent runs without MCP servers"
    );
    false
}
