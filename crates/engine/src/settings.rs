//! Value parsers for command-line flags: they report invalid settings before anything starts. None of them uses the
//! network, and none repeats the value, which may be a secret.

use std::path::PathBuf;

pub use relay_egress::Switch;
use relay_store::{DatabaseAddress, Pooler, Store};
pub use relay_stream::NatsServers;

use crate::access::{
    operators::{check_issuer_url, is_loopback},
    secrets::MIN_SECRET_BYTES,
};

/// Connection to Postgres.
#[derive(Debug, Clone, clap::Args)]
pub struct DatabaseConfig {
    /// URL of the Postgres database, migrated by `relayctl migrate`: `postgres://user:password@host:port/database`.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_parser = parse_database_url)]
    pub database_url: String,

    /// Pooler that the URL leads to: `transaction` for one that assigns a server to each transaction, such as
    /// PgBouncer. Costs three more round trips for each statement, and its planning.
    #[arg(long, env = "RELAY_DATABASE_POOLER", value_enum, default_value_t = PoolerMode::Off)]
    pub database_pooler: PoolerMode,

    /// URL that leads past the pooler, with the same user: recovery needs sessions.
    #[arg(long, env = "DATABASE_DIRECT_URL", hide_env_values = true, value_parser = parse_database_url)]
    pub database_direct_url: Option<String>,
}

/// Pooler in front of Postgres.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PoolerMode {
    Off,
    Transaction,
}

impl DatabaseConfig {
    /// Returns the addresses of the database.
    #[must_use]
    pub fn address(&self) -> DatabaseAddress {
        let pooler = match self.database_pooler {
            PoolerMode::Off => Pooler::Off,
            PoolerMode::Transaction => Pooler::Transaction,
        };
        // An empty variable is unset.
        let direct_url = self.database_direct_url.clone().filter(|url| !url.is_empty());
        DatabaseAddress { url: self.database_url.clone(), pooler, direct_url }
    }

    /// Returns the problem of a pooler without a way past it.
    pub fn check_pooler<'a>(variable: impl Fn(&str) -> Option<&'a str>) -> Option<String> {
        let is_pooled = variable("RELAY_DATABASE_POOLER") == Some("transaction");
        (is_pooled && variable("DATABASE_DIRECT_URL").is_none()).then(|| {
            "RELAY_DATABASE_POOLER=transaction needs DATABASE_DIRECT_URL, which leads past the pooler".to_owned()
        })
    }
}

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
        // An empty variable is unset.
        let ca_file = self.nats_ca_file.clone().filter(|path| !path.as_os_str().is_empty());
        NatsServers { url: self.nats_url.clone(), ca_file }
    }
}

/// Settings on which the security of a hosted installation depends. `None` where a program has no such setting.
#[derive(Debug, Clone, Copy)]
pub struct SecuritySettings<'a> {
    pub database_url: Option<&'a str>,
    pub database_direct_url: Option<&'a str>,
    pub nats_url: Option<&'a str>,
    pub has_secret_keys: bool,
    pub has_signing_secret: Option<bool>,
}

impl<'a> SecuritySettings<'a> {
    /// Takes the settings from their variables.
    pub fn from_variables(variable: impl Fn(&str) -> Option<&'a str>, has_signing_secret: Option<bool>) -> Self {
        Self {
            database_url: variable("DATABASE_URL"),
            database_direct_url: variable("DATABASE_DIRECT_URL"),
            nats_url: variable("NATS_URL"),
            has_secret_keys: variable("RELAY_SECRET_KEYS").is_some(),
            has_signing_secret,
        }
    }

    /// Logs what is insecure. Called by hosted installations, where other settings are required.
    pub fn warn(&self) {
        for problem in self.problems() {
            tracing::warn!(problem, "the installation is not secure; RELAY_REQUIRE_SECURE=on refuses such settings");
        }
    }

    /// Returns what is insecure, with advice, one sentence for each. A URL that cannot be parsed is reported elsewhere.
    pub fn problems(&self) -> Vec<&'static str> {
        let is_remote = |host: &String| !is_loopback(host);
        let is_readable = |url| Store::unverified_host(url).as_ref().is_some_and(is_remote);
        let readable_database = [self.database_url, self.database_direct_url].into_iter().flatten().any(is_readable);
        let readable_nats = self.nats_url.is_some_and(|url| relay_stream::unverified_hosts(url).iter().any(is_remote));
        let problems = [
            (readable_database, DATABASE_PROBLEM),
            (readable_nats, NATS_PROBLEM),
            (
                !self.has_secret_keys,
                "RELAY_SECRET_KEYS is not set, so the keys that encrypt secrets and sign messages are in Postgres: set \
                 it to k1:$(openssl rand -base64 32) for all processes",
            ),
            (
                self.has_signing_secret == Some(false),
                "RELAY_SIGNING_SECRET is not set, so the keys that sign observer tokens are stored unencrypted: set it to \
                 $(openssl rand -hex 32)",
            ),
        ];
        problems.into_iter().filter(|(is_present, _)| *is_present).map(|(_, problem)| problem).collect()
    }
}

/// Connection to Postgres on another host that is not encrypted, or to a server that proves nothing.
pub const DATABASE_PROBLEM: &str = "DATABASE_URL or DATABASE_DIRECT_URL leads to another host without verifying it: add sslmode=verify-full, and \
                                    sslrootcert with a private authority";
/// The same for NATS.
pub const NATS_PROBLEM: &str = "NATS_URL leads to another host without requiring TLS: use tls://, and RELAY_NATS_CA_FILE \
                                with a private authority";

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
    fn insecure_settings_of_a_hosted_installation_are_found() {
        let problems = |database_url, nats_url| {
            let settings = SecuritySettings {
                database_url: Some("postgres://u@localhost/relay"),
                database_direct_url: Some(database_url),
                nats_url: Some(nats_url),
                has_secret_keys: true,
                has_signing_secret: Some(true),
            };
            settings.problems()
        };
        for (database, nats, expected) in [
            ("postgres://u@127.0.0.1/relay", "nats://localhost:4222", &[][..]),
            ("postgres:///relay?host=/run/postgresql", "nats://[::1]:4222,127.0.0.2:1", &[]),
            ("postgres://u@db/relay?sslmode=verify-full", "tls://a:4222,tls://b:4222", &[]),
            (
                "postgres://u@db/relay?sslmode=verify-ca",
                "tls://a:4222,nats://b:4222",
                &[DATABASE_PROBLEM, NATS_PROBLEM],
            ),
            ("postgres://u@10.0.0.1/relay?sslmode=require", "tls://a:4222", &[DATABASE_PROBLEM]),
            ("postgres://u@db/relay", "tls://a:4222", &[DATABASE_PROBLEM]),
            ("postgres://u@localhost/relay", "a:4222", &[NATS_PROBLEM]),
            ("no url", "http://x", &[]),
        ] {
            assert_eq!(problems(database, nats), expected, "{database} {nats}");
        }
        let none = SecuritySettings {
            database_url: Some("postgres://u@db/relay"),
            database_direct_url: None,
            nats_url: None,
            has_secret_keys: false,
            has_signing_secret: Some(false),
        };
        let found = none.problems().join("\n");
        for part in ["DATABASE_URL", "RELAY_SECRET_KEYS", "RELAY_SIGNING_SECRET"] {
            assert!(found.contains(part), "{part} is not in {found}");
        }
        let unset = SecuritySettings { database_url: None, has_signing_secret: None, has_secret_keys: true, ..none };
        assert_eq!(unset.problems().len(), 0);
    }

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
