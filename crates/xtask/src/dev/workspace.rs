//! The workspace that `dev` offers, the same on every run.

use anyhow::{Context, Result};
use relay_testkit::client::Api;

use super::cluster::Cluster;

/// The key of the earlier run if the database still knows it, else the key of a new workspace.
pub(super) async fn kept_or_new(cluster: &Cluster, kept: Option<String>) -> Result<String> {
    let gateway = cluster.gateways().first().context("no gateway")?.url();
    if let Some(key) = kept
        && Api::new(gateway, &key).get("/v1/workspace").await?.is_success()
    {
        return Ok(key);
    }
    let workspace = Api::create_workspace(gateway, "dev").await.context("create the workspace")?;
    Ok(workspace.token().to_owned())
}
