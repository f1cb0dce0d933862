//! Files: declared, uploaded to a signed URL, completed, attached, downloaded, deleted. Main type: [`Files`].
//!
//! The rows are in Postgres, the bytes in `relay-blobs`. Objects are named by ids only; a file's name is shown and
//! never used for anything else.

mod cleanup;
mod config;
mod permits;
mod token;
mod transfer;

use std::{collections::HashSet, sync::Arc, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use relay_blobs::{BlobKey, Blobs};
use relay_domain::{
    AgentId, FileId, FileObjectId, WorkspaceScope,
    files::{ContentTypeRules, File, FileStatus, MAX_ATTACHMENTS, check_content_type, check_filename},
    workspaces::plan::Quota,
};
use relay_store::files::metadata::{Completion, Deletion, NewFile};
use relay_wire::messages::Attachment;
use serde_json::Value;

pub use config::FilesConfig;
use permits::TransferPermits;
pub use token::{Grant, Purpose};
pub use transfer::FileDownload;

use crate::{
    EngineError, EngineResult,
    access::{
        callers::{AgentCaller, Credential},
        limits::QuotaCache,
        secrets::Secrets,
    },
    core::Core,
    error::{Conflict, Denial, InvalidInput, Limit, Missing, TooLarge},
    workspaces::suspensions::Suspensions,
};

/// Lifetime of a file URL (docs/protocol/rest.md, "Files").
const TOKEN_LIFETIME: TimeDelta = TimeDelta::hours(1);
/// Default and maximum page size.
pub const PAGE: (i64, i64) = (50, 100);
/// Time from the expiry of an upload URL until the pending file is given up: an upload that began in the last moment
/// may still be in progress.
pub(crate) const ABANDONED_AFTER: Duration = Duration::from_secs(2 * 3600);

/// The bytes of files, and the rules for them.
#[derive(Debug)]
pub(crate) struct FileStorage {
    blobs: Blobs,
    types: ContentTypeRules,
    max_bytes: i64,
    transfers: TransferPermits,
}

impl FileStorage {
    pub(crate) fn new(config: &FilesConfig) -> Self {
        Self {
            blobs: Blobs::new(config.blobs()),
            types: config.type_rules(),
            max_bytes: config.file_max_bytes,
            transfers: TransferPermits::default(),
        }
    }
}

/// Files of all workspaces.
#[derive(Clone)]
pub struct Files {
    pub(crate) core: Core,
    pub(crate) suspensions: Arc<Suspensions>,
    pub(crate) quotas: QuotaCache,
    pub(crate) secrets: Arc<Secrets>,
    pub(crate) storage: Arc<FileStorage>,
}

#[derive(Debug)]
pub struct DeclareFile {
    pub filename: String,
    pub content_type: String,
    pub size_bytes: i64,
}

/// File with the token for its next transfer.
#[derive(Debug, Clone)]
pub struct FileWithToken {
    pub row: File,
    /// Token of the upload or download URL; none for a file that has neither.
    pub token: Option<String>,
    pub expires_at: DateTime<Utc>,
}

impl Files {
    /// Declares a file. Its token is for the upload.
    ///
    /// # Errors
    /// When a field is out of bounds, or the type or size is not taken here.
    pub async fn declare(&self, caller: &AgentCaller, request: &DeclareFile) -> EngineResult<FileWithToken> {
        check_filename(&request.filename)?;
        check_content_type(&request.content_type)?;
        let storage = &self.storage;
        if !storage.types.allows(&request.content_type) {
            return Err(EngineError::invalid_request(format!(
                "Files of type {} are not taken here",
                request.content_type
            )));
        }
        if request.size_bytes <= 0 {
            return Err(EngineError::invalid_request("size_bytes must be positive"));
        }
        if request.size_bytes > storage.max_bytes {
            return Err(EngineError::TooLarge(TooLarge::File { max_bytes: storage.max_bytes }));
        }
        let (file_id, at) = (FileId::new(self.core.next_id()), self.core.now());
        let expires_at = at + TOKEN_LIFETIME;
        let new = NewFile {
            file_id,
            filename: &request.filename,
            content_type: &request.content_type,
            size_bytes: request.size_bytes,
            agent_id: caller.agent_id,
            at,
            expires_at,
        };
        let quota = self.quotas.limit(caller.scope, Quota::FileBytes).await?;
        if !self.core.store.create_file(caller.scope, &new, quota).await? {
            return Err(EngineError::LimitExceeded(Limit::Quota(Quota::FileBytes)));
        }
        let row = File {
            file_id,
            filename: request.filename.clone(),
            content_type: request.content_type.clone(),
            size_bytes: request.size_bytes,
            agent_id: caller.agent_id,
            uploaded_by: caller.name.to_string(),
            status: FileStatus::Pending,
            object_id: None,
            created_at: at,
            expires_at,
        };
        let token = token::create_token(&self.secrets, Purpose::Upload, caller.scope, file_id, expires_at)?;
        Ok(FileWithToken { row, token: Some(token), expires_at })
    }

    /// Completes a file; idempotent. Its token is for the download.
    ///
    /// # Errors
    /// When there is no such file, it is another agent's, or its bytes are missing.
    pub async fn complete(&self, caller: &AgentCaller, file: FileId) -> EngineResult<FileWithToken> {
        match self.core.store.complete_file(caller.scope, file, caller.agent_id, self.core.now()).await? {
            Completion::Completed(row, recorded) => {
                self.core.announce(recorded);
                self.with_download_token(caller.scope, row)
            }
            Completion::AlreadyComplete(row) => self.with_download_token(caller.scope, row),
            Completion::NotUploaded => Err(EngineError::Conflict(Conflict::UploadIncomplete)),
            Completion::NotFound => Err(EngineError::NotFound(Missing::File)),
        }
    }

    /// Finds a file, including deleted ones as long as they are kept. Its token is for the download.
    ///
    /// # Errors
    /// When the id is unknown, or the caller may not see it.
    pub async fn get(&self, caller: &Credential, file: FileId) -> EngineResult<FileWithToken> {
        let row = self.core.store.file(caller.scope(), file).await?.ok_or(EngineError::NotFound(Missing::File))?;
        let view = caller.view();
        let visible = view.sees_author(Some(row.agent_id))
            && view.sees_created_at(row.created_at)
            // Last, because only a token with filters of places needs the read.
            && (view.sees_every_message_place()
                || self.core.store.is_attached_to_visible(caller.scope(), file, view).await?);
        if !visible {
            return Err(EngineError::NotFound(Missing::File));
        }
        self.with_download_token(caller.scope(), row)
    }

    /// Lists complete files that the caller may see, newest first; with `owner` only that agent's. Their tokens are for
    /// the download.
    pub async fn list(
        &self,
        caller: &Credential,
        owner: Option<AgentId>,
        limit: i64,
    ) -> EngineResult<Vec<FileWithToken>> {
        let scope = caller.scope();
        let rows = self.core.store.files(scope, owner, caller.view(), limit).await?;
        rows.into_iter().map(|row| self.with_download_token(scope, row)).collect()
    }

    /// Deletes a file. Downloads are refused when this returns; the bytes are removed soon.
    ///
    /// # Errors
    /// When there is no such file, or it is another agent's.
    pub async fn delete(&self, caller: &AgentCaller, file: FileId) -> EngineResult<()> {
        match self.core.store.delete_file(caller.scope, file, caller.agent_id, self.core.now()).await? {
            Deletion::Deleted => Ok(()),
            Deletion::NotOwner => Err(EngineError::Forbidden(Denial::NotFileOwner)),
            Deletion::NotFound => Err(EngineError::NotFound(Missing::File)),
        }
    }

    /// Verifies the token of a file URL.
    ///
    /// # Errors
    /// When it is forged, for another purpose, or expired, or its workspace is suspended.
    pub fn grant(&self, token: &str, purpose: Purpose) -> EngineResult<Grant> {
        let grant = token::verify_token(&self.secrets, token, purpose, self.core.now())
            .ok_or(EngineError::Forbidden(Denial::FileToken))?;
        self.suspensions.check_not_suspended(grant.scope)?;
        Ok(grant)
    }

    /// Renders the files attached to a message, in their order, with a single read.
    ///
    /// # Errors
    /// When they are too many, one is named twice, or one is not a complete file of this workspace.
    pub(crate) async fn attachments(&self, scope: WorkspaceScope, ids: &[String]) -> EngineResult<Value> {
        if ids.is_empty() {
            return Ok(Value::Array(Vec::new()));
        }
        let invalid = || EngineError::Invalid(InvalidInput::Attachments);
        let files: Vec<FileId> = ids.iter().map(|id| id.parse()).collect::<Result<_, _>>().map_err(|_| invalid())?;
        if files.len() > MAX_ATTACHMENTS || files.iter().collect::<HashSet<_>>().len() < files.len() {
            return Err(invalid());
        }
        // Attachments are copied into the message, so a file that is deleted later stays listed there.
        let rows = self.core.store.completed_files(scope, &files).await?;
        let shown = |id: &FileId| {
            let row = rows.iter().find(|row| row.file_id == *id)?;
            let attachment = Attachment {
                file_id: row.file_id.to_string(),
                filename: row.filename.clone(),
                content_type: row.content_type.clone(),
                size_bytes: row.size_bytes,
            };
            // Strings and a number, which always encode.
            serde_json::to_value(attachment).ok()
        };
        files.iter().map(shown).collect::<Option<Vec<_>>>().map(Value::Array).ok_or_else(invalid)
    }

    fn with_download_token(&self, scope: WorkspaceScope, row: File) -> EngineResult<FileWithToken> {
        let expires_at = self.core.now() + TOKEN_LIFETIME;
        // Each response has a new token, so that URLs expire soon and need no revocation.
        let token = match row.status {
            FileStatus::Complete => {
                Some(token::create_token(&self.secrets, Purpose::Download, scope, row.file_id, expires_at)?)
            }
            FileStatus::Pending | FileStatus::Deleted => None,
        };
        Ok(FileWithToken { row, token, expires_at })
    }
}

const fn blob_key(scope: WorkspaceScope, file: FileId, object: FileObjectId) -> BlobKey {
    BlobKey { workspace: scope.workspace_id().get(), file: file.get(), object: object.get() }
}
