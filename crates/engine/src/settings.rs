//! Value parsers for command-line flags: they report invalid settings before anything starts. None of them uses the
//! network, and none repeats the value, which may be a secret.

use std::path::PathBuf;

use relay_store::Store;
pub use relay_stream::NatsServers;

use crate::access::{operators::check_issuer_url, secrets::MIN_SECRET_BYTES};

/// Connection to NATS.
#[derive(Debug, Clone, clap::Args)]
pub struct NatsConfig {
    /// URL of NATS: `nats://user:password@host:port`, `tls://` to require TLS; several servers of one cluster separated
    /// by commas.
    #[arg(long, env = "NATS_URL", default_value = "nats://127.0.0.1:4222", hide_env_values = true, value_parser = parse_nats_url)]
    pub nats_url: String,

    /// File with the authorities, in PEM, that the certificates of NATS are checked against besides the system's.
    #[arg(long, env = "RELAY_NATS_CA_FILE")]
    pub nats_ca_file: Option<PathBuf>,
}

impl NatsConfig {
    #[must_use]
    pub fn servers(&self) -> NatsServers {
        NatsServers { url: self.nats_url.clone(), ca_file: self.nats_ca_file.clone() }
    }
}

/// Parses a Postgres URL.
pub fn parse_database_url(text: &str) -> Result<String, String> {
    Store::check_url(text)?;
    Ok(text.to_owned())
}

/// Parses a NATS URL, or several separated by commas.
pub fn parse_nats_url(text: &str) -> Result<String, String> {
    relay_stream::check_url(text)?;
    Ok(text.to_owned())
}

/// Parses a secret of 32 bytes or more.
pub fn parse_secret(text: &str) -> Result<String, String> {
    if text.len() < MIN_SECRET_BYTES {
        return Err(format!("must have at least {MIN_SECRET_BYTES} bytes"));
    }
    Ok(text.to_owned())
}

/// Parses the URL of an OIDC issuer or of its keys: https, or http on the loopback interface.
pub fn parse_issuer_url(text: &str) -> Result<String, String> {
    check_issuer_url(text)?;
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_settings_are_refused_without_repeating_them() {
        type Reads = fn(&str) -> Result<String, String>;
        let check = |read: Reads, text: &str, good: bool| {
            let said = read(text);
            assert_eq!(said.is_ok(), good, "{text}: {said:?}");
            assert!(said.is_ok() || !said.unwrap_err().contains("sesame"), "{text} is repeated");
        };
        for (text, good) in [
            ("postgres://relay:sesame@db:5432/relay?sslmode=require", true),
            ("postgresql:///relay?host=/run/postgresql", true),
            ("mysql://relay:sesame@db/relay", false),
            ("db:5432/sesame", false),
            ("postgres://relay:sesame@db:port/relay", false),
            ("postgres://relay:sesame@db/relay?sslmode=perhaps", false),
        ] {
            check(parse_database_url, text, good);
        }
        for (text, good) in [
            ("nats://127.0.0.1:4222", true),
            ("a:4222", true),
            ("tls://u:sesame@a:4222,tls://u:sesame@b:4222", true),
            ("nats://a:4222,", false),
            ("http://u:sesame@a:4222", false),
            ("nats://u:sesame@a:port", false),
        ] {
            check(parse_nats_url, text, good);
        }
        check(parse_secret, "0123456789abcdef0123456789abcdef", true);
        check(parse_secret, "sesame", false);
        check(parse_issuer_url, "https://id.example/realm", true);
        check(parse_issuer_url, "http://id.example/realm", false);
    }
}
