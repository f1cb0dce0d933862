//! What providers advertise, as placement finds it, and the actions that follow from it.
//!
//! A capability of kind `action` makes an action of its node. It also claims the name in the whole workspace when it
//! says `global`, or comes from the `default` provider, which yields where somebody else was first.

use chrono::{DateTime, Utc};
use relay_domain::{NodeId, ProviderName, WorkspaceScope, action};
use serde_json::Value;
use sqlx::PgConnection;

use crate::{StoreError, StoreResult};

/// A capability as it is stored with its provider.
#[derive(Debug)]
struct Advertised<'a> {
    name: &'a str,
    is_action: bool,
    global: bool,
    queue: bool,
    tells_caller: bool,
}

/// Reads the stored list; the first of a name counts. What only tells how to talk to the node is left out.
fn advertised(capabilities: &Value, default_provider: bool) -> Vec<Advertised<'_>> {
    let mut list: Vec<Advertised<'_>> = Vec::new();
    for capability in capabilities.as_array().map(Vec::as_slice).unwrap_or_default() {
        let Some(name) = capability["name"].as_str() else { continue };
        if name.starts_with(action::PROTOCOL_PREFIX) || list.iter().any(|known| known.name == name) {
            continue;
        }
        let (key, version) = action::CALLER_METADATA;
        list.push(Advertised {
            name,
            is_action: capability["kind"] == "action",
            global: capability["global"] == true,
            queue: default_provider || capability["queue"] == true,
            tells_caller: capability["metadata"][key] == version,
        });
    }
    list
}

/// An action of the workspace that is in the way of another.
#[derive(sqlx::FromRow)]
struct Known {
    action_id: i64,
    name: String,
    claims_name: bool,
    handler_node_id: Option<String>,
    provider: Option<String>,
}

/// Replaces what a provider advertises; `fresh_ids` has an id for each capability. `Err` of a name that it must have for itself and somebody else has: the
/// transaction is to be rolled back.
pub(crate) async fn replace(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    node: &NodeId,
    provider: &ProviderName,
    capabilities: &Value,
    fresh_ids: &[i64],
    at: DateTime<Utc>,
) -> StoreResult<Result<(), String>> {
    let doing = "storing what a provider advertises";
    let is_default = *provider == ProviderName::default_provider();
    let list = advertised(capabilities, is_default);
    let workspace = scope.workspace_id().get();
    let names: Vec<&str> = list.iter().map(|c| c.name).collect();
    let kinds: Vec<&str> = list.iter().map(|c| if c.is_action { "action" } else { "capacity" }).collect();
    let queues: Vec<bool> = list.iter().map(|c| c.queue).collect();
    let tells: Vec<bool> = list.iter().map(|c| c.tells_caller).collect();
    sqlx::query(
        "WITH gone AS (
             DELETE FROM node_capabilities
              WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND name <> ALL ($4)
         )
         INSERT INTO node_capabilities (workspace_id, node_id, provider, name, kind, queue, tells_caller)
         SELECT $1, $2, $3, c.* FROM unnest($4::text[], $5::text[], $6::bool[], $7::bool[]) AS c
         ON CONFLICT (workspace_id, name, node_id, provider) DO UPDATE
            SET kind = excluded.kind, queue = excluded.queue, tells_caller = excluded.tells_caller",
    )
    .bind(workspace)
    .bind(node.as_str())
    .bind(provider.as_str())
    .bind(&names)
    .bind(kinds)
    .bind(queues)
    .bind(tells)
    .execute(&mut *tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    let actions: Vec<&Advertised<'_>> = list.iter().filter(|c| c.is_action && !action::is_reserved(c.name)).collect();
    let action_names: Vec<&str> = actions.iter().map(|c| c.name).collect();
    drop_actions(tx, scope, node, provider, &action_names).await?;
    if actions.is_empty() {
        return Ok(Ok(()));
    }
    // Two providers that claim one name at once would both find it free: one of them waits here.
    lock_names(tx, scope).await?;
    let known: Vec<Known> = sqlx::query_as(
        "SELECT action_id, name, claims_name, handler_node_id, provider FROM actions
          WHERE workspace_id = $1 AND name = ANY ($2) AND (claims_name OR handler_node_id = $3)",
    )
    .bind(workspace)
    .bind(&action_names)
    .bind(node.as_str())
    .fetch_all(&mut *tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    for (capability, fresh_id) in actions.into_iter().zip(fresh_ids) {
        let of_name = || known.iter().filter(|k| k.name == capability.name);
        let here = of_name().find(|k| k.handler_node_id.as_deref() == Some(node.as_str()));
        let ours = here.filter(|k| k.provider.as_deref() == Some(provider.as_str()));
        let yields = is_default && !capability.global;
        if let (Some(here), None) = (here, ours) {
            // What was defined by REST for this node stays as it was defined there.
            if here.provider.is_none() || yields {
                continue;
            }
            return Ok(Err(capability.name.to_owned()));
        }
        let claimed = of_name().any(|k| k.claims_name && ours.is_none_or(|own| own.action_id != k.action_id));
        if claimed && capability.global {
            return Ok(Err(capability.name.to_owned()));
        }
        let claims = (capability.global || is_default) && !claimed;
        match ours {
            Some(own) if own.claims_name == claims => {}
            Some(own) => set_claim(tx, scope, own.action_id, claims).await?,
            None => insert(tx, scope, (*fresh_id, capability.name, claims), node, provider, at).await?,
        }
    }
    Ok(Ok(()))
}

/// Removes what a provider advertised.
pub(crate) async fn forget(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    node: &NodeId,
    provider: &ProviderName,
) -> StoreResult<()> {
    sqlx::query("DELETE FROM node_capabilities WHERE workspace_id = $1 AND node_id = $2 AND provider = $3")
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(provider.as_str())
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx("forgetting what a provider advertised"))?;
    drop_actions(tx, scope, node, provider, &[]).await
}

/// Serialises those who claim or release names of actions in a workspace, until the commit.
pub(crate) async fn lock_names(tx: &mut PgConnection, scope: WorkspaceScope) -> StoreResult<()> {
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('actions', $1))")
        .bind(scope.workspace_id().get())
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("locking the names of actions"))?;
    Ok(())
}

async fn drop_actions(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    node: &NodeId,
    provider: &ProviderName,
    kept: &[&str],
) -> StoreResult<()> {
    sqlx::query(
        "DELETE FROM actions
          WHERE workspace_id = $1 AND handler_node_id = $2 AND provider = $3 AND name <> ALL ($4)",
    )
    .bind(scope.workspace_id().get())
    .bind(node.as_str())
    .bind(provider.as_str())
    .bind(kept)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("dropping the actions of a provider"))?;
    Ok(())
}

async fn set_claim(tx: &mut PgConnection, scope: WorkspaceScope, action: i64, claims: bool) -> StoreResult<()> {
    sqlx::query("UPDATE actions SET claims_name = $3 WHERE workspace_id = $1 AND action_id = $2")
        .bind(scope.workspace_id().get())
        .bind(action)
        .bind(claims)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("claiming the name of an action"))?;
    Ok(())
}

async fn insert(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    (id, name, claims): (i64, &str, bool),
    node: &NodeId,
    provider: &ProviderName,
    at: DateTime<Utc>,
) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO actions (workspace_id, action_id, name, claims_name, handler_node_id, provider, created_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(scope.workspace_id().get())
    .bind(id)
    .bind(name)
    .bind(claims)
    .bind(node.as_str())
    .bind(provider.as_str())
    .bind(at)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("making the action of a capability"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_advertised_is_read_once_per_name() {
        let stored = json!([
            { "name": "build", "kind": "action", "global": true, "metadata": { "relay.action-caller": "v1" } },
            { "name": "build", "kind": "capacity" },
            { "name": "relay:delivery-cursor-v1", "kind": "capacity" },
            { "name": "spawn:claude", "kind": "capacity", "queue": true },
            { "kind": "action" },
        ]);
        let read = advertised(&stored, false);
        let seen: Vec<_> = read.iter().map(|c| (c.name, c.is_action, c.global, c.queue, c.tells_caller)).collect();
        assert_eq!(seen, [("build", true, true, false, true), ("spawn:claude", false, false, true, false)]);
        assert!(advertised(&stored, true).iter().all(|c| c.queue), "the default provider queues");
    }
}
