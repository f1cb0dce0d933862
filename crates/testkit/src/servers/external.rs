//! Servers that the environment names: are they good enough?

use anyhow::{Context, Result, ensure};
use sqlx::{Connection, PgConnection};

use super::find::{OLDEST_NATS, OLDEST_POSTGRES, parse_version};

/// Checks version and encoding of the database at `url`.
pub async fn check_postgres(url: &str) -> Result<()> {
    let mut connection = PgConnection::connect(url).await.context("connect to DATABASE_URL")?;
    let version: String = sqlx::query_scalar("show server_version_num").fetch_one(&mut connection).await?;
    let encoding: String = sqlx::query_scalar("show server_encoding").fetch_one(&mut connection).await?;
    let major = version.parse::<u32>().unwrap_or(0) / 10_000;
    ensure!(major >= OLDEST_POSTGRES, "DATABASE_URL names Postgres {major}; {OLDEST_POSTGRES} or newer is needed");
    ensure!(encoding == "UTF8", "the database of DATABASE_URL is encoded in {encoding}; it must be UTF8");
    connection.close().await?;
    Ok(())
}

/// Checks version and JetStream of the server at `url`.
pub async fn check_nats(url: &str) -> Result<()> {
    let client = async_nats::connect(url).await.context("connect to NATS_URL")?;
    let info = client.server_info();
    let version = parse_version(&info.version).unwrap_or_default();
    ensure!(
        version >= OLDEST_NATS,
        "NATS_URL names nats-server {}; {}.{} or newer is needed",
        info.version,
        OLDEST_NATS.0,
        OLDEST_NATS.1
    );
    async_nats::jetstream::new(client)
        .query_account()
        .await
        .context("the server of NATS_URL has no JetStream for this account")?;
    Ok(())
}
