//! `mcp`: the MCP server of one agent on stdio. Its tools report to the broker of this machine; no engine is involved.

use std::{env, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use rmcp::{
    ErrorData, RoleServer, ServerHandler, ServiceExt as _,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation, ListToolsResult,
        PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
    },
    service::RequestContext,
    transport::io::stdio_pipes,
};
use serde_json::{Map, Value, json};

use crate::version::VERSION;

/// The broker answers at once; it is on this machine.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
const ACK_TOOL: &str = "relay_ack";
const RESULT_TOOL: &str = "submit_result";

/// Serves one agent until its stdin ends.
pub(crate) async fn mcp() -> Result<()> {
    // No other code in this program has chosen the crypto provider yet.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let tools = NodeTools::from_environment()?;
    let server = tools.serve(stdio_pipes()).await.context("begin the MCP session")?;
    server.waiting().await.context("serve the MCP session")?;
    Ok(())
}

/// Route of the broker with the secret of one agent.
#[derive(Debug)]
struct Endpoint {
    url: String,
    token: String,
}

impl Endpoint {
    fn from_environment(url: &str, token: &str) -> Option<Self> {
        Some(Self { url: variable(url)?, token: variable(token)? })
    }
}

/// A variable with a value. Programs that read references to variables from a file leave the reference of an unset one
/// as it is; it contains the name.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty() && !value.contains(name))
}

/// Tools of one agent.
#[derive(Debug)]
struct NodeTools {
    http: reqwest::Client,
    ack: Endpoint,
    result: Option<Endpoint>,
    tools: Vec<Tool>,
}

impl NodeTools {
    fn from_environment() -> Result<Self> {
        let ack = Endpoint::from_environment("AGENT_RELAY_ACK_URL", "AGENT_RELAY_ACK_TOKEN");
        let ack = ack.context("AGENT_RELAY_ACK_URL and AGENT_RELAY_ACK_TOKEN are needed: a broker sets them")?;
        let result = Endpoint::from_environment("AGENT_RELAY_RESULT_URL", "AGENT_RELAY_RESULT_TOKEN");
        let schema = variable("AGENT_RELAY_RESULT_SCHEMA");
        // Any result is allowed without it: the broker checks results itself.
        let schema = schema.and_then(|schema| serde_json::from_str(&schema).ok()).unwrap_or(json!(true));
        // The agent's tokens are for the broker of this machine, and not for a proxy of the environment.
        let http = reqwest::Client::builder().no_proxy().timeout(CALL_TIMEOUT).build();
        let mut tools = vec![ack_tool()];
        tools.extend(result.as_ref().map(|_| result_tool(&schema)));
        Ok(Self { http: http.context("set up the HTTP client")?, ack, result, tools })
    }

    /// Posts a tool's arguments as they are: the broker judges them.
    async fn post(&self, endpoint: &Endpoint, arguments: &Map<String, Value>) -> CallToolResult {
        let request = self.http.post(&endpoint.url).bearer_auth(&endpoint.token).json(arguments);
        let answer = async { request.send().await?.json::<Value>().await };
        match answer.await {
            Ok(answer) if answer["success"] == true => CallToolResult::structured(answer),
            Ok(answer) => {
                let text = answer["message"].as_str().unwrap_or("the broker has refused").to_owned();
                CallToolResult::error(vec![ContentBlock::text(text)])
            }
            Err(error) => {
                let text = format!("the broker cannot be reached: {}", error.without_url());
                CallToolResult::error(vec![ContentBlock::text(text)])
            }
        }
    }
}

impl ServerHandler for NodeTools {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("relay-node", VERSION))
            .with_instructions("Confirm each message from another agent with relay_ack once you have read it.")
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.tools.clone()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        let answer = match (request.name.as_ref(), &self.result) {
            (ACK_TOOL, _) => self.post(&self.ack, &arguments).await,
            (RESULT_TOOL, Some(result)) => self.post(result, &arguments).await,
            (name, _) => return Err(ErrorData::invalid_params(format!("there is no tool {name:?}"), None)),
        };
        Ok(answer.into())
    }
}

fn ack_tool() -> Tool {
    let id = |description: &str| json!({ "type": "string", "description": description });
    let properties = json!({
        "delivery_id": id("The delivery id that the reminder names."),
        "event_id": id("The id in brackets behind the sender. One of the two ids is enough."),
        "status": { "type": "string", "enum": ["received"] },
    });
    Tool::new(
        ACK_TOOL,
        "Confirms that a message from another agent was read.",
        schema_of(json!({ "type": "object", "properties": properties })),
    )
}

fn result_tool(schema: &Value) -> Tool {
    let properties = json!({
        "data": schema,
        "final": { "type": "boolean", "description": "False for an interim result. True if absent." },
        "metadata": { "type": "object" },
    });
    Tool::new(
        RESULT_TOOL,
        "Hands in the result of the task.",
        schema_of(json!({ "type": "object", "properties": properties, "required": ["data"] })),
    )
}

fn schema_of(schema: Value) -> Arc<Map<String, Value>> {
    schema.as_object().cloned().unwrap_or_default().into()
}
