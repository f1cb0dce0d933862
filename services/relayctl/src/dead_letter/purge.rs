//! `relayctl dead-letter purge`: removes dead letters from listings and redrives.

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{
    Filter,
    redrive::{count_to_json, format_count},
};
use crate::output::{Output, ProgressBar};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    filter: Filter,
}

pub(crate) async fn run(arguments: Arguments, out: Output) -> Result<()> {
    let filter = arguments.filter;
    let admin = filter.admin().await?;
    let query = filter.query(&admin)?;
    let count = admin.count_all(&query).await.context("count the dead letters")?;
    if filter.dry_run {
        return out.print_value(&count_to_json(&count), |_| format_count(&count));
    }
    let of = count.total.unsigned_abs();
    let mut bar = ProgressBar::new("dead letters", out);
    let purged = admin.purge(&query, |purged| bar.update(purged, of)).await.context("purge the dead letters")?;
    bar.finish();
    out.print_value(&json!({ "purged": purged }), |_| format!("{purged} dead letters were purged"))
}
