//! The command line.

use std::{net::IpAddr, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, Parser, Subcommand};
use relay_runtime::telemetry::LogFormat;
use url::Url;

use crate::agents::ReceiptPolicy;

/// Node of a Relay workspace: hosts command-line agents in terminals and proves that messages reached them.
#[derive(Debug, Parser)]
#[command(name = "agent-relay-broker", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs the broker in the foreground.
    Init(Box<Init>),
    /// Prints the screen of an agent.
    DumpPty(DumpPty),
    /// Confirms a message from inside an agent.
    Ack(Ack),
    /// Serves an agent's MCP tools on stdio: confirming messages and handing in a result.
    Mcp,
    /// Prints the arguments by which an agent program is configured with the Relay MCP server.
    McpArgs(Box<McpArgs>),
    /// Prints a table of the deliveries to each agent program.
    Verification(Verification),
    /// Answers questions about verification: JSON lines in, JSON lines out.
    Verify,
}

/// Settings of the broker.
#[derive(Debug, Args)]
pub(crate) struct Init {
    /// Name of the broker and its node; the directory's base name by default.
    #[arg(long, visible_aliases = ["name", "broker-name"], env = "AGENT_RELAY_BROKER_NAME")]
    pub(crate) instance_name: Option<String>,
    /// Key of the workspace. Without one a workspace is created.
    #[arg(long, env = "AGENT_RELAY_WORKSPACE_KEY", hide_env_values = true)]
    pub(crate) workspace_key: Option<String>,
    /// Channels of the broker's own agent.
    #[arg(long, env = "AGENT_RELAY_CHANNELS", value_delimiter = ',', default_value = "general")]
    pub(crate) channels: Vec<String>,
    /// Port of the listen API; 0 for any.
    #[arg(long, env = "AGENT_RELAY_API_PORT", default_value_t = 0)]
    pub(crate) api_port: u16,
    /// Address of the listen API. It controls every agent: beyond loopback only behind a guard.
    #[arg(long, env = "AGENT_RELAY_API_BIND", default_value = "127.0.0.1")]
    pub(crate) api_bind: IpAddr,
    /// Runs without an owner's lease and keeps its state in the working directory.
    #[arg(long, env = "AGENT_RELAY_PERSIST")]
    pub(crate) persist: bool,
    /// Directory of the state.
    #[arg(long, env = "AGENT_RELAY_STATE_DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Greatest number of agents; 0 for any. The documented maximum is 500.
    #[arg(long, env = "AGENT_RELAY_MAX_AGENTS", default_value_t = 0)]
    pub(crate) max_agents: u32,
    /// Names `spawn:NAME` under which members of the workspace may start programs here. An invocation chooses program,
    /// arguments and environment itself.
    #[arg(long, env = "AGENT_RELAY_NODE_HARNESSES", value_delimiter = ',')]
    pub(crate) spawn: Vec<String>,
    /// TOML file with entries for agent programs.
    #[arg(long, env = "AGENT_RELAY_HARNESSES")]
    pub(crate) harnesses: Option<PathBuf>,
    /// Starts the agents of the last broker again, also after a stop in order.
    #[arg(long, env = "AGENT_RELAY_RESUME")]
    pub(crate) resume: bool,
    /// User as whom agents run. Needs a broker that root has started.
    #[arg(long, env = "AGENT_RELAY_RUN_AS", value_name = "USER")]
    pub(crate) run_as: Option<String>,
    /// Gives agents the workspace key, which published clients expect.
    // With a value, since a flag without one cannot switch off a default.
    #[arg(long, env = "AGENT_RELAY_SHARE_WORKSPACE_KEY", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) share_workspace_key: bool,
    /// Starts known programs with the arguments that switch their permission questions off.
    #[arg(long, env = "AGENT_RELAY_ALLOW_PERMISSION_BYPASS")]
    pub(crate) allow_permission_bypass: bool,
    /// First-run questions of programs that the broker answers as the harness table says.
    // Only the question about the broker's own servers by default: others grant rights, which a person has to decide
    // about.
    #[arg(long, env = "AGENT_RELAY_ANSWER_GATES", value_delimiter = ',', default_value = "mcp-servers")]
    pub(crate) answer_gates: Vec<String>,
    /// Shows agents how to confirm a message.
    #[arg(long, env = "AGENT_RELAY_ACK_HINT", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) ack_hint: bool,
    /// Messages of high priority count as delivered only when the agent has confirmed them.
    #[arg(long, env = "AGENT_RELAY_CONFIRM_HIGH_PRIORITY")]
    pub(crate) confirm_high_priority: bool,
    /// Deliveries that are reported to those who watch the workspace.
    #[arg(long, env = "AGENT_RELAY_RECEIPTS", value_enum, default_value = "exceptions")]
    pub(crate) receipts: ReceiptPolicy,
    /// Address of /metrics, /health and /ready without a key.
    #[arg(long, env = "AGENT_RELAY_METRICS")]
    pub(crate) metrics: Option<std::net::SocketAddr>,
    /// Form of the log lines on stderr.
    #[arg(long, env = "AGENT_RELAY_LOG_FORMAT", value_enum, default_value = "json")]
    pub(crate) log_format: LogFormat,
    /// Base URL of the engine.
    #[arg(long, env = "RELAYCAST_BASE_URL")]
    pub(crate) engine_url: Option<String>,
    /// Base URL of the engine's sockets, if it differs.
    #[arg(long, env = "RELAYCAST_WS_URL")]
    pub(crate) engine_socket_url: Option<String>,
    /// Key of the listen API; invented when absent.
    #[arg(long, env = "RELAY_BROKER_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Node token made elsewhere.
    #[arg(long, env = "RELAY_NODE_TOKEN", hide_env_values = true)]
    pub(crate) node_token: Option<String>,
    /// Type of the broker's own agent.
    #[arg(long, env = "RELAY_AGENT_TYPE", default_value = "human")]
    pub(crate) agent_type: String,
    /// Channels of agents that are spawned without any.
    #[arg(long, env = "RELAY_DEFAULT_CHANNELS", value_delimiter = ',', default_value = "general,engineering")]
    pub(crate) default_channels: Vec<String>,
    /// Command of the MCP server that agents get.
    #[arg(long, env = "AGENT_RELAY_MCP_COMMAND", default_value = "npx -y agent-relay mcp")]
    pub(crate) mcp_command: String,
}

impl Init {
    /// Leaves empty entries of lists out, and refuses values that would only fail later.
    pub(crate) fn checked(mut self) -> Result<Self> {
        for list in [&mut self.channels, &mut self.spawn, &mut self.answer_gates, &mut self.default_channels] {
            list.retain(|entry| !entry.trim().is_empty());
        }
        shell_words::split(&self.mcp_command).context("--mcp-command cannot be split into words")?;
        if let Some(url) = self.engine_socket_url.as_deref().filter(|url| !url.is_empty()) {
            let parsed = Url::parse(url).with_context(|| format!("--engine-socket-url {url} is no URL"))?;
            let schemes = ["http", "https", "ws", "wss"];
            ensure!(schemes.contains(&parsed.scheme()), "--engine-socket-url {url} is no URL of a socket");
        }
        Ok(self)
    }
}

/// Arguments of `dump-pty`.
#[derive(Debug, Args)]
pub(crate) struct DumpPty {
    /// Name of the agent.
    pub(crate) name: String,
    /// `plain` or `ansi`.
    #[arg(long, default_value = "plain")]
    pub(crate) format: String,
    #[command(flatten)]
    pub(crate) broker: BrokerLocation,
}

/// Arguments of `verification`.
#[derive(Debug, Args)]
pub(crate) struct Verification {
    /// One running agent instead of all programs.
    #[arg(long)]
    pub(crate) agent: Option<String>,
    #[command(flatten)]
    pub(crate) broker: BrokerLocation,
}

/// Place of a running broker.
#[derive(Debug, Args)]
pub(crate) struct BrokerLocation {
    /// URL of the broker.
    #[arg(long, env = "RELAY_BROKER_URL")]
    pub(crate) broker_url: Option<String>,
    /// Key of the broker.
    #[arg(long, env = "RELAY_BROKER_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// State directory of the broker, when URL and key are not given.
    #[arg(long, env = "AGENT_RELAY_STATE_DIR")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Arguments of `mcp-args`.
#[derive(Debug, Args)]
pub(crate) struct McpArgs {
    /// Command line of the agent program.
    #[arg(long)]
    pub(crate) cli: String,
    /// Name of the agent.
    #[arg(long)]
    pub(crate) agent_name: String,
    /// Key of the workspace.
    #[arg(long, env = "RELAY_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Base URL of the engine.
    #[arg(long, env = "RELAY_BASE_URL")]
    pub(crate) base_url: Option<String>,
    /// Token of the agent.
    #[arg(long)]
    pub(crate) agent_token: Option<String>,
    /// Workspaces of the agent, as JSON.
    #[arg(long)]
    pub(crate) workspaces_json: Option<String>,
    /// Its default workspace.
    #[arg(long)]
    pub(crate) default_workspace: Option<String>,
    /// Working directory of the program. Files that a broker would change there are named, not written.
    #[arg(long)]
    pub(crate) cwd: Option<PathBuf>,
    /// Arguments that the program gets already, as a JSON array.
    #[arg(long)]
    pub(crate) existing_args: Option<String>,
    /// TOML file with entries for agent programs.
    #[arg(long, env = "AGENT_RELAY_HARNESSES")]
    pub(crate) harnesses: Option<PathBuf>,
    /// Command of the MCP server.
    #[arg(long, env = "AGENT_RELAY_MCP_COMMAND", default_value = "npx -y agent-relay mcp")]
    pub(crate) mcp_command: String,
}

/// Arguments of `ack`.
#[derive(Debug, Args)]
pub(crate) struct Ack {
    pub(crate) delivery_id: String,
    pub(crate) event_id: String,
    /// Folder of the agent's ack files.
    #[arg(long, env = "AGENT_RELAY_ACK_DIR")]
    pub(crate) ack_dir: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(args: &[&str]) -> Result<Init> {
        let command = Cli::parse_from([&["agent-relay-broker", "init"], args].concat()).command;
        let Command::Init(settings) = command else { unreachable!("init was given") };
        settings.checked()
    }

    #[test]
    fn empty_entries_are_left_out_and_wrong_values_refused() {
        let settings = checked(&["--spawn", "", "--default-channels", "a,,b", "--answer-gates", ""]).expect("valid");
        assert!(settings.spawn.is_empty() && settings.answer_gates.is_empty());
        assert_eq!(settings.default_channels, ["a", "b"]);
        for wrong in [["--mcp-command", "npx 'open"], ["--engine-socket-url", "ftp://x"], ["--engine-socket-url", "x"]]
        {
            checked(&wrong).expect_err(wrong[1]);
        }
    }
}
