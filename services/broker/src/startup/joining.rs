//! The conversation with the engine before the broker is ready.

use std::{env, time::Duration};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::local_state::LocalState;
use crate::{
    cli::Init,
    engine::{Engine, Identity, JoinRequest, join, machine_seed},
    state::{Persistence, StateDirectory},
};

/// The whole conversation.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Joins the workspace. `None` if the broker is stopped meanwhile.
pub(super) async fn join_engine(
    settings: &Init,
    state: &LocalState,
    directory: &StateDirectory,
    stop: &CancellationToken,
) -> Result<Option<(Engine, Identity)>> {
    let url = engine_url(settings)?;
    let engine = Engine::new(&url)?;
    let joining = join(&engine, join_request(settings, state, directory)?);
    match stop.run_until_cancelled(timeout(JOIN_TIMEOUT, joining)).await {
        Some(joined) => {
            let identity = joined.with_context(|| format!("{url} has not answered in time"))??;
            Ok(Some((engine, identity)))
        }
        None => Ok(None),
    }
}

fn engine_url(settings: &Init) -> Result<String> {
    let given = settings.engine_url.clone().filter(|url| !url.is_empty());
    let url = given.or_else(|| variable("RELAY_BASE_URL"));
    let url = url.context("no engine: set RELAYCAST_BASE_URL or RELAY_BASE_URL")?;
    let parsed = url::Url::parse(&url).with_context(|| format!("{url} is not a URL"))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        bail!("{url} is not an http or https URL");
    }
    Ok(url)
}

fn join_request(settings: &Init, state: &LocalState, directory: &StateDirectory) -> Result<JoinRequest> {
    let LocalState { instance, working_directory, .. } = state;
    let given = settings.workspace_key.clone().filter(|key| !key.is_empty());
    let keys = ["RELAY_WORKSPACE_KEY", "RELAY_API_KEY"];
    let workspace_key = given.or_else(|| keys.into_iter().find_map(variable)).or_else(default_workspace_key);
    Ok(JoinRequest {
        instance: instance.to_owned(),
        workspace_key,
        agent_type: settings.agent_type.clone(),
        channels: settings.channels.iter().map(|name| name.trim_start_matches('#').to_owned()).collect(),
        machine_seed: machine_seed(variable("XDG_DATA_HOME").as_deref(), variable("HOME").as_deref())?,
        working_directory: working_directory.to_owned(),
        takes_over: directory.persistence() == Persistence::Kept,
        node_token: settings.node_token.clone().filter(|token| !token.is_empty()),
        token_file: directory.file("node-token", instance, "json"),
    })
}

/// Key of the default workspace in `RELAY_WORKSPACES_JSON`.
fn default_workspace_key() -> Option<String> {
    let workspaces: Vec<Value> = serde_json::from_str(&variable("RELAY_WORKSPACES_JSON")?).ok()?;
    let default = variable("RELAY_DEFAULT_WORKSPACE");
    let is_default = |workspace: &&Value| {
        let names = [workspace["workspace_id"].as_str(), workspace["workspace_alias"].as_str()];
        default.as_deref().is_none_or(|default| names.contains(&Some(default)))
    };
    workspaces.iter().find(is_default)?["api_key"].as_str().map(str::to_owned)
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}
