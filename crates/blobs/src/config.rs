//! Where the bytes of files are kept.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use object_store::{ClientOptions, ObjectStore, RetryConfig, aws::AmazonS3Builder};

use crate::{BlobError, BlobResult};

/// An attempt at the bucket takes this long at most.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Attempts at one request, the first not counted, and the time they have together.
const RETRIES: usize = 3;
const RETRY_WITHIN: Duration = Duration::from_secs(20);

/// Where the bytes of files are kept.
#[derive(Debug, Clone)]
pub enum BlobConfig {
    /// In a directory. For a single host: every gateway and worker must see the same one.
    Directory(PathBuf),
    /// In a bucket. For any number of hosts.
    S3(S3Config),
}

/// A bucket that speaks the protocol of S3.
#[derive(Clone, Default)]
pub struct S3Config {
    /// The bucket.
    pub bucket: String,
    /// Where it is, unless at the provider's own address: `https://host[:port]`, or `http://…` for one
    /// inside the same network.
    pub endpoint: Option<String>,
    /// Its region.
    pub region: Option<String>,
    /// The key's id. Without one, what the environment of the process offers (`AWS_…`, instance roles).
    pub access_key_id: Option<String>,
    /// The key.
    pub secret_access_key: Option<String>,
}

/// Never prints the key.
impl fmt::Debug for S3Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Config")
            .field("bucket", &self.bucket)
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

pub(crate) fn bucket(config: &S3Config) -> BlobResult<Arc<dyn ObjectStore>> {
    // Another part of the process may have chosen a provider already: then that one is used.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let plain = config.endpoint.as_deref().is_some_and(|endpoint| endpoint.starts_with("http://"));
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(&config.bucket)
        .with_client_options(ClientOptions::new().with_allow_http(plain).with_timeout(ANSWER_WITHIN))
        .with_retry(RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_WITHIN, ..RetryConfig::default() });
    if let Some(endpoint) = &config.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &config.region {
        builder = builder.with_region(region);
    }
    if let (Some(id), Some(secret)) = (&config.access_key_id, &config.secret_access_key) {
        builder = builder.with_access_key_id(id).with_secret_access_key(secret);
    }
    Ok(Arc::new(builder.build().map_err(BlobError::of("opening"))?))
}
