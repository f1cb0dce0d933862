//! The conversation with the engine before the broker is ready.

use std::{env, time::Duration};

use anyhow::{Context as _, Result, bail};
use futures::future::try_join_all;
use tokio::{task::spawn_blocking, time::timeout};
use tokio_util::sync::CancellationToken;

use super::{
    local_state::LocalState,
    workspaces::{WorkspaceSpec, given_workspaces},
};
use crate::{
    cli::Init,
    engine::{Engine, Identity, JoinRequest, join, machine_seed},
    state::{Persistence, StateDirectory},
};

/// The whole conversation.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Joins the workspaces, the default one first. `None` if the broker is stopped meanwhile.
pub(super) async fn join_engine(
    settings: &Init,
    state: &LocalState,
    directory: &StateDirectory,
    stop: &CancellationToken,
) -> Result<Option<(Engine, Vec<Identity>)>> {
    let url = engine_url(settings)?;
    let engine = Engine::new(&url)?;
    // The API is served already, so no file is read on the threads of the runtime.
    let seed = spawn_blocking(|| machine_seed(variable("XDG_DATA_HOME").as_deref(), variable("HOME").as_deref()));
    let seed = seed.await??;
    let given = workspaces(settings)?.into_iter().enumerate();
    let requests =
        given.map(|(index, workspace)| join_request(settings, state, directory, &seed, workspace, index == 0));
    // One workspace that cannot be joined ends the start: a broker that serves fewer than it was given loses mail
    // silently.
    let joining = try_join_all(requests.map(|request| join(&engine, request)));
    match stop.run_until_cancelled(timeout(JOIN_TIMEOUT, joining)).await {
        Some(joined) => {
            let identities = joined.with_context(|| format!("{url} has not answered in time"))??;
            Ok(Some((engine, identities)))
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

fn workspaces(settings: &Init) -> Result<Vec<WorkspaceSpec>> {
    let key = settings.workspace_key.clone().filter(|key| !key.is_empty());
    let key = key.or_else(|| ["RELAY_WORKSPACE_KEY", "RELAY_API_KEY"].into_iter().find_map(variable));
    let (list, default) = (variable("RELAY_WORKSPACES_JSON"), variable("RELAY_DEFAULT_WORKSPACE"));
    given_workspaces(key, list.as_deref(), default.as_deref())
}

/// The request for one workspace. A node token that was made elsewhere is for the default one.
fn join_request(
    settings: &Init,
    state: &LocalState,
    directory: &StateDirectory,
    machine_seed: &str,
    workspace: WorkspaceSpec,
    is_default: bool,
) -> JoinRequest {
    let LocalState { instance, working_directory, .. } = state;
    let node_token = settings.node_token.clone().filter(|token| is_default && !token.is_empty());
    // The default workspace has the file of a broker that serves one only. Its content names the workspace, so a change
    // of the default costs a new enrolment and nothing else.
    let token_file = match &workspace.id {
        Some(id) if !is_default => directory.file("node-token", &format!("{instance}-{id}"), "json"),
        Some(_) | None => directory.file("node-token", instance, "json"),
    };
    JoinRequest {
        instance: instance.to_owned(),
        workspace_id: workspace.id,
        workspace_alias: workspace.alias,
        workspace_key: workspace.key,
        agent_type: settings.agent_type.clone(),
        channels: settings.channels.iter().map(|name| name.trim_start_matches('#').to_owned()).collect(),
        machine_seed: machine_seed.to_owned(),
        working_directory: working_directory.to_owned(),
        // A temporary directory has no predecessor: an agent of this name belongs to another broker.
        takes_over: directory.persistence() == Persistence::Kept,
        node_token,
        token_file,
        key_file: directory.file("workspace-key", instance, "json"),
    }
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}
