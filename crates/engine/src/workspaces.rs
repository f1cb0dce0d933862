//! Workspaces: creation, reading, changing, deleting.

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    ChannelId, WorkspaceId, WorkspaceScope,
    names::{
        MAX_METADATA_BYTES, MAX_SYSTEM_PROMPT_BYTES, MAX_WORKSPACE_NAME_BYTES, check_json_length, check_length,
        check_name,
    },
    token::{TokenHash, TokenKind},
};
pub use relay_store::WorkspaceRow;
use relay_store::{Creation, CreationKey, NewWorkspace};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    Engine, EngineError, EngineResult,
    agents::{encoded_length, too_long},
    idempotency::ClientKey,
};

/// Shortest and longest life of a workspace that ends by itself, in seconds.
const LIFETIME_SECONDS: std::ops::RangeInclusive<i64> = 60..=2_592_000;
/// How long deliveries of a workspace may live, in seconds. The schema says the same.
const DELIVERY_TTL_SECONDS: std::ops::RangeInclusive<i32> = 60..=518_400;
/// What an anonymous creator's key must have at least: it stands in for the new workspace's key.
const ANONYMOUS_KEY_LENGTH: usize = 32;
/// Where the keys of anonymous creators are kept: no workspace has this id.
const ANONYMOUS: i64 = 0;

/// A request for a workspace.
#[derive(Debug)]
pub struct CreateWorkspace {
    /// Its name.
    pub name: String,
    /// What clients keep there.
    pub metadata: Option<Value>,
    /// When it ends by itself.
    pub expires_in_seconds: Option<i64>,
    /// Who makes it.
    pub provenance: Option<Value>,
}

/// A workspace that was created, or existed.
#[derive(Debug)]
pub struct CreatedWorkspace {
    /// Its id.
    pub workspace_id: WorkspaceId,
    /// Its key.
    pub api_key: String,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it ends.
    pub expires_at: Option<DateTime<Utc>>,
    /// Whether this request made it.
    pub made_now: bool,
}

/// What to change of a workspace. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct WorkspaceChange {
    /// Its name.
    pub name: Option<String>,
    /// What agents are told first; `Some(None)` clears it.
    pub system_prompt: Option<Option<String>>,
    /// Merged key by key; a null deletes its key.
    pub metadata: Option<Value>,
    /// How long deliveries live from now on, in seconds.
    pub delivery_ttl_seconds: Option<i32>,
}

impl Engine {
    /// Creates a workspace with its `general` channel. `owner` is a presented workspace key with its
    /// workspace: if that has the wanted name already, it is the answer.
    ///
    /// # Errors
    /// When a field is out of bounds, or the idempotency key is too weak or was used otherwise.
    pub async fn create_workspace(
        &self,
        request: &CreateWorkspace,
        owner: Option<(WorkspaceScope, &str)>,
        key: Option<&ClientKey>,
    ) -> EngineResult<CreatedWorkspace> {
        check_name("name", &request.name, MAX_WORKSPACE_NAME_BYTES)?;
        let metadata = request.metadata.clone().unwrap_or_else(|| json!({}));
        check_json_length("metadata", encoded_length(&metadata))?;
        if let Some(provenance) = &request.provenance {
            check_json_length("provenance", encoded_length(provenance))?;
        }
        if request.expires_in_seconds.is_some_and(|seconds| !LIFETIME_SECONDS.contains(&seconds)) {
            return Err(EngineError::InvalidRequest("expires_in_seconds must be between 60 and 2592000".into()));
        }
        if owner.is_none() && key.is_some_and(|key| key.text().len() < ANONYMOUS_KEY_LENGTH) {
            return Err(EngineError::CreationKeyTooWeak);
        }
        if let Some((scope, token)) = owner
            && let Some(own) = self.store().workspace(scope).await?
            && own.name == request.name
        {
            return Ok(CreatedWorkspace {
                workspace_id: own.workspace_id,
                api_key: token.to_owned(),
                created_at: own.created_at,
                expires_at: own.expires_at,
                made_now: false,
            });
        }
        let created_at = self.now();
        let workspace_id = WorkspaceId::new(self.next_id());
        let expires_at = request.expires_in_seconds.map(|seconds| created_at + TimeDelta::seconds(seconds));
        // Under an idempotency key the new key follows from it and a stored random salt: a replay can
        // answer the same again although no token is ever stored.
        let salt = self.fresh_token(TokenKind::Workspace)?;
        let api_key = key.map_or(salt.text.clone(), |key| derived_key(&salt.text, key));
        let new = NewWorkspace {
            workspace_id,
            name: &request.name,
            metadata: &metadata,
            provenance: request.provenance.as_ref(),
            created_at,
            expires_at,
            key: TokenHash::of(&api_key),
            general: ChannelId::new(self.next_id()),
        };
        let kept_under = owner.map_or(ANONYMOUS, |(scope, _)| scope.workspace_id().get());
        let response = json!({ "workspace_id": workspace_id, "salt": salt.text });
        let kept = key.map(|key| {
            let key_hash = key.hash("-", "workspace.create", "-");
            (CreationKey { kept_under, key_hash, fingerprint: key.fingerprint() }, &response)
        });
        match (self.store().create_workspace(&new, kept).await?, key) {
            (Creation::Replayed { fingerprint, response }, Some(key)) => {
                if fingerprint != key.fingerprint() {
                    return Err(EngineError::CreationKeyConflict);
                }
                self.replayed_creation(&response, key).await
            }
            _ => Ok(CreatedWorkspace { workspace_id, api_key, created_at, expires_at, made_now: true }),
        }
    }

    /// The workspace.
    ///
    /// # Errors
    /// When it is gone.
    pub async fn workspace(&self, scope: WorkspaceScope) -> EngineResult<WorkspaceRow> {
        self.store().workspace(scope).await?.ok_or(EngineError::WorkspaceNotFound)
    }

    /// The oldest workspace of that name. Anybody may ask.
    ///
    /// # Errors
    /// When there is none.
    pub async fn workspace_by_name(&self, name: &str) -> EngineResult<WorkspaceRow> {
        self.store().workspace_by_name(name).await?.ok_or(EngineError::WorkspaceNotFound)
    }

    /// Changes a workspace.
    ///
    /// # Errors
    /// When a field is out of bounds.
    pub async fn update_workspace(
        &self,
        scope: WorkspaceScope,
        change: &WorkspaceChange,
    ) -> EngineResult<WorkspaceRow> {
        if let Some(name) = &change.name {
            check_name("name", name, MAX_WORKSPACE_NAME_BYTES)?;
        }
        if let Some(Some(prompt)) = &change.system_prompt {
            check_length("system_prompt", prompt, MAX_SYSTEM_PROMPT_BYTES)?;
        }
        let ttl = change.delivery_ttl_seconds;
        if ttl.is_some_and(|seconds| !DELIVERY_TTL_SECONDS.contains(&seconds)) {
            let (least, most) = (DELIVERY_TTL_SECONDS.start(), DELIVERY_TTL_SECONDS.end());
            return Err(EngineError::InvalidRequest(format!("delivery_ttl_seconds must be {least} to {most}")));
        }
        let limit = i32::try_from(MAX_METADATA_BYTES).unwrap_or(i32::MAX);
        let prompt = change.system_prompt.as_ref().map(Option::as_deref);
        let changed = self
            .store()
            .update_workspace(scope, change.name.as_deref(), prompt, change.metadata.as_ref(), limit, ttl)
            .await?;
        match changed {
            Some(row) => Ok(row),
            None => {
                self.workspace(scope).await?;
                // It is there, so what was refused is the size of the merged metadata.
                Err(too_long("metadata"))
            }
        }
    }

    /// Deletes a workspace. Its tokens are dead when this returns.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn delete_workspace(&self, scope: WorkspaceScope) -> EngineResult<()> {
        for hash in self.store().delete_workspace(scope, self.now()).await? {
            self.revoke_token(hash);
        }
        self.observers_are_changed().await;
        Ok(())
    }

    async fn replayed_creation(&self, response: &Value, key: &ClientKey) -> EngineResult<CreatedWorkspace> {
        let id = response["workspace_id"].as_str().and_then(|id| id.parse().ok());
        let salt = response["salt"].as_str();
        let (Some(id), Some(salt)) = (id, salt) else { return Err(EngineError::CreationKeyTerminalized) };
        let row = self
            .store()
            .workspace(WorkspaceScope::from_engine_row(id))
            .await?
            .ok_or(EngineError::CreationKeyTerminalized)?;
        Ok(CreatedWorkspace {
            workspace_id: row.workspace_id,
            api_key: derived_key(salt, key),
            created_at: row.created_at,
            expires_at: row.expires_at,
            made_now: false,
        })
    }
}

/// The workspace key that follows from a stored salt and the creator's idempotency key.
fn derived_key(salt: &str, key: &ClientKey) -> String {
    let digest = Sha256::new()
        .chain_update(b"relay workspace key\0")
        .chain_update(salt)
        .chain_update(b"\0")
        .chain_update(key.text())
        .finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    TokenKind::Workspace.token(bytes)
}
