//! Configuration of file storage.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use object_store::{ClientOptions, ObjectStore, RetryConfig, aws::AmazonS3Builder};

use crate::{BlobError, BlobResult};

/// Timeout of one attempt at the bucket.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of retries of one request, and the time limit of all retries together.
const RETRIES: usize = 3;
const RETRY_TIMEOUT: Duration = Duration::from_secs(20);

/// Location of file contents.
#[derive(Debug, Clone)]
pub enum BlobConfig {
    /// A directory. For a single host: every gateway and worker must see the same one.
    Directory(PathBuf),
    /// A bucket. For any number of hosts.
    S3(S3Config),
}

/// Bucket with an S3-compatible API.
#[derive(Clone, Default)]
pub struct S3Config {
    /// Name of the bucket.
    pub bucket: String,
    /// Endpoint, unless it is that of the provider: `https://host[:port]`, or `http://…` within a private network.
    pub endpoint: Option<String>,
    /// Region of the bucket.
    pub region: Option<String>,
    /// Id of the access key. `None` uses the credentials of the environment (`AWS_…`, instance roles).
    pub access_key_id: Option<String>,
    /// Secret of the access key.
    pub secret_access_key: Option<String>,
}

/// Hides the secret.
impl fmt::Debug for S3Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Config")
            .field("bucket", &self.bucket)
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

pub(crate) fn open_bucket(config: &S3Config) -> BlobResult<Arc<dyn ObjectStore>> {
    // Fails if the process has installed a provider already, which is then used.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let plain = config.endpoint.as_deref().is_some_and(|endpoint| endpoint.starts_with("http://"));
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(&config.bucket)
        .with_client_options(ClientOptions::new().with_allow_http(plain).with_timeout(ANSWER_TIMEOUT))
        .with_retry(RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() });
    // After the environment, so that configured values override it.
    if let Some(endpoint) = &config.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &config.region {
        builder = builder.with_region(region);
    }
    if let (Some(id), Some(secret)) = (&config.access_key_id, &config.secret_access_key) {
        builder = builder.with_access_key_id(id).with_secret_access_key(secret);
    }
    Ok(Arc::new(builder.build().map_err(BlobError::from_storage("opening"))?))
}
