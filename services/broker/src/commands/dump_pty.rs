//! `dump-pty`: prints an agent's screen through the API of a running broker.

use std::io::Write as _;

use anyhow::{Context as _, Result};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::broker_client;
use crate::cli;

pub(crate) async fn dump_pty(arguments: cli::DumpPty) -> Result<()> {
    let name = utf8_percent_encode(&arguments.name, NON_ALPHANUMERIC);
    let format = utf8_percent_encode(&arguments.format, NON_ALPHANUMERIC);
    let path = format!("/api/spawned/{name}/snapshot?format={format}");
    let body = broker_client::get(arguments.broker, &path).await?;
    let screen = body["screen"].as_str().context("the answer has no screen")?;
    let bytes = match body["format"].as_str() {
        Some("ansi") => BASE64_STANDARD.decode(screen).context("decode the screen")?,
        _ => screen.as_bytes().to_vec(),
    };
    std::io::stdout().write_all(&bytes).context("print the screen")
}
