//! Environment of an agent's process.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    path::Path,
};

use relay_pty::Account;
use serde_json::json;

use super::{AgentHandle, AgentSpec, Services};

/// Variable that marks all processes of an agent.
pub(crate) const MARKER: &str = "AGENT_RELAY_SPAWN_ID";

/// Variables that control the broker and every agent, and those about the broker's own session and terminal.
const WITHHELD: [&str; 6] =
    ["RELAY_BROKER_API_KEY", "RELAY_NODE_TOKEN", "RELAY_BROKER_URL", "CLAUDECODE", "LINES", "COLUMNS"];
/// Workspaces with their keys.
const WORKSPACES: &str = "RELAY_WORKSPACES_JSON";
/// Workspace keys under all their names.
const WORKSPACE_KEYS: [&str; 3] = ["AGENT_RELAY_WORKSPACE_KEY", "RELAY_WORKSPACE_KEY", "RELAY_API_KEY"];

/// Variables that lead to the files and the session of the broker's user.
const PERSONAL: [&str; 8] = [
    "MAIL",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_RUNTIME_DIR",
    "XDG_STATE_HOME",
    "DBUS_SESSION_BUS_ADDRESS",
    "SSH_AUTH_SOCK",
];

/// The whole environment of an agent: the broker's, without its secrets, with the agent's own variables.
pub(super) fn environment(
    services: &Services,
    spec: &AgentSpec,
    handle: &AgentHandle,
    ack_folder: Option<&Path>,
) -> BTreeMap<OsString, OsString> {
    let mut environment: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
    for name in withheld_variables() {
        environment.remove(OsStr::new(name));
    }
    // The agent has a terminal of its own, whatever the broker was started in.
    if environment.get(&OsString::from("TERM")).is_none_or(|term| term.is_empty() || term == "dumb") {
        environment.insert("TERM".into(), "xterm-256color".into());
    }
    let (identity, settings) = (&services.identity, &services.settings);
    if let Some(account) = &settings.account {
        become_another(account, &mut environment);
    }
    let mut set = |name: &str, value: &str| {
        environment.insert(name.into(), value.into());
    };
    if !spec.skip_relay_prompt {
        set("RELAY_AGENT_NAME", &spec.name);
        set("RELAY_AGENT_TOKEN", &handle.token);
        set("RELAY_AGENT_TYPE", "agent");
        set("RELAY_STRICT_AGENT_NAME", "1");
    }
    if settings.share_workspace_key {
        WORKSPACE_KEYS.iter().for_each(|name| set(name, &identity.workspace_key));
        let workspaces = json!([{
            "workspace_id": identity.workspace_id,
            "workspace_alias": identity.workspace_alias,
            "api_key": identity.workspace_key,
        }]);
        set(WORKSPACES, &workspaces.to_string());
    }
    set("RELAY_BASE_URL", services.engine.base_url());
    set("RELAY_DEFAULT_WORKSPACE", &identity.workspace_id);
    set("RELAY_WORKSPACE_ID", &identity.workspace_id);
    set("AGENT_RELAY_RESULT_URL", &format!("{}/api/agent-result", settings.api_url));
    if let Some(schema) = &spec.result_schema {
        set("AGENT_RELAY_RESULT_TOKEN", &handle.result_token);
        set("AGENT_RELAY_RESULT_SCHEMA", &schema.to_string());
    }
    set("AGENT_RELAY_ORIGIN_ACTOR", &spec.name);
    set("AGENT_RELAY_ACK_URL", &format!("{}/api/delivery-ack", settings.api_url));
    set("AGENT_RELAY_ACK_TOKEN", &handle.ack_token);
    if let Some(folder) = ack_folder {
        environment.insert("AGENT_RELAY_ACK_DIR".into(), folder.into());
    }
    // Last, so that the driver's values win. Only the marker is set after them, when the process is started.
    for (name, value) in &spec.env {
        environment.insert(name.into(), value.into());
    }
    environment
}

/// Variables of the broker that neither agents nor a supervised runner inherit. Either may be given some of them: an
/// agent the keys of its workspace by [`environment`], a runner those in the `env` of its registration.
pub(crate) fn withheld_variables() -> impl Iterator<Item = &'static str> {
    WITHHELD.into_iter().chain(WORKSPACE_KEYS).chain([WORKSPACES])
}

/// Puts the variables of another user in place of those of the broker's.
fn become_another(account: &Account, environment: &mut BTreeMap<OsString, OsString>) {
    environment.retain(|name, _| !PERSONAL.iter().any(|personal| name == personal));
    for (name, value) in [
        ("HOME", account.home.as_os_str()),
        ("SHELL", account.shell.as_os_str()),
        ("USER", OsStr::new(&account.name)),
        ("LOGNAME", OsStr::new(&account.name)),
    ] {
        environment.insert(name.into(), value.to_owned());
    }
}
