//! Configuration of a gateway: flags, environment variables, and the rules between settings. Read by `main`.

use std::net::{IpAddr, SocketAddr};

use clap::Parser;
use ipnet::IpNet;
use relay_domain::workspaces::plan::{LimitOverrides, Plan, PlanOverrides, Plans};
pub use relay_engine::settings::Switch;
use relay_engine::{
    EgressConfig,
    access::secrets::KeyList,
    files::FilesConfig,
    settings::{self as check, SecuritySettings},
};
use relay_runtime::settings::{Settings, Values};

use crate::connections::ConnectionLimits;

/// The HTTP and WebSocket edge of the engine.
#[derive(Debug, Clone, Parser)]
#[command(name = "relay-gateway", version)]
pub struct Config {
    /// Connection to Postgres.
    #[command(flatten)]
    pub database: check::DatabaseConfig,

    /// Connection to NATS.
    #[command(flatten)]
    pub nats: check::NatsConfig,

    /// Replicas that JetStream keeps of each stream: 3 requires at least three servers.
    #[arg(long, env = "RELAY_NATS_REPLICAS", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=5))]
    pub nats_replicas: u8,

    /// Address on which clients and nodes connect.
    #[arg(long, env = "RELAY_LISTEN", default_value = "127.0.0.1:8787")]
    pub listen: SocketAddr,

    /// Address of the metrics and probes. Keep it private: it answers without authentication.
    #[arg(long, env = "RELAY_METRICS_LISTEN", default_value = "127.0.0.1:9464")]
    pub metrics_listen: SocketAddr,

    /// Maximum Postgres connections. More than 16 slow commits down.
    #[arg(long, env = "RELAY_DATABASE_CONNECTIONS", default_value_t = 16)]
    pub database_connections: u32,

    /// Added to the numbers of mailboxes and events in a restored database if the assigned ones cannot be determined:
    /// more than any mailbox received in the lost period.
    #[arg(long, env = "RELAY_RESTORE_MARGIN", default_value_t = relay_engine::recovery::DEFAULT_MARGIN, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    pub restore_margin: i64,

    /// Enables the rate limits of workspaces.
    #[arg(long, env = "RELAY_RATE_LIMITS", value_enum, default_value_t = Switch::On)]
    pub rate_limits: Switch,

    /// Differences from the default plans, as JSON: `{"free":{"agents":10}}`.
    #[arg(long, env = "RELAY_PLANS", default_value = "{}", value_parser = parse_plans)]
    pub plans: Plans,

    /// Plan of workspaces that are created without a workspace key: free, pro or enterprise. By default `enterprise`,
    /// and `free` in a hosted installation.
    #[arg(long, env = "RELAY_DEFAULT_PLAN", value_parser = parse_plan)]
    pub default_plan: Option<Plan>,

    /// Limits of connections.
    #[command(flatten)]
    pub connections: ConnectionLimits,

    /// Proxies whose `X-Forwarded-For` is trusted, as networks separated by commas. None by default.
    #[arg(long, env = "RELAY_TRUSTED_PROXIES", value_delimiter = ',', value_parser = parse_network)]
    pub trusted_proxies: Vec<IpNet>,

    /// Encrypts the private halves of the keys that sign observer tokens, at least 32 bytes; the same for all
    /// gateways. Without it they are stored unencrypted.
    #[arg(long, env = "RELAY_SIGNING_SECRET", hide_env_values = true, value_parser = check::parse_secret)]
    pub signing_secret: Option<String>,

    /// Secret with which operators create workspaces, set quotas and rotate signing keys, at least 32 bytes.
    #[arg(long, env = "RELAY_BOOTSTRAP_SECRET", hide_env_values = true, value_parser = check::parse_secret)]
    pub bootstrap_secret: Option<String>,

    /// OIDC issuer of the operators' JWTs, as in their `iss`. Its discovery document is read.
    #[arg(long, env = "RELAY_OPERATOR_ISSUER", value_parser = check::parse_issuer_url)]
    pub operator_issuer: Option<String>,

    /// Required `aud` of the JWTs. Every JWT for it is an operator's.
    #[arg(long, env = "RELAY_OPERATOR_AUDIENCE")]
    pub operator_audience: Option<String>,

    /// URL of the issuer's keys, if it has no discovery document.
    #[arg(long, env = "RELAY_OPERATOR_JWKS_URL", value_parser = check::parse_issuer_url)]
    pub operator_jwks_url: Option<String>,

    /// Restricts the creation of workspaces to operators and owners of other workspaces.
    #[arg(long, env = "RELAY_HOSTED", value_enum, default_value_t = Switch::Off)]
    pub hosted: Switch,

    /// Refuses to start without the installation's own keys, or with connections to other hosts that do not verify
    /// them. Otherwise a hosted installation warns of it.
    #[arg(long, env = "RELAY_REQUIRE_SECURE", value_enum, default_value_t = Switch::Off)]
    pub require_secure: Switch,

    /// Base of the URLs that the engine creates: `https://relay.example`. Without it they start as the client reached
    /// the gateway, which a proxy may hide.
    #[arg(long, env = "RELAY_PUBLIC_URL", value_parser = parse_public_url)]
    pub public_url: Option<String>,

    /// Keys that encrypt secrets and sign URLs: `id:base64` of 32 bytes, several separated by commas. The first one is
    /// used, all are accepted. Without any, a key stored in Postgres.
    #[arg(long, env = "RELAY_SECRET_KEYS", default_value = "", hide_env_values = true)]
    pub secret_keys: KeyList,

    /// Storage and limits of files.
    #[command(flatten)]
    pub files: FilesConfig,

    /// Rules for the URLs that tenants may register.
    #[command(flatten)]
    pub egress: EgressConfig,
}

impl Config {
    /// Returns the plan of new workspaces.
    #[must_use]
    pub fn default_plan(&self) -> Plan {
        self.default_plan.unwrap_or(match self.hosted {
            Switch::On => Plan::Free,
            Switch::Off => Plan::Enterprise,
        })
    }
}

impl Settings for Config {
    fn check_combinations(values: &Values) -> Vec<String> {
        let hosted_without_operator = values.get("RELAY_HOSTED") == Some("on")
            && values.get("RELAY_BOOTSTRAP_SECRET").is_none()
            && values.get("RELAY_OPERATOR_ISSUER").is_none();
        let operators = hosted_without_operator
            .then(|| "RELAY_HOSTED=on needs RELAY_BOOTSTRAP_SECRET or RELAY_OPERATOR_ISSUER".to_owned());
        let incomplete_key = values.get("RELAY_FILES_S3_BUCKET").and_then(|_| {
            FilesConfig::check_key_pair(
                values.get("RELAY_FILES_S3_ACCESS_KEY_ID"),
                values.get("RELAY_FILES_S3_SECRET_ACCESS_KEY"),
            )
        });
        let unusable = [
            ("RELAY_OPERATOR_ISSUER", "RELAY_OPERATOR_AUDIENCE"),
            ("RELAY_OPERATOR_AUDIENCE", "RELAY_OPERATOR_ISSUER"),
            ("RELAY_OPERATOR_JWKS_URL", "RELAY_OPERATOR_ISSUER"),
        ];
        let unusable = unusable.into_iter().filter_map(|(setting, needs)| values.require_with(setting, needs));
        let insecure = (values.get("RELAY_REQUIRE_SECURE") == Some("on")).then(|| {
            let has_signing_secret = Some(values.get("RELAY_SIGNING_SECRET").is_some());
            SecuritySettings::from_variables(|name| values.get(name), has_signing_secret).problems()
        });
        let insecure = insecure.into_iter().flatten().map(ToOwned::to_owned);
        let pooler = check::DatabaseConfig::check_pooler(|name| values.get(name));
        operators.into_iter().chain(pooler).chain(incomplete_key).chain(unusable).chain(insecure).collect()
    }
}

impl Config {
    /// Settings on which the installation's security depends.
    pub fn security(&self) -> SecuritySettings<'_> {
        SecuritySettings {
            database_url: Some(&self.database.database_url),
            database_direct_url: self.database.database_direct_url.as_deref(),
            nats_url: Some(&self.nats.nats_url),
            has_secret_keys: !self.secret_keys.is_empty(),
            has_signing_secret: Some(self.signing_secret.is_some()),
        }
    }
}

fn parse_plan(text: &str) -> Result<Plan, &'static str> {
    Plan::parse(text).ok_or("must be free, pro or enterprise")
}

fn parse_plans(text: &str) -> Result<Plans, String> {
    let changes: PlanOverrides = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Plans::with_overrides(&changes).ok_or_else(|| LimitOverrides::VALID_RANGES.to_owned())
}

/// Parses a network or a single address.
fn parse_network(text: &str) -> Result<IpNet, String> {
    let text = text.trim();
    text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from)).map_err(|error| error.to_string())
}

/// Parses a base URL without path and query.
fn parse_public_url(text: &str) -> Result<String, &'static str> {
    let problems = "must be http:// or https:// and a host, with nothing behind it";
    let uri: http::Uri = text.trim_end_matches('/').parse().map_err(|_| problems)?;
    let scheme = uri.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https")).ok_or(problems)?;
    // A user name or a password would be in every URL that clients get.
    let authority = uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or(problems)?;
    if uri.path().len() > 1 || uri.query().is_some() { Err(problems) } else { Ok(format!("{scheme}://{authority}")) }
}

#[cfg(test)]
mod tests {
    use relay_runtime::settings::{Environment, resolve};

    use super::*;

    struct TestEnvironment<'a>(&'a [(&'a str, &'a str)]);

    impl Environment for TestEnvironment<'_> {
        fn variable(&self, name: &str) -> Option<String> {
            self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        }

        fn file(&self, _: &str) -> Result<String, String> {
            Err("not found".to_owned())
        }
    }

    #[test]
    fn all_invalid_settings_are_reported_at_once() {
        let problems = [
            ("DATABASE_URL", "mysql://relay@db/relay"),
            ("NATS_URL", "http://nats:4222"),
            ("RELAY_DATABASE_POOLER", "transaction"),
            ("RELAY_LISTEN", "here"),
            ("RELAY_SIGNING_SECRET", "short"),
            ("RELAY_HOSTED", "on"),
            ("RELAY_OPERATOR_JWKS_URL", "http://id.example/keys"),
            ("RELAY_FILES_S3_BUCKET", "files"),
            ("RELAY_FILES_S3_ACCESS_KEY_ID", "id"),
        ];
        let result = resolve::<Config>(&["relay-gateway".to_owned()], &TestEnvironment(&problems)).unwrap_err();
        for part in [
            "DATABASE_URL (from",
            "NATS_URL (from",
            "RELAY_DATABASE_POOLER=transaction needs DATABASE_DIRECT_URL",
            "RELAY_LISTEN (from",
            "RELAY_SIGNING_SECRET (from RELAY_SIGNING_SECRET): must have at least 32 bytes",
            "RELAY_HOSTED=on needs",
            "RELAY_OPERATOR_JWKS_URL (from",
            "RELAY_OPERATOR_JWKS_URL is of no use without RELAY_OPERATOR_ISSUER",
            "RELAY_FILES_S3_ACCESS_KEY_ID and",
        ] {
            assert!(result.contains(part), "{part} is not in {result}");
        }
        assert!(!result.contains("short"), "{result}");
    }

    #[test]
    fn a_hosted_installation_requires_an_operator() {
        let base = [("DATABASE_URL", "postgres://relay@db/relay"), ("RELAY_HOSTED", "on")];
        let issuer = ("RELAY_OPERATOR_ISSUER", "https://id.example");
        let check = |more: &[(&str, &str)], good: bool| {
            let all = [&base[..], more].concat();
            let result = resolve::<Config>(&["relay-gateway".to_owned()], &TestEnvironment(&all));
            assert_eq!(result.is_ok(), good, "{more:?}: {:?}", result.err());
        };
        check(&[], false);
        check(&[("RELAY_BOOTSTRAP_SECRET", "0123456789abcdef0123456789abcdef")], true);
        check(&[issuer], false);
        check(&[issuer, ("RELAY_OPERATOR_AUDIENCE", "relay")], true);
    }

    #[test]
    fn insecure_settings_are_refused_on_request() {
        let result = |more: &[(&str, &str)]| {
            let base = [("DATABASE_URL", "postgres://relay:sesame@db/relay"), ("NATS_URL", "nats://nats:4222")];
            let all = [&base[..], more].concat();
            resolve::<Config>(&["relay-gateway".to_owned()], &TestEnvironment(&all))
        };
        assert!(result(&[]).is_ok());
        let problems = result(&[("RELAY_REQUIRE_SECURE", "on")]).unwrap_err();
        for part in ["sslmode=verify-full", "tls://", "RELAY_SECRET_KEYS is not set", "RELAY_SIGNING_SECRET is not set"]
        {
            assert!(problems.contains(part), "{part} is not in {problems}");
        }
        assert!(!problems.contains("sesame"), "{problems}");
    }

    #[test]
    fn plans_and_networks_are_validated() {
        assert!(parse_plans(r#"{"free":{"agents":3},"pro":{"requests_per_minute":60}}"#).is_ok());
        for text in ["", r#"{"gold":{}}"#, r#"{"free":{"requests":1}}"#, r#"{"free":{"agents":-1}}"#] {
            assert!(parse_plans(text).is_err(), "{text}");
        }
        assert!(parse_plans(r#"{"free":{"requests_per_minute":1}}"#).is_err());
        assert_eq!(parse_network(" 10.0.0.0/8"), Ok("10.0.0.0/8".parse().unwrap()));
        assert_eq!(parse_network("192.0.2.1"), Ok("192.0.2.1/32".parse().unwrap()));
        assert!(parse_network("proxy.example").is_err());
    }

    #[test]
    fn a_public_url_has_no_path_query_or_user() {
        for (text, expected) in [
            ("https://relay.example", Some("https://relay.example")),
            ("http://127.0.0.1:8787/", Some("http://127.0.0.1:8787")),
            ("relay.example", None),
            ("https://relay.example/x", None),
            ("https://relay.example?x", None),
            ("ftp://relay.example", None),
            ("https://a@relay.example", None),
            ("", None),
        ] {
            assert_eq!(parse_public_url(text).ok().as_deref(), expected, "{text}");
        }
    }
}
