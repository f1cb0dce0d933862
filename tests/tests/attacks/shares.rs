//! Shares of one tenant in what a process holds and runs, also with child workspaces: others keep theirs.

mod calls;
mod families;
mod searches;

use anyhow::{Context as _, Result};
use relay_testkit::client::Api;
use serde_json::json;

/// Creates a workspace and its children, children of children among them.
pub(crate) async fn create_family(gateway: &str, children: usize) -> Result<Vec<Api>> {
    let mut members = vec![Api::create_workspace(gateway, "root").await?];
    for nth in 0..children {
        let parent = &members[nth.saturating_sub(1)];
        let made = parent.post("/v1/workspaces", json!({ "name": format!("child-{nth}") })).await?.success()?;
        let child = parent.with_token(made["api_key"].as_str().context("a key")?);
        members.push(child);
    }
    Ok(members)
}
