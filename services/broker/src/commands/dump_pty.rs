//! `dump-pty`: prints an agent's screen through the API of a running broker.

use std::{io::Write as _, path::Path};

use anyhow::{Context as _, Result, bail};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use crate::{cli, state::ConnectionFile};

const DEFAULT_STATE: &str = ".agentworkforce/relay";

pub(crate) async fn dump_pty(arguments: cli::DumpPty) -> Result<()> {
    let (url, key) = match (arguments.broker_url, arguments.api_key) {
        (Some(url), Some(key)) => (url, key),
        (url, key) => {
            let folder = arguments.state_dir.as_deref().unwrap_or(Path::new(DEFAULT_STATE));
            let found = ConnectionFile::read(folder)?;
            (url.unwrap_or(found.url), key.unwrap_or(found.api_key))
        }
    };
    // No other code in this program has chosen the crypto provider yet.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let name = utf8_percent_encode(&arguments.name, NON_ALPHANUMERIC);
    let format = utf8_percent_encode(&arguments.format, NON_ALPHANUMERIC);
    let url = format!("{}/api/spawned/{name}/snapshot?format={format}", url.trim_end_matches('/'));
    let client = reqwest::Client::builder().no_proxy().build().context("set up the HTTP client")?;
    let answer = client.get(&url).header("x-api-key", key).send().await;
    let answer = answer.with_context(|| format!("ask {url}"))?;
    let status = answer.status();
    let body: Value = answer.json().await.context("read the answer")?;
    let Some(screen) = body["screen"].as_str() else {
        bail!("{}", body["message"].as_str().unwrap_or(status.as_str()));
    };
    let bytes = match body["format"].as_str() {
        Some("ansi") => BASE64_STANDARD.decode(screen).context("decode the screen")?,
        _ => screen.as_bytes().to_vec(),
    };
    std::io::stdout().write_all(&bytes).context("print the screen")
}
