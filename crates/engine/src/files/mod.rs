//! Files: declared, uploaded through an address that we mint, completed, attached, downloaded, deleted.
//!
//! The rows are in Postgres, the bytes in the storage of files (`relay-blobs`). Objects are named by ids
//! only; a file's name is shown and never used for anything else.

mod config;
mod token;
mod transfer;

use std::{collections::HashSet, sync::Arc, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use relay_blobs::{BlobKey, Blobs};
use relay_domain::{
    AgentId, FileId, WorkspaceScope,
    file::{MAX_ATTACHMENTS, TypeRules, check_content_type, check_filename},
    plan::Ceiling,
};
use relay_store::files::{Completion, Deletion, NewFile};
pub use relay_store::files::{FileRow, FileStatus};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

pub use config::FilesConfig;
pub use token::{Grant, Purpose};
pub use transfer::Outgoing;

use crate::{
    Engine, EngineError, EngineResult,
    auth::{AgentCaller, Credential},
};

/// An address is good for this long (contract: rest.md 3.11).
const ADDRESS_GOOD_FOR: TimeDelta = TimeDelta::hours(1);
/// Uploads and downloads under way in one process. Each needs up to 15 MiB while it is being uploaded.
const TRANSFERS: usize = 64;
/// Default and most of a list.
pub const PAGE: (i64, i64) = (50, 100);
/// A file that was not completed is given up this long after its address has expired: an upload that began
/// in the last moment may still be under way.
pub(crate) const GIVEN_UP_AFTER: Duration = Duration::from_secs(2 * 3600);

/// What the engine knows about files besides their rows.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) blobs: Blobs,
    types: TypeRules,
    max_bytes: i64,
    transfers: Arc<Semaphore>,
}

impl Files {
    pub(crate) fn new(config: &FilesConfig) -> Self {
        Self {
            blobs: Blobs::new(config.blobs()),
            types: config.types(),
            max_bytes: config.file_max_bytes,
            transfers: Arc::new(Semaphore::new(TRANSFERS)),
        }
    }
}

/// A file to be declared.
#[derive(Debug)]
pub struct DeclareFile {
    /// What its owner calls it.
    pub filename: String,
    /// What its owner says it is.
    pub content_type: String,
    /// How large it is.
    pub size_bytes: i64,
}

/// A file with the token for the next thing to do with it.
#[derive(Debug, Clone)]
pub struct FileWithToken {
    /// The file.
    pub row: FileRow,
    /// What the address of its upload or download carries; none for a file that has neither.
    pub token: Option<String>,
    /// Until when.
    pub expires_at: DateTime<Utc>,
}

impl Engine {
    /// Declares a file. Its token is for the upload.
    ///
    /// # Errors
    /// When a field is out of bounds, or the type or size is not taken here.
    pub async fn declare_file(&self, caller: &AgentCaller, request: &DeclareFile) -> EngineResult<FileWithToken> {
        check_filename(&request.filename)?;
        check_content_type(&request.content_type)?;
        let files = &self.inner.files;
        if !files.types.take(&request.content_type) {
            return Err(EngineError::InvalidRequest(format!(
                "Files of type {} are not taken here",
                request.content_type
            )));
        }
        if request.size_bytes <= 0 {
            return Err(EngineError::InvalidRequest("size_bytes must be positive".to_owned()));
        }
        if request.size_bytes > files.max_bytes {
            return Err(EngineError::FileTooLarge { max_bytes: files.max_bytes });
        }
        let (file_id, at) = (FileId::new(self.next_id()), self.now());
        let expires_at = at + ADDRESS_GOOD_FOR;
        let new = NewFile {
            file_id,
            filename: &request.filename,
            content_type: &request.content_type,
            size_bytes: request.size_bytes,
            agent_id: caller.agent_id,
            at,
            expires_at,
        };
        let ceiling = self.ceiling(caller.scope, Ceiling::FileBytes).await?;
        if !self.store().create_file(caller.scope, &new, ceiling).await? {
            return Err(EngineError::PlanLimitExceeded(Ceiling::FileBytes));
        }
        let row = FileRow {
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
        let token = token::mint(&self.inner.secrets, Purpose::Upload, caller.scope, file_id, expires_at)?;
        Ok(FileWithToken { row, token: Some(token), expires_at })
    }

    /// Makes a file complete; again is fine. Its token is for the download.
    ///
    /// # Errors
    /// When there is no such file, it is another agent's, or its bytes are not there.
    pub async fn complete_file(&self, caller: &AgentCaller, file: FileId) -> EngineResult<FileWithToken> {
        match self.store().complete_file(caller.scope, file, caller.agent_id, self.now()).await? {
            Completion::Completed(row, recorded) => {
                self.announce(recorded);
                self.with_download(caller.scope, row)
            }
            Completion::AlreadyComplete(row) => self.with_download(caller.scope, row),
            Completion::NotUploaded => Err(EngineError::UploadIncomplete),
            Completion::NotFound => Err(EngineError::FileNotFound),
        }
    }

    /// A file, deleted ones included as long as they are known. Its token is for the download.
    ///
    /// # Errors
    /// When there is none of that id, or the caller may not see it.
    pub async fn file(&self, caller: &Credential, file: FileId) -> EngineResult<FileWithToken> {
        let row = self.store().file(caller.scope(), file).await?.ok_or(EngineError::FileNotFound)?;
        let view = caller.view();
        if !view.sees_author(Some(row.agent_id)) || !view.sees_created_at(row.created_at) {
            return Err(EngineError::FileNotFound);
        }
        self.with_download(caller.scope(), row)
    }

    /// Complete files that the caller may see, newest first; with `owner` only that agent's. Their tokens are for the download.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn files(
        &self,
        caller: &Credential,
        owner: Option<AgentId>,
        limit: i64,
    ) -> EngineResult<Vec<FileWithToken>> {
        let scope = caller.scope();
        let rows = self.store().files(scope, owner, &caller.view().filters, limit).await?;
        rows.into_iter().map(|row| self.with_download(scope, row)).collect()
    }

    /// Deletes a file. It cannot be downloaded any more when this returns; its bytes go soon.
    ///
    /// # Errors
    /// When there is no such file, or it is another agent's.
    pub async fn delete_file(&self, caller: &AgentCaller, file: FileId) -> EngineResult<()> {
        match self.store().delete_file(caller.scope, file, caller.agent_id, self.now()).await? {
            Deletion::Deleted => Ok(()),
            Deletion::NotOwner => Err(EngineError::NotFileOwner),
            Deletion::NotFound => Err(EngineError::FileNotFound),
        }
    }

    /// What a token in an address allows.
    ///
    /// # Errors
    /// When it is none of ours, for something else, or expired.
    pub fn file_grant(&self, token: &str, purpose: Purpose) -> EngineResult<Grant> {
        token::read(&self.inner.secrets, token, purpose, self.now()).ok_or(EngineError::InvalidFileToken)
    }

    /// What a message shows of the files attached to it, in their order: the one read that attachments cost.
    ///
    /// # Errors
    /// When they are too many, one is named twice, or one is not a complete file of this workspace.
    pub(crate) async fn attachments(&self, scope: WorkspaceScope, ids: &[String]) -> EngineResult<Value> {
        if ids.is_empty() {
            return Ok(json!([]));
        }
        let invalid = || EngineError::InvalidAttachments;
        let files: Vec<FileId> = ids.iter().map(|id| id.parse()).collect::<Result<_, _>>().map_err(|_| invalid())?;
        if files.len() > MAX_ATTACHMENTS || files.iter().collect::<HashSet<_>>().len() < files.len() {
            return Err(invalid());
        }
        let rows = self.store().complete_files(scope, &files).await?;
        let shown = |id: &FileId| {
            let row = rows.iter().find(|row| row.file_id == *id)?;
            Some(json!({
                "file_id": row.file_id,
                "filename": row.filename,
                "content_type": row.content_type,
                "size_bytes": row.size_bytes,
            }))
        };
        files.iter().map(shown).collect::<Option<Vec<_>>>().map(Value::Array).ok_or_else(invalid)
    }

    fn with_download(&self, scope: WorkspaceScope, row: FileRow) -> EngineResult<FileWithToken> {
        let expires_at = self.now() + ADDRESS_GOOD_FOR;
        let token = match row.status {
            FileStatus::Complete => {
                Some(token::mint(&self.inner.secrets, Purpose::Download, scope, row.file_id, expires_at)?)
            }
            FileStatus::Pending | FileStatus::Deleted => None,
        };
        Ok(FileWithToken { row, token, expires_at })
    }
}

/// The object of one upload of a file.
const fn key(scope: WorkspaceScope, file: FileId, object: i64) -> BlobKey {
    BlobKey { workspace: scope.workspace_id().get(), file: file.get(), object }
}
