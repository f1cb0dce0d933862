//! The workspace that `dev` offers, the same on every run, and its agents.

use anyhow::{Context, Result};
use relay_stack::client::{Agent, Api};
use serde_json::{Value, json};

use super::cluster::Cluster;

/// The key of the earlier run if the database still knows it, else the key of a new workspace.
pub(super) async fn kept_or_new(cluster: &Cluster, kept: Option<String>) -> Result<String> {
    let gateway = cluster.gateways().first().context("no gateway")?.url();
    if let Some(key) = kept
        && Api::new(gateway, &key).get("/v1/workspace").await?.is_success()
    {
        return Ok(key);
    }
    create(gateway).await.context("create the workspace (with RELAY_HOSTED=on that takes RELAY_BOOTSTRAP_SECRET)")
}

/// The key of a new workspace. A hosted installation makes one for its operator only.
async fn create(gateway: &str) -> Result<String> {
    let secret = bootstrap_secret()?;
    let headers: Vec<(&str, &str)> =
        secret.iter().map(|secret| ("x-workspace-bootstrap-secret", secret.as_str())).collect();
    let body = Some(json!({ "name": "dev" }));
    let made = Api::anonymous(gateway).call("POST".parse()?, "/v1/workspaces", body, &headers).await?.success()?;
    Ok(made["api_key"].as_str().context("no key in the answer")?.to_owned())
}

/// The operator's secret, from where the gateways take it.
fn bootstrap_secret() -> Result<Option<String>> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    if let Some(secret) = set("RELAY_BOOTSTRAP_SECRET") {
        return Ok(Some(secret));
    }
    let Some(path) = set("RELAY_BOOTSTRAP_SECRET_FILE") else { return Ok(None) };
    let secret = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    Ok(Some(secret.trim_end_matches(['\r', '\n']).to_owned()))
}

/// Returns an agent of a demo with a valid token. Such agents stay in the kept workspace, so later runs find them
/// there.
pub(crate) async fn register_or_rotate(workspace: &Api, name: &str) -> Result<Agent> {
    // A refusal means that the name is taken. Any other failure repeats with the next call, which reports it.
    if let Ok(agent) = workspace.register_agent(name).await {
        return Ok(agent);
    }
    let agent = workspace.get(&format!("/v1/agents/{name}")).await?.success()?;
    let rotated = workspace.post(&format!("/v1/agents/{name}/rotate-token"), json!({})).await?.success()?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    Ok(Agent {
        id: text(&agent["id"]).context("no agent id")?,
        name: name.to_owned(),
        token: text(&rotated["token"]).context("no token")?,
    })
}
