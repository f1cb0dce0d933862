//! Checks of the servers that the environment names.

use anyhow::{Context, Result, ensure};
use reqwest::Url;

use super::find::{OLDEST_NATS, OLDEST_POSTGRES, parse_version};
use super::{nats, psql};

/// Default port of a NATS URL.
const NATS_PORT: u16 = 4222;

/// Checks version and encoding of the database at `url`.
pub async fn check_postgres(url: &str) -> Result<()> {
    let statement = "select current_setting('server_version_num'), current_setting('server_encoding')";
    let rows = psql::query(url, statement).await.context("connect to DATABASE_URL")?;
    let (version, encoding) =
        rows.first().and_then(|row| row.split_once('|')).context("the server reported no version")?;
    let major = version.parse::<u32>().unwrap_or(0) / 10_000;
    ensure!(major >= OLDEST_POSTGRES, "DATABASE_URL names Postgres {major}; {OLDEST_POSTGRES} or newer is needed");
    ensure!(encoding == "UTF8", "the database of DATABASE_URL is encoded in {encoding}; it must be UTF8");
    Ok(())
}

/// Checks version and JetStream of the first server at `url`. The permissions of the account are checked by the
/// migration, which creates streams.
pub async fn check_nats(url: &str) -> Result<()> {
    let info = nats::read_greeting(&nats_address(url)?).await.context("connect to NATS_URL")?;
    let named = info["version"].as_str().unwrap_or_default();
    let version = parse_version(named).unwrap_or_default();
    ensure!(
        version >= OLDEST_NATS,
        "NATS_URL names nats-server {named}; {}.{} or newer is needed",
        OLDEST_NATS.0,
        OLDEST_NATS.1
    );
    ensure!(info["jetstream"] == true, "the server of NATS_URL has no JetStream");
    Ok(())
}

/// Returns `host:port` of the first server in a comma-separated list. The scheme is optional, as in the engine.
fn nats_address(urls: &str) -> Result<String> {
    let first = urls.split(',').next().unwrap_or_default().trim();
    let with_scheme = if first.contains("://") { first.to_owned() } else { format!("nats://{first}") };
    let url = Url::parse(&with_scheme).context("parse NATS_URL")?;
    let host = url.host_str().context("NATS_URL names no host")?;
    Ok(format!("{host}:{}", url.port().unwrap_or(NATS_PORT)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_server_of_a_nats_url_is_found() {
        let check = |urls: &str, expected: &str| assert_eq!(nats_address(urls).unwrap(), expected, "{urls}");
        check("nats://127.0.0.1:4333", "127.0.0.1:4333");
        check("nats://user:word@a.example,nats://b.example:1", "a.example:4222");
        check("localhost:4333", "localhost:4333");
        check("tls://[::1]", "[::1]:4222");
        assert!(nats_address("").is_err());
    }
}
