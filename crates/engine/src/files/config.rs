//! File settings. Gateways and workers take the same flags, as they must agree on them.

use std::path::PathBuf;

use relay_blobs::{BlobConfig, S3Config};
use relay_domain::files::ContentTypeRules;

#[derive(Clone, clap::Args)]
#[group(skip)]
pub struct FilesConfig {
    /// The directory that files are kept in, if not in a bucket. Every gateway and worker must see the same
    /// one: for several hosts, use a bucket.
    #[arg(long, env = "RELAY_FILES_DIR", default_value = "relay-files")]
    pub files_dir: PathBuf,

    /// The bucket (S3 or compatible) that files are kept in. Several hosts need one.
    #[arg(long, env = "RELAY_FILES_S3_BUCKET")]
    pub files_s3_bucket: Option<String>,

    /// Where the bucket is, unless at AWS: `https://host[:port]`, or `http://…` inside a private network.
    #[arg(long, env = "RELAY_FILES_S3_ENDPOINT")]
    pub files_s3_endpoint: Option<String>,

    /// The bucket's region.
    #[arg(long, env = "RELAY_FILES_S3_REGION")]
    pub files_s3_region: Option<String>,

    /// The id of the bucket's access key. Without one, what the environment offers (`AWS_…`, roles).
    #[arg(long, env = "RELAY_FILES_S3_ACCESS_KEY_ID")]
    pub files_s3_access_key_id: Option<String>,

    /// The bucket's access key.
    #[arg(long, env = "RELAY_FILES_S3_SECRET_ACCESS_KEY", hide_env_values = true)]
    pub files_s3_secret_access_key: Option<String>,

    /// The largest file, in bytes.
    #[arg(long, env = "RELAY_FILE_MAX_BYTES", default_value_t = 100 << 20,
          value_parser = clap::value_parser!(i64).range(1..=5 << 30))]
    pub file_max_bytes: i64,

    /// Content types that are taken (`image/*,text/plain`); all when empty.
    #[arg(long, env = "RELAY_FILE_TYPES_ALLOWED", value_delimiter = ',')]
    pub file_types_allowed: Vec<String>,

    /// Content types that are not taken, even if allowed.
    #[arg(long, env = "RELAY_FILE_TYPES_DENIED", value_delimiter = ',')]
    pub file_types_denied: Vec<String>,
}

impl FilesConfig {
    /// Reports a bucket key of which only the id or only the secret is set.
    #[must_use]
    pub fn check_key_pair(id: Option<&str>, secret: Option<&str>) -> Option<String> {
        (id.is_some() != secret.is_some())
            .then(|| "RELAY_FILES_S3_ACCESS_KEY_ID and RELAY_FILES_S3_SECRET_ACCESS_KEY go together".to_owned())
    }

    pub(crate) fn blobs(&self) -> BlobConfig {
        match &self.files_s3_bucket {
            None => BlobConfig::Directory(self.files_dir.clone()),
            Some(bucket) => BlobConfig::S3(S3Config {
                bucket: bucket.clone(),
                endpoint: self.files_s3_endpoint.clone(),
                region: self.files_s3_region.clone(),
                access_key_id: self.files_s3_access_key_id.clone(),
                secret_access_key: self.files_s3_secret_access_key.clone(),
            }),
        }
    }

    pub(crate) fn type_rules(&self) -> ContentTypeRules {
        ContentTypeRules { allowed: self.file_types_allowed.clone(), denied: self.file_types_denied.clone() }
    }
}

/// Never prints the bucket's key.
impl std::fmt::Debug for FilesConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FilesConfig").field("blobs", &self.blobs()).finish_non_exhaustive()
    }
}
