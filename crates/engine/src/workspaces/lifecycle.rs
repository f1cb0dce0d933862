//! Life cycle of workspaces: creation, reading, changes, deletion.

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    ChannelId, WorkspaceId, WorkspaceScope,
    access::{
        rights::RightChanges,
        token::{TokenHash, TokenKind},
    },
    names::{
        MAX_METADATA_BYTES, MAX_SYSTEM_PROMPT_BYTES, MAX_WORKSPACE_NAME_BYTES, check_json_length, check_length,
        check_name,
    },
    workspaces::plan::{Plan, Quota},
};
pub use relay_store::WorkspaceRow;
use relay_store::{CreationKey, NewWorkspace, WorkspaceCreation};
use relay_wire::field::ToValue as _;
use serde::Serialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::Workspaces;
use crate::{
    EngineError, EngineResult,
    access::idempotency::ClientKey,
    agents::lifecycle::{encoded_length, too_long},
    error::{Conflict, InvalidInput, Limit, Missing},
};

/// Bounds of the lifetime of a workspace with an expiry.
const LIFETIME_SECONDS: std::ops::RangeInclusive<i64> = 60..=2_592_000;
/// Bounds of the TTL of a workspace's deliveries. The schema has the same.
const DELIVERY_TTL_SECONDS: std::ops::RangeInclusive<i32> = 60..=518_400;
/// Minimum length of an anonymous creator's key: it gives access to the new workspace's key.
const MIN_ANONYMOUS_KEY_BYTES: usize = 32;

#[derive(Debug)]
pub struct CreateWorkspace {
    pub name: String,
    pub metadata: Option<Value>,
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
    pub metadata: Option<Value>,
    /// TTL of later deliveries.
    pub delivery_ttl_seconds: Option<i32>,
    /// Merged into the policy; `Some(None)` removes it.
    pub policy: Option<Option<RightChanges>>,
}

impl Workspaces {
    /// Creates a workspace with its `general` channel. `owner` is a presented workspace key with its workspace; if that
    /// workspace has the requested name, it is returned instead. Otherwise the new workspace has the owner's plan and
    /// counts against the owner's quota.
    ///
    /// # Errors
    /// When the owner has too many child workspaces, a field is out of bounds, or the idempotency key is too weak or was used for another request.
    pub async fn create(
        &self,
        request: &CreateWorkspace,
        owner: Option<(WorkspaceScope, &str)>,
        key: Option<&ClientKey>,
    ) -> EngineResult<CreatedWorkspace> {
        let metadata = request.metadata.clone().unwrap_or_else(|| Map::new().into());
        check_new(request, &metadata)?;
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
        let salt = self.tokens.fresh(TokenKind::Workspace)?;
        let api_key = key.map_or(salt.text.clone(), |key| derive_key(&salt.text, key));
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
        let response = StoredCreation { workspace_id, salt: &salt.text }.to_value();
        let stored = key.map(|key| key.stored("-", "workspace.create", "-"));
        let kept = stored.map(|key| (CreationKey { owner: owner_id, key }, &response));
        match (self.core.store.create_workspace(&new, kept).await?, key) {
            (WorkspaceCreation::Replayed { fingerprint, response }, Some(key)) => {
                if stored.is_some_and(|stored| fingerprint != stored.fingerprint) {
                    return Err(EngineError::Conflict(Conflict::CreationKeyReused));
                }
                self.replay_creation(&response, key).await
            }
            (WorkspaceCreation::TooMany, _) => Err(EngineError::LimitExceeded(Limit::Quota(Quota::ChildWorkspaces))),
            _ => Ok(CreatedWorkspace { workspace_id, api_key, created_at, expires_at, is_new: true }),
        }
    }

    /// Returns the workspace.
    ///
    /// # Errors
    /// When it has been deleted or has expired.
    pub async fn by_scope(&self, scope: WorkspaceScope) -> EngineResult<WorkspaceRow> {
        self.core.store.workspace(scope).await?.ok_or(EngineError::NotFound(Missing::Workspace))
    }

    /// Finds the oldest workspace of a name, without authentication.
    pub async fn by_name(&self, name: &str) -> EngineResult<WorkspaceRow> {
        self.core.store.workspace_by_name(name).await?.ok_or(EngineError::NotFound(Missing::Workspace))
    }

    /// Changes a workspace.
    pub async fn update(&self, scope: WorkspaceScope, change: &WorkspaceChange) -> EngineResult<WorkspaceRow> {
        if let Some(name) = &change.name {
            check_name("name", name, MAX_WORKSPACE_NAME_BYTES)?;
        }
        if let Some(Some(prompt)) = &change.system_prompt {
            check_length("system_prompt", prompt, MAX_SYSTEM_PROMPT_BYTES)?;
        }
        let ttl = change.delivery_ttl_seconds;
        if ttl.is_some_and(|seconds| !DELIVERY_TTL_SECONDS.contains(&seconds)) {
            let (least, most) = (DELIVERY_TTL_SECONDS.start(), DELIVERY_TTL_SECONDS.end());
            return Err(EngineError::invalid_request(format!("delivery_ttl_seconds must be {least} to {most}")));
        }
        let row_change = relay_store::WorkspaceChange {
            name: change.name.as_deref(),
            system_prompt: change.system_prompt.as_ref().map(Option::as_deref),
            metadata: change.metadata.as_ref(),
            metadata_limit: i32::try_from(MAX_METADATA_BYTES).unwrap_or(i32::MAX),
            delivery_ttl_seconds: ttl,
            policy: change.policy.as_ref().map(Option::as_ref),
        };
        match self.core.store.update_workspace(scope, &row_change).await? {
            Some(row) => {
                if change.policy.is_some() {
                    self.tokens.rights_changed(scope);
                }
                Ok(row)
            }
            None => {
                self.by_scope(scope).await?;
                // It exists, so the merged metadata is too large.
                Err(too_long("metadata"))
            }
        }
    }

    /// Deletes a workspace. Its tokens are revoked when this returns.
    pub async fn delete(&self, scope: WorkspaceScope) -> EngineResult<()> {
        for hash in self.core.store.delete_workspace(scope, self.core.now()).await? {
            self.tokens.revoke(hash);
        }
        self.observers.refresh_after_change().await;
        Ok(())
    }

    /// Returns the plan of a new workspace and, if it is created with the key of another one, the workspace that answers
    /// for it with its quota.
    async fn plan_of_new(
        &self,
        owner: Option<&WorkspaceRow>,
    ) -> EngineResult<(Plan, Option<(WorkspaceScope, Option<i64>)>)> {
        let Some(owner) = owner else { return Ok((self.default_plan, None)) };
        let scope = WorkspaceScope::from_engine_row(owner.workspace_id);
        // A child's children count against the same workspace, so that generations do not multiply the quota.
        let answering = owner.created_by.map_or(scope, WorkspaceScope::from_engine_row);
        let most = self.quotas.limit(scope, Quota::ChildWorkspaces).await?;
        Ok((owner.plan, Some((answering, most))))
    }

    async fn replay_creation(&self, response: &Value, key: &ClientKey) -> EngineResult<CreatedWorkspace> {
        let id = response["workspace_id"].as_str().and_then(|id| id.parse().ok());
        let salt = response["salt"].as_str();
        let (Some(id), Some(salt)) = (id, salt) else {
            return Err(EngineError::Conflict(Conflict::CreationKeyTerminalized));
        };
        let row = self
            .core
            .store
            .workspace(WorkspaceScope::from_engine_row(id))
            .await?
            .ok_or(EngineError::Conflict(Conflict::CreationKeyTerminalized))?;
        Ok(CreatedWorkspace {
            workspace_id: row.workspace_id,
            api_key: derive_key(salt, key),
            created_at: row.created_at,
            expires_at: row.expires_at,
            is_new: false,
        })
    }
}

fn check_new(request: &CreateWorkspace, metadata: &Value) -> EngineResult<()> {
    check_name("name", &request.name, MAX_WORKSPACE_NAME_BYTES)?;
    check_json_length("metadata", encoded_length(metadata))?;
    if let Some(provenance) = &request.provenance {
        check_json_length("provenance", encoded_length(provenance))?;
    }
    if request.expires_in_seconds.is_some_and(|seconds| !LIFETIME_SECONDS.contains(&seconds)) {
        return Err(EngineError::invalid_request("expires_in_seconds must be between 60 and 2592000"));
    }
    Ok(())
}

/// What a repeated request with the same key is answered from.
#[derive(Serialize)]
struct StoredCreation<'a> {
    workspace_id: WorkspaceId,
    salt: &'a str,
}

/// Derives a workspace key from a stored salt and the creator's idempotency key.
fn derive_key(salt: &str, key: &ClientKey) -> String {
    let digest = Sha256::new()
        .chain_update(b"relay workspace key\0")
        .chain_update(salt)
        .chain_update(b"\0")
        .chain_update(key.text())
        .finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    TokenKind::Workspace.format_token(bytes)
}
