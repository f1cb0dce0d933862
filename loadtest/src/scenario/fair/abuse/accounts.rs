//! Workspaces and observer tokens: created and removed in loops.

use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Attack, Counts, Scene, sockets};
use crate::api::Workspace;

/// Workspaces that one task holds before it deletes them all. With those of the other tasks, more than a workspace may
/// create.
const HELD: usize = 40;
/// Address of the anonymous client. One on this machine would be exempt from the rate limit.
const ANONYMOUS: &str = "198.51.100.7";

/// Creator of workspaces.
#[derive(Clone, Copy)]
enum Creator {
    Owner,
    Anonymous,
}

pub(super) fn workspaces(scene: &Scene) -> Attack {
    let mut attack = Attack::new();
    for (tasks, creator) in [(32, Creator::Owner), (8, Creator::Anonymous)] {
        attack.spawn(tasks, scene, |task, workspace, counts| create_workspaces(task, workspace, counts, creator));
    }
    attack
}

/// Creates workspaces and deletes them after a refusal, or when there are [`HELD`].
async fn create_workspaces(first_turn: usize, workspace: Workspace, counts: Arc<Counts>, creator: Creator) {
    let mut keys = Vec::new();
    for turn in first_turn.. {
        let created = create_workspace(&workspace, turn, creator).await;
        let is_accepted = created.is_ok();
        counts.count(is_accepted).await;
        keys.extend(created);
        if is_accepted && keys.len() < HELD {
            continue;
        }
        for key in keys.drain(..) {
            // One that stays costs nothing but its place in the quota.
            let _ = workspace.pool(turn).delete("/v1/workspace", &key).await;
        }
    }
}

/// Returns the key of a new workspace.
async fn create_workspace(workspace: &Workspace, turn: usize, creator: Creator) -> Result<String> {
    let (pool, path) = (workspace.pool(turn), "/v1/workspaces");
    let body = json!({ "name": "one of many" }).to_string();
    let answer = match creator {
        Creator::Owner => pool.post(path, Some(workspace.key()), &body).await,
        Creator::Anonymous => pool.post_forwarded(path, ANONYMOUS, &body).await,
    };
    let created: Value = serde_json::from_slice(&answer?.success()?.body)?;
    created["data"]["api_key"].as_str().map(ToOwned::to_owned).context("a key")
}

/// Observers. Creations and revocations of tokens are counted, and the upgrades of sockets.
pub(super) async fn observers(scene: &Scene) -> Result<Attack> {
    let token = ObserverToken::create(&scene.workspace, 0, "held").await?;
    let mut attack = Attack::new();
    sockets::hold(&mut attack, scene, "/v1/ws", &token.text);
    attack.spawn(16, scene, create_and_revoke_tokens);
    Ok(attack)
}

async fn create_and_revoke_tokens(task: usize, workspace: Workspace, counts: Arc<Counts>) {
    let name = format!("revoked-{task}");
    for turn in task.. {
        let created = ObserverToken::create(&workspace, turn, &name).await;
        counts.count(created.is_ok()).await;
        if let Ok(token) = created {
            counts.count(token.revoke(&workspace, turn).await.is_ok()).await;
        }
    }
}

struct ObserverToken {
    id: String,
    text: String,
}

impl ObserverToken {
    async fn create(workspace: &Workspace, turn: usize, name: &str) -> Result<Self> {
        let body = json!({ "name": name, "scopes": ["stream:read"] }).to_string();
        let answer = workspace.pool(turn).post("/v1/observer-tokens", Some(workspace.key()), &body).await?;
        let created: Value = serde_json::from_slice(&answer.success()?.body)?;
        let text = |field: &str| created["data"][field].as_str().map(ToOwned::to_owned).context("a field of a token");
        Ok(Self { id: text("id")?, text: text("token")? })
    }

    async fn revoke(&self, workspace: &Workspace, turn: usize) -> Result<()> {
        let path = format!("/v1/observer-tokens/{}", self.id);
        workspace.pool(turn).delete(&path, workspace.key()).await?.success().map(drop)
    }
}
