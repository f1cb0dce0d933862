//! The broker at the engine: its workspace, its own agent, its node, its channels. Made once at the start.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use futures::future::join_all;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{Engine, EngineError, Request, node_id};
use crate::{
    state::{refuse_newer, write_versioned},
    version,
};

/// Version of the files with the node token and the key.
const FILES_VERSION: u32 = 1;
/// Time after which retries to an unreachable engine end.
const UNREACHABLE_LIMIT: Duration = Duration::from_secs(8);
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// Channels of every broker.
const CHANNELS: [&str; 2] = ["general", "engineering"];

/// Wishes of the operator.
#[derive(Debug)]
pub(crate) struct JoinRequest {
    pub(crate) instance: String,
    /// The workspace that the key is expected to be of.
    pub(crate) workspace_id: Option<String>,
    /// Name of the workspace for people and agents; the engine's own by default.
    pub(crate) workspace_alias: Option<String>,
    pub(crate) workspace_key: Option<String>,
    pub(crate) agent_type: String,
    pub(crate) channels: Vec<String>,
    pub(crate) machine_seed: String,
    pub(crate) working_directory: PathBuf,
    /// Takes its own agent over from an earlier broker of the same name.
    pub(crate) takes_over: bool,
    /// Node token made elsewhere; the node id is then the machine seed itself.
    pub(crate) node_token: Option<String>,
    /// File for the node token.
    pub(crate) token_file: PathBuf,
    /// File for the key of a workspace that was created because none was given.
    pub(crate) key_file: PathBuf,
}

/// The broker as the engine knows it.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) workspace_id: String,
    pub(crate) workspace_alias: Option<String>,
    pub(crate) workspace_key: String,
    pub(crate) agent_name: String,
    pub(crate) agent_id: String,
    pub(crate) agent_token: String,
    pub(crate) node_id: String,
    pub(crate) node_name: String,
    pub(crate) node_token: String,
    token_file: PathBuf,
}

/// Content of the token file.
#[derive(Debug, Serialize, Deserialize)]
struct CachedToken {
    base_url: String,
    workspace_id: String,
    node_id: String,
    node_name: String,
    token: String,
}

/// Content of the key file.
#[derive(Debug, Serialize, Deserialize)]
struct CreatedWorkspace {
    base_url: String,
    api_key: String,
}

/// Joins the workspace and enrols the node.
///
/// # Errors
/// If the engine cannot be reached for 8 s, or refuses.
pub(crate) async fn join(engine: &Engine, request: JoinRequest) -> Result<Identity> {
    let (workspace_key, workspace) = match &request.workspace_key {
        Some(key) => (key.clone(), read_workspace(engine, key).await?),
        None => own_workspace(engine, &request).await?,
    };
    let workspace_id = text(&workspace, "id")?;
    if let Some(expected) = request.workspace_id.as_deref().filter(|expected| *expected != workspace_id) {
        bail!("the key of workspace {expected} belongs to workspace {workspace_id}");
    }
    let own = register_own_agent(engine, &workspace_key, &request).await?;
    let (agent_name, agent_token) = (text(&own, "name")?, text(&own, "token")?);
    // The answer to a rotation has no id.
    let agent_id = match own["id"].as_str().or_else(|| own["agent_id"].as_str()) {
        Some(id) => id.to_owned(),
        None => text(&engine.call(Request::get(&["agents", &agent_name], &workspace_key)).await?, "id")?,
    };
    let mut identity = Identity {
        workspace_alias: request.workspace_alias.clone().or_else(|| workspace["name"].as_str().map(str::to_owned)),
        node_id: match &request.node_token {
            Some(_) => request.machine_seed.clone(),
            None => node_id(&request.machine_seed, &request.working_directory, &workspace_id),
        },
        node_name: request.instance.clone(),
        node_token: String::new(),
        token_file: request.token_file.clone(),
        workspace_id,
        workspace_key,
        agent_name,
        agent_id,
        agent_token,
    };
    match &request.node_token {
        Some(token) => identity.node_token.clone_from(token),
        // A new token would end the one of the file for nothing. If it does not hold any more, the link asks for
        // another.
        None if identity.read_cached_token(engine).await? => {}
        None => identity.enrol(engine).await?,
    }
    let channels = CHANNELS.iter().copied().chain(request.channels.iter().map(String::as_str));
    // Failures are logged only: hosted agents do not depend on these channels.
    join_all(channels.map(|channel| mute_channel(engine, &identity.agent_token, channel))).await;
    Ok(identity)
}

impl Identity {
    /// Gets a new node token; the earlier one opens no socket any more.
    pub(crate) async fn enrol(&mut self, engine: &Engine) -> Result<(), EngineError> {
        let body = |name: &str| json!({ "node_id": self.node_id, "name": name, "kind": "ws", "role": "broker", "version": version::wire() });
        let key = self.workspace_key.as_str();
        let post =
            async |name: &str| retry_while_unreachable(engine, || Request::post(&["nodes"], key, body(name))).await;
        let first = post(&self.node_name).await;
        let node = match first {
            Err(error) if error.has_code("node_name_conflict") => {
                // From the node's id (behind `node_`), so that each start gets the same name.
                let suffix = self.node_id.get(5..9).unwrap_or("node");
                let name = format!("{}-{suffix}", self.node_name);
                post(&name).await?
            }
            answer => answer?,
        };
        let field = |key: &str| {
            let value = node[key].as_str().map(str::to_owned);
            value.ok_or_else(|| EngineError::Unreadable(format!("the node has no {key}")))
        };
        (self.node_name, self.node_token) = (field("name")?, field("token")?);
        let cached = CachedToken {
            base_url: engine.base_url().to_owned(),
            workspace_id: self.workspace_id.clone(),
            node_id: self.node_id.clone(),
            node_name: self.node_name.clone(),
            token: self.node_token.clone(),
        };
        // Without the file the next broker asks for a token of its own.
        if let Err(error) = keep(&self.token_file, cached).await {
            tracing::warn!(error = format!("{error:#}"), "failed to store the node token, the next start enrols again");
        }
        Ok(())
    }

    async fn read_cached_token(&mut self, engine: &Engine) -> Result<bool> {
        let cached: Option<CachedToken> = read_kept(&self.token_file).await?;
        let fits = |cached: &CachedToken| {
            cached.base_url == engine.base_url()
                && cached.workspace_id == self.workspace_id
                && cached.node_id == self.node_id
        };
        let Some(cached) = cached.filter(fits) else { return Ok(false) };
        (self.node_name, self.node_token) = (cached.node_name, cached.token);
        Ok(true)
    }
}

/// Writes a value to a private file of its own.
async fn keep(file: &Path, value: impl Serialize + Send + 'static) -> Result<()> {
    let file = file.to_owned();
    tokio::task::spawn_blocking(move || write_versioned(&file, FILES_VERSION, &value)).await?
}

/// Reads a value that was kept. `None` without one: the engine gives another.
///
/// # Errors
/// If a newer broker has written it.
async fn read_kept<T: DeserializeOwned>(file: &Path) -> Result<Option<T>> {
    let Ok(content) = tokio::fs::read(file).await else { return Ok(None) };
    refuse_newer(file, &content, FILES_VERSION)?;
    Ok(serde_json::from_slice(&content).ok())
}

async fn read_workspace(engine: &Engine, key: &str) -> Result<Value, EngineError> {
    retry_while_unreachable(engine, || Request::get(&["workspace"], key)).await
}

/// The workspace that an earlier broker on this state has created at the same engine, or a new one. Agents that are
/// started again belong to the earlier one.
async fn own_workspace(engine: &Engine, request: &JoinRequest) -> Result<(String, Value)> {
    let created: Option<CreatedWorkspace> = read_kept(&request.key_file).await?;
    if let Some(CreatedWorkspace { api_key, .. }) = created.filter(|created| created.base_url == engine.base_url()) {
        match read_workspace(engine, &api_key).await {
            Err(EngineError::Refused { status: 401 | 404, .. }) => {
                tracing::warn!("the workspace that an earlier start has created does not exist any more");
            }
            workspace => return Ok((api_key, workspace?)),
        }
    }
    let api_key = create_workspace(engine, &request.instance).await?;
    let created = CreatedWorkspace { base_url: engine.base_url().to_owned(), api_key: api_key.clone() };
    if let Err(error) = keep(&request.key_file, created).await {
        tracing::warn!(
            error = format!("{error:#}"),
            "failed to store the workspace key, the next start creates another workspace"
        );
    }
    let workspace = read_workspace(engine, &api_key).await?;
    Ok((api_key, workspace))
}

async fn create_workspace(engine: &Engine, instance: &str) -> Result<String> {
    let name = format!("{instance}-{}", &uuid::Uuid::new_v4().simple().to_string()[..8]);
    let body = json!({ "name": name });
    let created = retry_while_unreachable(engine, || Request::post(&["workspaces"], "", body.clone())).await?;
    tracing::info!(workspace.name = %name, "no workspace key was given, a workspace was created");
    text(&created, "api_key")
}

async fn register_own_agent(engine: &Engine, workspace_key: &str, request: &JoinRequest) -> Result<Value> {
    let body = |name: &str| json!({ "name": name, "type": request.agent_type });
    let first =
        retry_while_unreachable(engine, || Request::post(&["agents"], workspace_key, body(&request.instance))).await;
    match first {
        Err(error) if error.has_code("agent_already_exists") && request.takes_over => {
            let path = ["agents", &request.instance, "rotate-token"];
            Ok(retry_while_unreachable(engine, || Request::post(&path, workspace_key, json!({}))).await?)
        }
        // Without kept state the agent of this name may be that of a running broker, which a rotation of its token
        // would cut off.
        Err(error) if error.has_code("agent_already_exists") => {
            let name = format!("{}-{}", request.instance, &uuid::Uuid::new_v4().simple().to_string()[..4]);
            Ok(engine.call(Request::post(&["agents"], workspace_key, body(&name))).await?)
        }
        answer => Ok(answer?),
    }
}

/// Joins a channel as the broker's own agent and mutes it, so that no mail piles up there.
async fn mute_channel(engine: &Engine, agent_token: &str, channel: &str) {
    // Fails if the channel exists, which is usual: only joining and muting decide.
    let created = engine.call(Request::post(&["channels"], agent_token, json!({ "name": channel }))).await;
    let joined = engine.call(Request::post(&["channels", channel, "join"], agent_token, json!({}))).await;
    let muted = engine.call(Request::post(&["channels", channel, "mute"], agent_token, json!({}))).await;
    if let Err(error) = joined.and(muted) {
        let created = created.is_ok();
        tracing::warn!(%error, channel, created, "the broker's own agent could not join a channel");
    }
}

/// Repeats a call while the engine cannot be reached, or is overloaded and has done nothing.
async fn retry_while_unreachable<'a>(engine: &Engine, request: impl Fn() -> Request<'a>) -> Result<Value, EngineError> {
    let deadline = Instant::now() + UNREACHABLE_LIMIT;
    loop {
        match engine.call(request()).await {
            Err(EngineError::Unreachable { .. } | EngineError::Refused { status: 429 | 503, .. })
                if Instant::now() + RETRY_PAUSE < deadline =>
            {
                sleep(RETRY_PAUSE).await;
            }
            answer => return answer,
        }
    }
}

fn text(data: &Value, key: &str) -> Result<String> {
    data[key].as_str().map(str::to_owned).with_context(|| format!("the engine's answer has no {key}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kept_value_is_read_with_and_without_a_version_but_not_from_a_newer_broker() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("workspace-key.json");
        let read = async || read_kept::<CreatedWorkspace>(&file).await;
        let key = async || read().await.expect("no newer file").map(|created| created.api_key);
        assert_eq!(key().await, None);
        std::fs::write(&file, r#"{"base_url":"http://engine","api_key":"before"}"#).expect("room");
        assert_eq!(key().await.as_deref(), Some("before"));
        let created = CreatedWorkspace { base_url: "http://engine".to_owned(), api_key: "now".to_owned() };
        keep(&file, created).await.expect("room");
        assert_eq!(key().await.as_deref(), Some("now"));
        let content = std::fs::read_to_string(&file).expect("a file");
        assert!(content.contains(r#""version":1"#), "{content}");
        std::fs::write(&file, content.replace(r#""version":1"#, r#""version":2"#)).expect("room");
        let refused = read().await.expect_err("a newer file").to_string();
        assert!(refused.contains("version 2"), "{refused}");
        std::fs::write(&file, "{").expect("room");
        assert_eq!(key().await, None, "an unreadable file is replaced");
    }
}
