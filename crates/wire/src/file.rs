//! Bodies of the file routes.

use relay_domain::FileId;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    field::{Id, Timestamp},
    words,
};

/// `POST /v1/files/upload`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UploadBody {
    /// What it is called.
    #[schema(min_length = 1, max_length = 255, example = "report.pdf")]
    pub filename: String,
    /// What it is.
    #[schema(max_length = 128, example = "application/pdf")]
    pub content_type: String,
    /// How many bytes it has.
    #[serde(alias = "size")]
    #[schema(minimum = 1, example = 1024)]
    pub size_bytes: i64,
}

/// The query of `GET /v1/files`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct FilesQuery {
    /// Only files of this agent, by id.
    #[serde(default)]
    pub uploaded_by: Option<String>,
    /// How many at most: 50 unless given, never more than 100.
    #[serde(default)]
    pub limit: Option<String>,
}

/// The query of the address that an upload or download goes to.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct TransferQuery {
    /// What the address allows.
    #[serde(default)]
    pub token: String,
}

/// A file, in every answer with one. Some clients read one name of a field, some the other.
#[derive(Debug, Serialize, ToSchema)]
pub struct File {
    /// The file.
    #[schema(value_type = Id)]
    pub id: FileId,
    /// The same.
    #[schema(value_type = Id)]
    pub file_id: FileId,
    /// What it is called.
    pub filename: String,
    /// What it is.
    pub content_type: String,
    /// How many bytes it has.
    pub size_bytes: i64,
    /// The same.
    pub size: i64,
    /// pending, complete or deleted.
    #[schema(value_type = words::FileStatus)]
    pub status: &'static str,
    /// Its owner's name.
    pub uploaded_by: String,
    /// Where its bytes can be had for an hour; null while there are none.
    pub download_url: Option<String>,
    /// The same; empty while there are none.
    pub url: String,
    /// When it was declared.
    pub created_at: Timestamp,
}

/// Answer to `POST /v1/files/upload`.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeclaredFile {
    /// The file.
    #[serde(flatten)]
    pub file: File,
    /// Where its bytes are to be put.
    pub upload_url: String,
    /// Until when.
    pub expires_at: Timestamp,
}

/// Answer to an upload.
#[derive(Debug, Serialize, ToSchema)]
pub struct Uploaded {
    /// The file.
    #[schema(value_type = Id)]
    pub file_id: FileId,
    /// How many bytes came.
    pub size_bytes: i64,
}
