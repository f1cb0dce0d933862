//! MCP servers that agent programs are configured with: the published one for messages, and the broker's own for acks
//! and results.

/// MCP server that a program starts for itself.
#[derive(Debug, Clone)]
pub(crate) struct McpServer {
    pub(crate) name: &'static str,
    /// Program and arguments.
    pub(crate) command: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
}

impl McpServer {
    /// Name of the broker's own server.
    pub(crate) const NODE: &str = "relay-node";
    /// Variables that the broker's own server reads.
    pub(crate) const NODE_VARIABLES: [&str; 5] = [
        "AGENT_RELAY_ACK_URL",
        "AGENT_RELAY_ACK_TOKEN",
        "AGENT_RELAY_RESULT_URL",
        "AGENT_RELAY_RESULT_TOKEN",
        "AGENT_RELAY_RESULT_SCHEMA",
    ];
}

/// Identity of the agent that uses the published server.
#[derive(Debug)]
pub(crate) struct RelayContext<'a> {
    /// Command line of the server.
    pub(crate) command: &'a str,
    pub(crate) agent_name: &'a str,
    pub(crate) agent_token: Option<&'a str>,
    pub(crate) base_url: Option<&'a str>,
    pub(crate) workspace_key: Option<&'a str>,
    pub(crate) workspaces: Option<&'a str>,
    pub(crate) default_workspace: Option<&'a str>,
}

/// The published server for messages. `None` if its command line is empty.
pub(crate) fn relay_server(context: &RelayContext<'_>) -> Option<McpServer> {
    // `Init::checked` has refused a command line that cannot be split. `mcp-args` prints no server for one.
    let command = shell_words::split(context.command).unwrap_or_default();
    let optional = [
        ("RELAY_AGENT_TOKEN", context.agent_token),
        ("RELAY_BASE_URL", context.base_url),
        ("RELAY_API_KEY", context.workspace_key),
        ("RELAY_WORKSPACES_JSON", context.workspaces),
        ("RELAY_DEFAULT_WORKSPACE", context.default_workspace),
    ];
    let always =
        [("RELAY_AGENT_NAME", context.agent_name), ("RELAY_AGENT_TYPE", "agent"), ("RELAY_STRICT_AGENT_NAME", "1")];
    let given = optional.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let environment = always.into_iter().chain(given).map(|(name, value)| (name.to_owned(), value.to_owned()));
    (!command.is_empty()).then(|| McpServer { name: "agent-relay", command, environment: environment.collect() })
}

/// The broker's own server. `None` if the path of the running program is not text.
pub(crate) fn node_server(environment: Vec<(String, String)>) -> Option<McpServer> {
    let own = std::env::current_exe().ok()?.to_str()?.to_owned();
    Some(McpServer { name: McpServer::NODE, command: vec![own, "mcp".to_owned()], environment })
}
