//! Life cycle of workspaces: creation, reading, changes, deletion.

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    ChannelId, WorkspaceId, WorkspaceScope,
    access::{
        rights::RightChanges,
        token::{TOKEN_BYTES, TokenHash, TokenKind},
    },
    encoded_length,
    names::{
        MAX_NOTE_BYTES, MAX_SYSTEM_PROMPT_BYTES, MAX_WORKSPACE_NAME_BYTES, check_json_length, check_length, check_name,
    },
    workspaces::{
        Workspace,
        metadata::{self, find_credential},
        plan::{Plan, Quota},
    },
};
use relay_store::{CreationKey, NewWorkspace, WorkspaceCreation};
use relay_wire::field::ToValue as _;
use serde::Serialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::Workspaces;
use crate::{
    EngineError, EngineResult,
    access::{idempotency::ClientKey, secrets::Secrets},
    error::{Conflict, Fault, InvalidInput, Limit, Missing},
};

/// Bounds of the lifetime of a workspace with an expiry.
const LIFETIME_SECONDS: std::ops::RangeInclusive<i64> = 60..=2_592_000;
/// Bounds of the TTL of a workspace's deliveries. The schema has the same.
const DELIVERY_TTL_SECONDS: std::ops::RangeInclusive<i32> = 60..=518_400;
/// Bounds of the time for which a former agent token is accepted. The schema has the same.
const AGENT_TOKEN_GRACE_SECONDS: std::ops::RangeInclusive<i32> = 0..=86_400;
/// Minimum length of an anonymous creator's key: it gives access to the new workspace's key.
const MIN_ANONYMOUS_KEY_BYTES: usize = 32;

/// Domain separation: signatures for other uses of the key never are workspace keys.
const KEY_CONTEXT: &[u8] = b"relay workspace key\0";

#[derive(Debug)]
pub struct CreateWorkspace {
    pub name: String,
    pub metadata: Option<Map<String, Value>>,
    pub expires_in_seconds: Option<i64>,
    pub provenance: Option<Value>,
}

/// Workspace that was created or found.
#[derive(Debug)]
pub struct CreatedWorkspace {
    pub workspace_id: WorkspaceId,
    pub api_key: String,
    pub created_at: DateTime<Utc>,
    pub expires_at: Option<DateTime<Utc>>,
    /// True if this request created it.
    pub is_new: bool,
}

/// Changes of a workspace. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct WorkspaceChange {
    pub name: Option<String>,
    /// System prompt of its agents; `Some(None)` clears it.
    pub system_prompt: Option<Option<String>>,
    /// Merged key by key; a null deletes its key.
    pub metadata: Option<Map<String, Value>>,
    /// TTL of later deliveries.
    pub delivery_ttl_seconds: Option<i32>,
    /// Time for which the token before an agent's last rotation is accepted.
    pub agent_token_grace_seconds: Option<i32>,
    /// Merged into the policy; `Some(None)` removes it.
    pub policy: Option<Option<RightChanges>>,
}

impl Workspaces {
    /// Creates a workspace with its `general` channel. `owner` is a presented workspace key with its workspace; if that
    /// workspace has the requested name, it is returned instead. Otherwise the new workspace has the owner's plan and
    /// counts against the owner's quota.
    ///
    /// # Errors
    /// When the owner has too many child workspaces, a field is out of bounds, or the idempotency key is too weak or
    /// was used for another request.
    pub async fn create(
        &self,
        request: &CreateWorkspace,
        owner: Option<(WorkspaceScope, &str)>,
        key: Option<&ClientKey>,
    ) -> EngineResult<CreatedWorkspace> {
        check_new(request)?;
        let given = request.metadata.as_ref().map(|given| metadata::merge(Map::new(), given));
        let metadata = Value::Object(given.unwrap_or_default());
        if owner.is_none() && key.is_some_and(|key| key.text().len() < MIN_ANONYMOUS_KEY_BYTES) {
            return Err(EngineError::Invalid(InvalidInput::CreationKeyTooWeak));
        }
        let own = match owner {
            Some((scope, _)) => Some(self.by_scope(scope).await?),
            None => None,
        };
        if let (Some(own), Some((_, token))) = (&own, owner)
            && own.name == request.name
        {
            return Ok(CreatedWorkspace {
                workspace_id: own.workspace_id,
                api_key: token.to_owned(),
                created_at: own.created_at,
                expires_at: own.expires_at,
                is_new: false,
            });
        }
        let (plan, created_by) = self.plan_of_new(own.as_ref()).await?;
        let created_at = self.core.now();
        let workspace_id = WorkspaceId::new(self.core.next_id());
        let expires_at = request.expires_in_seconds.map(|seconds| created_at + TimeDelta::seconds(seconds));
        // With an idempotency key, the workspace key is derived from it and a stored random salt: a replay can return
        // it although no token is ever stored.
        let fresh = self.tokens.fresh(TokenKind::Workspace)?;
        let key_id = self.secrets.current_key_id();
        let api_key = match key {
            // The key that signs is always known.
            Some(key) => {
                derive_key(&self.secrets, key_id, &fresh.text, key).ok_or(EngineError::Internal(Fault::NoRandomness))?
            }
            None => fresh.text.clone(),
        };
        let new = NewWorkspace {
            workspace_id,
            name: &request.name,
            plan,
            created_by,
            metadata: &metadata,
            provenance: request.provenance.as_ref(),
            created_at,
            expires_at,
            key: TokenHash::from_token(&api_key),
            general: ChannelId::new(self.core.next_id()),
        };
        let owner_id = owner.map(|(scope, _)| scope.workspace_id());
        let response = StoredCreation { workspace_id, key_salt: &fresh.text, key_id }.to_value();
        let stored = key.map(|key| key.stored("-", "workspace.create", "-"));
        let kept = stored.map(|key| (CreationKey { owner: owner_id, key }, &response));
        match (self.core.store.create_workspace(&new, kept).await?, key) {
            (WorkspaceCreation::Replayed { fingerprint, response }, Some(key)) => {
                // The same key with another request is a mistake of the client, and must not return a workspace that it
                // did not ask for.
                if stored.is_some_and(|stored| fingerprint != stored.fingerprint) {
                    return Err(EngineError::Conflict(Conflict::CreationKeyReused));
                }
                self.replay_creation(&response, key).await
            }
            (WorkspaceCreation::TooMany, _) => Err(EngineError::LimitExceeded(Limit::Quota(Quota::ChildWorkspaces))),
            // Only a request with a key can be a replay.
            _ => Ok(CreatedWorkspace { workspace_id, api_key, created_at, expires_at, is_new: true }),
        }
    }

    /// Returns the workspace.
    ///
    /// # Errors
    /// When it has been deleted or has expired.
    pub async fn by_scope(&self, scope: WorkspaceScope) -> EngineResult<Workspace> {
        self.core.store.workspace(scope).await?.ok_or(EngineError::NotFound(Missing::Workspace))
    }

    /// Finds the oldest workspace of a name, without authentication.
    pub async fn by_name(&self, name: &str) -> EngineResult<Workspace> {
        self.core.store.workspace_by_name(name).await?.ok_or(EngineError::NotFound(Missing::Workspace))
    }

    /// Changes a workspace.
    pub async fn update(&self, scope: WorkspaceScope, change: &WorkspaceChange) -> EngineResult<Workspace> {
        if let Some(name) = &change.name {
            check_name("name", name, MAX_WORKSPACE_NAME_BYTES)?;
        }
        if let Some(Some(prompt)) = &change.system_prompt {
            check_length("system_prompt", prompt, MAX_SYSTEM_PROMPT_BYTES)?;
        }
        check_seconds("delivery_ttl_seconds", change.delivery_ttl_seconds, &DELIVERY_TTL_SECONDS)?;
        check_seconds("agent_token_grace_seconds", change.agent_token_grace_seconds, &AGENT_TOKEN_GRACE_SECONDS)?;
        change.metadata.as_ref().map_or(Ok(()), refuse_credentials)?;
        let row_change = relay_store::WorkspaceChange {
            name: change.name.as_deref(),
            system_prompt: change.system_prompt.as_ref().map(Option::as_deref),
            metadata: change.metadata.as_ref(),
            delivery_ttl_seconds: change.delivery_ttl_seconds,
            agent_token_grace_seconds: change.agent_token_grace_seconds,
            policy: change.policy.as_ref().map(Option::as_ref),
        };
        match self.core.store.update_workspace(scope, &row_change, self.core.now()).await? {
            Some((row, recorded)) => {
                self.core.announce(recorded);
                // Cached tokens carry the rights of their agents.
                if change.policy.is_some() {
                    self.tokens.rights_changed(scope);
                }
                Ok(row)
            }
            None => {
                self.by_scope(scope).await?;
                // It exists, so the merged metadata exceeds its bounds.
                Err(metadata_too_large())
            }
        }
    }

    /// Deletes a workspace. Its tokens are revoked when this returns.
    pub async fn delete(&self, scope: WorkspaceScope) -> EngineResult<()> {
        self.core.store.delete_workspace(scope, self.core.now()).await?;
        // After the commit: before it, another request could read a token into the cache again.
        self.tokens.revoke_workspace(scope);
        self.observers.refresh_after_change().await;
        Ok(())
    }

    /// Returns the plan of a new workspace and, if it is created with the key of another one, the workspace that
    /// answers for it with its quota.
    async fn plan_of_new(
        &self,
        owner: Option<&Workspace>,
    ) -> EngineResult<(Plan, Option<(WorkspaceScope, Option<i64>)>)> {
        let Some(owner) = owner else { return Ok((self.default_plan, None)) };
        let scope = WorkspaceScope::from_engine_row(owner.workspace_id);
        // A child's children count against the same workspace, so that generations do not multiply the quota.
        let answering = owner.created_by.map_or(scope, WorkspaceScope::from_engine_row);
        let most = match self.quotas.limit(answering, Quota::ChildWorkspaces).await {
            // It has ended before its child. The child's own limit then bounds their number.
            Err(EngineError::NotFound(Missing::Workspace)) => self.quotas.limit(scope, Quota::ChildWorkspaces).await?,
            limit => limit?,
        };
        Ok((owner.plan, Some((answering, most))))
    }

    async fn replay_creation(&self, response: &Value, key: &ClientKey) -> EngineResult<CreatedWorkspace> {
        let ended = || EngineError::Conflict(Conflict::CreationKeyTerminalized);
        let id = response["workspace_id"].as_str().and_then(|id| id.parse().ok()).ok_or_else(ended)?;
        let stored = |field: &str| response[field].as_str();
        let api_key = match (stored("key_salt").zip(stored("key_id")), stored("salt")) {
            // `None` if the key was removed: the caller then learns that the key cannot be returned any more.
            (Some((salt, key_id)), _) => derive_key(&self.secrets, key_id, salt, key),
            (None, Some(salt)) => Some(derive_former_key(salt, key)),
            (None, None) => None,
        };
        let api_key = api_key.ok_or_else(ended)?;
        let row = self.core.store.workspace(WorkspaceScope::from_engine_row(id)).await?.ok_or_else(ended)?;
        Ok(CreatedWorkspace {
            workspace_id: row.workspace_id,
            api_key,
            created_at: row.created_at,
            expires_at: row.expires_at,
            is_new: false,
        })
    }
}

fn check_seconds(
    field: &'static str,
    seconds: Option<i32>,
    allowed: &std::ops::RangeInclusive<i32>,
) -> EngineResult<()> {
    if seconds.is_some_and(|seconds| !allowed.contains(&seconds)) {
        let (least, most) = (allowed.start(), allowed.end());
        return Err(EngineError::invalid_request(format!("{field} must be {least} to {most}")));
    }
    Ok(())
}

fn metadata_too_large() -> EngineError {
    let (keys, bytes) = (metadata::MAX_KEYS, metadata::MAX_BYTES);
    EngineError::invalid_request(format!("metadata must have at most {keys} keys and {bytes} bytes of JSON"))
}

fn refuse_credentials(metadata: &Map<String, Value>) -> EngineResult<()> {
    find_credential(metadata).map_or(Ok(()), |key| {
        Err(EngineError::invalid_request(format!(
            "metadata must not contain credentials, and the value of {key:?} looks like one: store it elsewhere"
        )))
    })
}

fn check_new(request: &CreateWorkspace) -> EngineResult<()> {
    check_name("name", &request.name, MAX_WORKSPACE_NAME_BYTES)?;
    if let Some(metadata) = &request.metadata {
        refuse_credentials(metadata)?;
        if !metadata::is_within_bounds(&metadata::merge(Map::new(), metadata)) {
            return Err(metadata_too_large());
        }
    }
    if let Some(provenance) = &request.provenance {
        check_json_length("provenance", encoded_length(provenance))?;
        if let Some(id) = provenance["origin_id"].as_str() {
            check_name("provenance.origin_id", id, MAX_NOTE_BYTES)?;
        }
    }
    if request.expires_in_seconds.is_some_and(|seconds| !LIFETIME_SECONDS.contains(&seconds)) {
        return Err(EngineError::invalid_request("expires_in_seconds must be between 60 and 2592000"));
    }
    Ok(())
}

/// Stored part of a creation with an idempotency key, from which a repetition derives the same workspace key. Processes
/// of the version before look for `salt`, and answer that the workspace no longer exists instead of deriving another
/// key.
#[derive(Serialize)]
struct StoredCreation<'a> {
    workspace_id: WorkspaceId,
    /// Random bytes, in hex.
    key_salt: &'a str,
    /// Id of the installation's key that the workspace key was derived with.
    key_id: &'a str,
}

/// Derives a workspace key from a stored salt, the creator's idempotency key and a key of the installation, so that a
/// reader of the database who guesses the idempotency key cannot derive it too. `None` if the installation's key has
/// been removed.
fn derive_key(secrets: &Secrets, key_id: &str, salt: &str, key: &ClientKey) -> Option<String> {
    let parts = [KEY_CONTEXT, salt.as_bytes(), b"\0", key.text().as_bytes()].concat();
    let tag = secrets.sign(key_id, &parts)?;
    let (bytes, _) = tag.split_first_chunk::<TOKEN_BYTES>()?;
    Some(TokenKind::Workspace.format_token(*bytes))
}

/// Derives the workspace key of a creation by the version before, which used no key of the installation. Such rows are
/// kept for 24 hours, so the next version needs this no more.
fn derive_former_key(salt: &str, key: &ClientKey) -> String {
    let digest = Sha256::new()
        .chain_update(KEY_CONTEXT)
        .chain_update(salt)
        .chain_update(b"\0")
        .chain_update(key.text())
        .finalize();
    let mut bytes = [0; TOKEN_BYTES];
    bytes.copy_from_slice(&digest[..TOKEN_BYTES]);
    TokenKind::Workspace.format_token(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_key_follows_from_salt_client_key_and_installation_key() {
        let client = |text| ClientKey::read(text, b"{}", &[]).unwrap();
        let secrets = Secrets::for_test_keys(&["a", "b"]);
        let derived = |key_id, salt, text| derive_key(&secrets, key_id, salt, &client(text));
        let key = derived("a", "s1", "create-acme").unwrap();
        assert_eq!(TokenKind::from_prefix(&key), Some(TokenKind::Workspace));
        assert_eq!(derived("a", "s1", "create-acme"), Some(key.clone()), "a repetition gets the same key");
        for other in [("b", "s1", "create-acme"), ("a", "s2", "create-acme"), ("a", "s1", "create-beta")] {
            assert_ne!(derived(other.0, other.1, other.2), Some(key.clone()), "{other:?}");
        }
        assert_eq!(derived("c", "s1", "create-acme"), None, "its key has been removed");
        assert_ne!(derive_former_key("s1", &client("create-acme")), key);
    }
}
