//! `relayctl migrate`: migrates the database schema.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::{connection::Database, output::Output};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Connection of the user that owns the schema.
    #[command(flatten)]
    database: Database,
    /// Time to wait for Postgres, and then for locks held by others (another migration, a pg_dump), in seconds.
    #[arg(long, default_value_t = 30)]
    wait_seconds: u64,
}

pub(crate) async fn run(arguments: Arguments, out: Output) -> Result<()> {
    relay_engine::migrate(arguments.database.url(), Duration::from_secs(arguments.wait_seconds))
        .await
        .context("migrate the database")?;
    out.print_value(&json!({ "up_to_date": true }), |_| "the schema is up to date".to_owned())
}
