//! Shares of one tenant in what a process holds and runs, also with child workspaces: others keep theirs.

mod calls;
mod families;
mod searches;
mod single_requests;

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};
use relay_testkit::client::Api;
use serde_json::json;
use sqlx::{Postgres, Transaction};

/// Agents that another tenant registers during an attack.
const OTHERS: usize = 20;

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

/// Registers agents of another tenant until one is refused, and ends the attack and its lock then.
pub(crate) async fn register_others(other: &Api, lock: Transaction<'_, Postgres>, is_over: &AtomicBool) -> Result<()> {
    let mut refused = Ok(());
    for nth in 0..OTHERS {
        refused = other.register_agent(&format!("agent-{nth}")).await.map(drop).context("refused");
        if refused.is_err() {
            break;
        }
    }
    is_over.store(true, Ordering::Relaxed);
    lock.rollback().await?;
    refused
}
