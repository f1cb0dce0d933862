//! Confirmations of messages, as their reminders ask for.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::arguments::{Arguments, Confirm};

/// Delivery and event named behind the words `agent-relay-broker ack`; in a short reminder and the header behind it.
fn named_ids(text: &str) -> Option<(&str, &str)> {
    if let Some((_, command)) = text.split_once("agent-relay-broker ack ") {
        let mut words = command.split(|character: char| character.is_whitespace() || character == '`');
        return Some((words.next()?, words.next()?));
    }
    let (reminder, message) = text.split_once(".</system-reminder>")?;
    let (_, delivery_id) = reminder.rsplit_once("Delivery ")?;
    let (_, header) = message.split_once(" [")?;
    Some((delivery_id, header.split_once(']')?.0))
}

/// Confirms the message whose reminder names its ids.
pub(crate) fn confirm(arguments: &Arguments, text: &str) -> Result<()> {
    let (Some(way), Some((delivery_id, event_id))) = (arguments.confirm, named_ids(text)) else { return Ok(()) };
    match way {
        Confirm::File => write_file(delivery_id, event_id),
        Confirm::Mcp => call_tool(arguments.mcp_config.as_deref().context("no --mcp-config")?, delivery_id),
    }
}

fn write_file(delivery_id: &str, event_id: &str) -> Result<()> {
    let folder = std::env::var_os("AGENT_RELAY_ACK_DIR").context("AGENT_RELAY_ACK_DIR is not set")?;
    let content = json!({ "delivery_id": delivery_id, "event_id": event_id, "status": "received" }).to_string();
    let temporary = Path::new(&folder).join(format!(".{delivery_id}.tmp"));
    std::fs::write(&temporary, content).context("write an ack file")?;
    // Renamed, so that the broker never sees a part of the file under its final name.
    std::fs::rename(&temporary, Path::new(&folder).join(delivery_id)).context("publish an ack file")
}

/// Starts the MCP server `relay-node` of the configuration and calls its tool.
fn call_tool(configuration: &str, delivery_id: &str) -> Result<()> {
    let configuration: Value = serde_json::from_str(configuration).context("read --mcp-config")?;
    let server = &configuration["mcpServers"]["relay-node"];
    let mut command = Command::new(server["command"].as_str().context("no server relay-node")?);
    for arg in server["args"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        command.arg(arg);
    }
    for (name, value) in server["env"].as_object().into_iter().flatten() {
        command.env(name, value.as_str().unwrap_or_default());
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let mut input = child.stdin.take().context("no stdin")?;
    let mut output = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let client = json!({ "name": "fake-agent", "version": "1" });
    let initialize = json!({ "protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": client });
    let call = json!({ "name": "relay_ack", "arguments": { "delivery_id": delivery_id } });
    for (id, method, params) in [(1, "initialize", initialize), (2, "tools/call", call)] {
        writeln!(input, "{}", json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }))?;
        output.next().context("the server has ended")??;
        if method == "initialize" {
            writeln!(input, "{}", json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }))?;
        }
    }
    // The server ends with its input.
    drop(input);
    child.wait().context("wait for the server")?;
    Ok(())
}
