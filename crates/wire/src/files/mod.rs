//! Request and response bodies of the file routes. Main types: [`UploadBody`], [`DeclaredFile`], [`File`].

use relay_domain::FileId;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    field::{Id, Timestamp},
    words,
};

/// Body of `POST /v1/files/upload`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UploadBody {
    /// Name of the file.
    #[schema(min_length = 1, max_length = 255, example = "report.pdf")]
    pub filename: String,
    /// Media type of the file.
    #[schema(max_length = 128, example = "application/pdf")]
    pub content_type: String,
    /// Size in bytes.
    #[serde(alias = "size")]
    #[schema(minimum = 1, example = 1024)]
    pub size_bytes: i64,
}

/// Query of `GET /v1/files`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct FilesQuery {
    /// Only files uploaded by the agent with this id.
    #[serde(default)]
    pub uploaded_by: Option<String>,
    /// Page size: 50 by default, at most 100.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Query of the URLs for uploads and downloads.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct TransferQuery {
    /// Signed permission of the URL.
    #[serde(default)]
    pub token: String,
}

/// File, in every response with one. Fields with two names serve different clients.
#[derive(Debug, Serialize, ToSchema)]
pub struct File {
    /// Id of the file.
    #[schema(value_type = Id)]
    pub id: FileId,
    /// Id of the file, as in `id`.
    #[schema(value_type = Id)]
    pub file_id: FileId,
    /// Name of the file.
    pub filename: String,
    /// Media type of the file.
    pub content_type: String,
    /// Size in bytes.
    pub size_bytes: i64,
    /// Size in bytes, as in `size_bytes`.
    pub size: i64,
    /// State of the file: pending, complete or deleted.
    #[schema(value_type = words::FileStatus)]
    pub status: &'static str,
    /// Name of the uploader.
    pub uploaded_by: String,
    /// Download URL, valid for an hour; null before the upload.
    pub download_url: Option<String>,
    /// Download URL as in `download_url`; empty before the upload.
    pub url: String,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// Response of `POST /v1/files/upload`.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeclaredFile {
    /// The file itself.
    #[serde(flatten)]
    pub file: File,
    /// URL for the upload.
    pub upload_url: String,
    /// Time at which the upload URL expires.
    pub expires_at: Timestamp,
}

/// Response of an upload.
#[derive(Debug, Serialize, ToSchema)]
pub struct Uploaded {
    /// Id of the file.
    #[schema(value_type = Id)]
    pub file_id: FileId,
    /// Size in bytes.
    pub size_bytes: i64,
}
