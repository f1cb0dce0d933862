//! `ack`: writes an ack file for the calling agent.

use anyhow::{Context as _, Result, ensure};
use relay_verification::ack_file::is_plain_file_name;
use serde_json::json;

use crate::{cli, state::write_private_file};

pub(crate) fn ack(arguments: &cli::Ack) -> Result<()> {
    let cli::Ack { delivery_id, event_id, ack_dir } = arguments;
    ensure!(is_plain_file_name(delivery_id), "{delivery_id:?} is not a delivery id");
    let content = json!({ "delivery_id": delivery_id, "event_id": event_id, "status": "received" });
    let path = ack_dir.join(delivery_id);
    // Renamed into its place, so that the broker never reads a part of it.
    write_private_file(&path, content.to_string().as_bytes()).with_context(|| format!("write {}", path.display()))
}
