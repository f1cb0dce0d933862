//! SQL on a running server through psql, so that no driver is linked.

use std::process::Stdio;

use anyhow::{Context, Result, anyhow, ensure};
use percent_encoding::percent_decode_str;
use reqwest::Url;
use tokio::process::Command;

use super::find;

/// URL parameters of the engine's driver that psql rejects.
const DRIVER_PARAMETERS: [&str; 2] = ["statement-cache-capacity", "options["];

/// Runs one statement on the database at `url`. Returns one line per row, with columns separated by `|`.
pub(super) async fn query(url: &str, statement: &str) -> Result<Vec<String>> {
    let program = find::postgres_bin_dir()?.join("psql");
    let (url, password) = split_password(url)?;
    let mut command = Command::new(&program);
    if let Some(password) = password {
        command.env("PGPASSWORD", password);
    }
    let output = command
        .args(["--no-psqlrc", "--no-password", "--quiet", "--tuples-only", "--no-align"])
        .args(["--dbname", url.as_str(), "--command", statement])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .with_context(|| format!("run {}", program.display()))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{statement:?} was refused: {}", stderr.trim());
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

/// Returns the URL for psql and its password, separately because every user of the machine can read arguments.
fn split_password(url: &str) -> Result<(Url, Option<String>)> {
    let mut url = Url::parse(url).context("parse the URL of the database")?;
    let decode = |text: &str| percent_decode_str(text).decode_utf8().map(std::borrow::Cow::into_owned);
    let password = url.password().map(decode).transpose()?;
    url.set_password(None).map_err(|()| anyhow!("the URL of the database takes no password"))?;
    let is_known = |key: &str| !DRIVER_PARAMETERS.iter().any(|other| key.starts_with(other));
    let kept: Vec<(String, String)> = url.query_pairs().into_owned().filter(|(key, _)| is_known(key)).collect();
    url.set_query(None);
    if !kept.is_empty() {
        url.query_pairs_mut().extend_pairs(kept);
    }
    Ok((url, password))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_removed_and_decoded() {
        let check = |url: &str, expected: &str, password: Option<&str>| {
            let (url, found) = split_password(url).unwrap();
            assert_eq!((url.as_str(), found.as_deref()), (expected, password));
        };
        check("postgres://me:p%40ss@host:1/db", "postgres://me@host:1/db", Some("p@ss"));
        check("postgres://host/db?sslmode=require", "postgres://host/db?sslmode=require", None);
        check("postgres://host/db?statement-cache-capacity=0", "postgres://host/db", None);
    }
}
