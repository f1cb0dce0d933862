//! Postgres and NATS for `dev`: the ones that the environment names, else our own.

use std::path::Path;

use anyhow::Result;
use relay_stack::servers::{Nats, Postgres, check_nats, check_postgres};

const DATABASE: &str = "relay";

pub(super) struct Backends {
    /// `None` when DATABASE_URL names one.
    pub(super) postgres: Option<Postgres>,
    /// `None` when NATS_URL names one.
    pub(super) nats: Option<Nats>,
    pub(super) database_url: String,
    pub(super) nats_url: String,
}

impl Backends {
    pub(super) async fn start(state_dir: &Path) -> Result<Self> {
        let ((postgres, database_url), (nats, nats_url)) = tokio::try_join!(database(state_dir), stream(state_dir))?;
        Ok(Self { postgres, nats, database_url, nats_url })
    }
}

async fn database(state_dir: &Path) -> Result<(Option<Postgres>, String)> {
    if let Some(url) = named("DATABASE_URL") {
        check_postgres(&url).await?;
        println!("using the Postgres that DATABASE_URL names");
        return Ok((None, url));
    }
    let postgres = Postgres::start(&state_dir.join("postgres")).await?;
    let url = postgres.create_database(DATABASE).await?;
    println!("postgres is up (pid {})", postgres.pid());
    Ok((Some(postgres), url))
}

async fn stream(state_dir: &Path) -> Result<(Option<Nats>, String)> {
    if let Some(url) = named("NATS_URL") {
        check_nats(&url).await?;
        println!("using the nats-server that NATS_URL names");
        return Ok((None, url));
    }
    let nats = Nats::start(&state_dir.join("nats")).await?;
    println!("nats-server is up (pid {})", nats.pid());
    let url = nats.url();
    Ok((Some(nats), url))
}

fn named(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|url| !url.is_empty())
}
