//! Capabilities that providers advertise, in the form that placement reads, and the actions that they define. Called by
//! provider registration, heartbeats and removal of providers.
//!
//! A capability of kind `action` defines an action of its node. It also claims the name in the whole workspace if it is
//! `global`, or if it belongs to the `default` provider, which yields to an existing owner. An action with the name of
//! a capacity, such as `spawn:claude` or `release`, is a policy: it is invoked instead of the capacity.

use chrono::{DateTime, Utc};
use relay_domain::{ActionId, NodeId, ProviderName, WorkspaceScope, actions, nodes::CapabilityKind};
use serde_json::Value;

use crate::{StoreError, StoreResult, connections::DatabaseSession, nodes::fence::ProviderKey};

/// Capability from the stored list of a provider.
#[derive(Debug)]
struct AdvertisedCapability<'a> {
    name: &'a str,
    kind: CapabilityKind,
    global: bool,
    queue: bool,
    tells_caller: bool,
}

/// Parses the stored list. The first entry of a name wins, and protocol capabilities are left out. JSON of another
/// form advertises nothing.
fn parse_capabilities(capabilities: &Value, default_provider: bool) -> Vec<AdvertisedCapability<'_>> {
    let mut list: Vec<AdvertisedCapability<'_>> = Vec::new();
    for capability in capabilities.as_array().map(Vec::as_slice).unwrap_or_default() {
        let Some(name) = capability["name"].as_str() else { continue };
        if name.starts_with(actions::PROTOCOL_PREFIX) || list.iter().any(|known| known.name == name) {
            continue;
        }
        let (key, version) = actions::CALLER_METADATA;
        list.push(AdvertisedCapability {
            name,
            // The engine stores `action` or `capacity` only. Any other word, as of a later version, is a capacity: that
            // defines no action, so a word that this version does not know takes no name in the workspace.
            kind: if capability["kind"] == "action" { CapabilityKind::Action } else { CapabilityKind::Capacity },
            global: capability["global"] == true,
            // Part of the protocol (docs/protocol/node.md): invocations of the default provider wait, whatever it
            // declares.
            queue: default_provider || capability["queue"] == true,
            tells_caller: capability["metadata"][key] == version,
        });
    }
    list
}

/// Existing action with the name of an advertised one.
#[derive(sqlx::FromRow)]
struct ExistingAction {
    action_id: ActionId,
    name: String,
    claims_name: bool,
    handler_node_id: Option<NodeId>,
    provider: Option<ProviderName>,
}

/// Change of the workspace's actions that a capability requires.
#[derive(Debug, PartialEq, Eq)]
enum ActionChange {
    /// The action exists as it should.
    None,
    /// The provider's action starts or stops to own its name.
    SetClaim { action: ActionId, claims: bool },
    /// The capability defines a new action.
    Insert { claims: bool },
    /// Another handler owns the name.
    Conflict,
}

/// Replaces the capabilities of a provider and the actions that follow from them; `fresh_ids` has an id for each
/// capability. Returns `Err` with the name of an action that another handler owns: the caller must then roll back.
pub(crate) async fn replace_capabilities(
    tx: &mut DatabaseSession,
    key: ProviderKey<'_>,
    capabilities: &Value,
    fresh_ids: &[ActionId],
    at: DateTime<Utc>,
) -> StoreResult<Result<(), String>> {
    let list = parse_capabilities(capabilities, *key.provider == ProviderName::default_provider());
    write_capabilities(tx, key, &list).await?;
    let actions: Vec<&AdvertisedCapability<'_>> = list.iter().filter(|c| c.kind == CapabilityKind::Action).collect();
    let names: Vec<&str> = actions.iter().map(|c| c.name).collect();
    drop_actions(tx, key, &names).await?;
    // No name is claimed, so the registration need not wait for those of other nodes.
    if actions.is_empty() {
        return Ok(Ok(()));
    }
    // Two providers that claim the same name would both see it unowned; the lock makes one of them wait.
    lock_names(tx, key.scope).await?;
    let existing: Vec<ExistingAction> = sqlx::query_as(
        "SELECT action_id, name, claims_name, handler_node_id, provider FROM actions
          WHERE workspace_id = $1 AND name = ANY ($2) AND (claims_name OR handler_node_id = $3)",
    )
    .bind(key.scope.workspace_id())
    .bind(&names)
    .bind(key.node)
    .fetch_all(&mut *tx)
    .await
    .map_err(StoreError::from_sqlx("reading actions with advertised names"))?;
    // There is an id for each capability, so `zip` leaves out none of its actions.
    for (capability, fresh_id) in actions.into_iter().zip(fresh_ids) {
        match decide_action(capability, key, &existing) {
            ActionChange::None => {}
            ActionChange::SetClaim { action, claims } => set_claim(tx, key.scope, action, claims).await?,
            ActionChange::Insert { claims } => insert_action(tx, key, (*fresh_id, capability.name, claims), at).await?,
            ActionChange::Conflict => return Ok(Err(capability.name.to_owned())),
        }
    }
    Ok(Ok(()))
}

fn decide_action(
    capability: &AdvertisedCapability<'_>,
    key: ProviderKey<'_>,
    existing: &[ExistingAction],
) -> ActionChange {
    let is_default = *key.provider == ProviderName::default_provider();
    let same_name = || existing.iter().filter(|action| action.name == capability.name);
    let here = same_name().find(|action| action.handler_node_id.as_ref() == Some(key.node));
    let own = here.filter(|action| action.provider.as_ref() == Some(key.provider));
    if let (Some(here), None) = (here, own) {
        // A definition over REST takes precedence over a capability, and the default provider yields to every other.
        let yields = here.provider.is_none() || is_default && !capability.global;
        return if yields { ActionChange::None } else { ActionChange::Conflict };
    }
    let claimed =
        same_name().any(|action| action.claims_name && own.is_none_or(|own| own.action_id != action.action_id));
    if claimed && capability.global {
        return ActionChange::Conflict;
    }
    let claims = (capability.global || is_default) && !claimed;
    match own {
        Some(own) if own.claims_name == claims => ActionChange::None,
        Some(own) => ActionChange::SetClaim { action: own.action_id, claims },
        None => ActionChange::Insert { claims },
    }
}

async fn write_capabilities(
    tx: &mut DatabaseSession,
    key: ProviderKey<'_>,
    list: &[AdvertisedCapability<'_>],
) -> StoreResult<()> {
    sqlx::query(
        "WITH removed AS (
             DELETE FROM node_capabilities
              WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND name <> ALL ($4)
         )
         INSERT INTO node_capabilities (workspace_id, node_id, provider, name, kind, queue, tells_caller)
         SELECT $1, $2, $3, c.* FROM unnest($4::text[], $5::text[], $6::bool[], $7::bool[]) AS c
         ON CONFLICT (workspace_id, name, node_id, provider) DO UPDATE
            SET kind = excluded.kind, queue = excluded.queue, tells_caller = excluded.tells_caller",
    )
    .bind(key.scope.workspace_id())
    .bind(key.node)
    .bind(key.provider)
    .bind(list.iter().map(|c| c.name).collect::<Vec<_>>())
    .bind(list.iter().map(|c| c.kind).collect::<Vec<_>>())
    .bind(list.iter().map(|c| c.queue).collect::<Vec<_>>())
    .bind(list.iter().map(|c| c.tells_caller).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("replacing the capabilities of a provider"))?;
    Ok(())
}

/// Removes the capabilities of a provider and their actions.
pub(crate) async fn remove_capabilities(tx: &mut DatabaseSession, key: ProviderKey<'_>) -> StoreResult<()> {
    sqlx::query("DELETE FROM node_capabilities WHERE workspace_id = $1 AND node_id = $2 AND provider = $3")
        .bind(key.scope.workspace_id())
        .bind(key.node)
        .bind(key.provider)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx("removing the capabilities of a provider"))?;
    drop_actions(tx, key, &[]).await
}

/// Serialises claims and releases of action names in a workspace until the commit.
pub(crate) async fn lock_names(tx: &mut DatabaseSession, scope: WorkspaceScope) -> StoreResult<()> {
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('actions', $1))")
        .bind(scope.workspace_id())
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("locking the names of actions"))?;
    Ok(())
}

// An action that was defined over REST has no provider, so it stays.
async fn drop_actions(tx: &mut DatabaseSession, key: ProviderKey<'_>, kept: &[&str]) -> StoreResult<()> {
    sqlx::query(
        "DELETE FROM actions
          WHERE workspace_id = $1 AND handler_node_id = $2 AND provider = $3 AND name <> ALL ($4)",
    )
    .bind(key.scope.workspace_id())
    .bind(key.node)
    .bind(key.provider)
    .bind(kept)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("dropping the actions of a provider"))?;
    Ok(())
}

async fn set_claim(tx: &mut DatabaseSession, scope: WorkspaceScope, action: ActionId, claims: bool) -> StoreResult<()> {
    sqlx::query("UPDATE actions SET claims_name = $3 WHERE workspace_id = $1 AND action_id = $2")
        .bind(scope.workspace_id())
        .bind(action)
        .bind(claims)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("claiming the name of an action"))?;
    Ok(())
}

async fn insert_action(
    tx: &mut DatabaseSession,
    key: ProviderKey<'_>,
    (id, name, claims): (ActionId, &str, bool),
    at: DateTime<Utc>,
) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO actions (workspace_id, action_id, name, claims_name, handler_node_id, provider, created_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(key.scope.workspace_id())
    .bind(id)
    .bind(name)
    .bind(claims)
    .bind(key.node)
    .bind(key.provider)
    .bind(at)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("creating the action of a capability"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_capability_of_a_name_wins() {
        let stored = json!([
            { "name": "build", "kind": "action", "global": true, "metadata": { "relay.action-caller": "v1" } },
            { "name": "build", "kind": "capacity" },
            { "name": "relay:delivery-cursor-v1", "kind": "capacity" },
            { "name": "spawn:claude", "kind": "capacity", "queue": true },
            { "kind": "action" },
        ]);
        let parsed = parse_capabilities(&stored, false);
        let seen: Vec<_> = parsed.iter().map(|c| (c.name, c.kind, c.global, c.queue, c.tells_caller)).collect();
        assert_eq!(
            seen,
            [
                ("build", CapabilityKind::Action, true, false, true),
                ("spawn:claude", CapabilityKind::Capacity, false, true, false)
            ]
        );
        assert!(parse_capabilities(&stored, true).iter().all(|c| c.queue), "the default provider queues");
    }
}
