//! Dead letters are put out of sight.

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{
    Filter,
    redrive::{lines, shown},
};
use crate::output::{Bar, Output};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    filter: Filter,
}

pub(crate) async fn run(arguments: Arguments, out: Output) -> Result<()> {
    let filter = arguments.filter;
    let desk = filter.desk().await?;
    let query = filter.query(&desk)?;
    let count = desk.count_all(&query).await.context("count the letters")?;
    if filter.dry_run {
        return out.one(&shown(&count), |_| lines(&count));
    }
    let of = count.total.unsigned_abs();
    let mut bar = Bar::new("letters", out);
    let purged = desk.purge(&query, |purged| bar.show(purged, of)).await.context("purge the letters")?;
    bar.end();
    out.one(&json!({ "purged": purged }), |_| format!("{purged} letters were put out of sight"))
}
