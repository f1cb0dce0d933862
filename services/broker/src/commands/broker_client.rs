//! Calls of the commands to the API of a running broker.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::{cli::BrokerLocation, state::ConnectionFile};

const DEFAULT_STATE: &str = ".agentworkforce/relay";

/// Gets a JSON document from the broker.
///
/// # Errors
/// If no broker is found, or it refuses.
pub(super) async fn get(location: BrokerLocation, path: &str) -> Result<Value> {
    let (url, key) = match (location.broker_url, location.api_key) {
        (Some(url), Some(key)) => (url, key),
        (url, key) => {
            let folder = location.state_dir.as_deref().unwrap_or(Path::new(DEFAULT_STATE));
            let found = ConnectionFile::read(folder)?;
            (url.unwrap_or(found.url), key.unwrap_or(found.api_key))
        }
    };
    // No other code in this program has chosen the crypto provider yet.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let url = format!("{}{path}", url.trim_end_matches('/'));
    // The key of the broker is not for a proxy of the environment.
    let client = reqwest::Client::builder().no_proxy().build().context("set up the HTTP client")?;
    let answer = client.get(&url).header("x-api-key", key).send().await;
    let answer = answer.with_context(|| format!("ask {url}"))?;
    let status = answer.status();
    let body: Value = answer.json().await.with_context(|| format!("read the answer ({status})"))?;
    if !status.is_success() {
        bail!("{}", body["message"].as_str().unwrap_or(status.as_str()));
    }
    Ok(body)
}
