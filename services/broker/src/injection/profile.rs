//! [`Profile`]: what is known of an agent before its program runs.

use relay_verification::{Level, RequiredChannels, strategy::Strategy};

/// Facts about an agent that do not change while its process runs.
#[derive(Debug, Clone)]
pub(crate) struct Profile {
    pub(crate) agent: String,
    /// Named in front of event ids when the broker serves several workspaces.
    pub(crate) workspace_alias: Option<String>,
    pub(crate) strategy: Strategy,
    /// Channels that can work for this agent.
    pub(crate) usable: RequiredChannels,
    pub(crate) activity: Vec<String>,
    /// Level that messages of high priority demand.
    pub(crate) minimum_high: Level,
    /// Prefix of tool names, for agents with our MCP servers; they get a reminder in front of messages.
    pub(crate) tool_prefix: Option<String>,
    /// The program shows suggestions in its input line.
    pub(crate) has_suggestions: bool,
}
