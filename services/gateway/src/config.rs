//! What a gateway is told at its start, by flags or environment.

use std::net::{IpAddr, SocketAddr};

use clap::{Parser, ValueEnum};
use ipnet::IpNet;
use relay_domain::plan::{OwnLimits, PlanChanges, Plans};
use relay_engine::{EgressConfig, files::FilesConfig, secrets::KeyList, settings as check};
use relay_runtime::settings::{Settings, Values};

/// The HTTP and WebSocket edge of the engine.
#[derive(Debug, Clone, Parser)]
#[command(name = "relay-gateway", version)]
pub struct Config {
    /// Where Postgres is: `postgres://user:password@host:port/database`.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_parser = check::database_url)]
    pub database_url: String,

    /// Where NATS is: `nats://host:port`, several servers of one cluster separated by commas.
    #[arg(long, env = "NATS_URL", default_value = "nats://127.0.0.1:4222", hide_env_values = true, value_parser = check::nats_url)]
    pub nats_url: String,

    /// Copies that JetStream keeps of each stream: 3 wants three servers or more.
    #[arg(long, env = "RELAY_NATS_REPLICAS", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=5))]
    pub nats_replicas: u8,

    /// Where clients and nodes connect.
    #[arg(long, env = "RELAY_LISTEN", default_value = "127.0.0.1:8787")]
    pub listen: SocketAddr,

    /// Where Prometheus scrapes. Keep it private: it answers without authentication.
    #[arg(long, env = "RELAY_METRICS_LISTEN", default_value = "127.0.0.1:9464")]
    pub metrics_listen: SocketAddr,

    /// Postgres connections at most. Past 16 more of them slow commits down.
    #[arg(long, env = "RELAY_DATABASE_CONNECTIONS", default_value_t = 16)]
    pub database_connections: u32,

    /// By how much the numbers of mailboxes and events are raised in a restored database when nobody can tell which
    /// ones were given away: more than any mailbox got in what was lost.
    #[arg(long, env = "RELAY_RESTORE_MARGIN", default_value_t = relay_engine::recovery::DEFAULT_MARGIN, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    pub restore_margin: i64,

    /// Whether requests are counted against the budgets of their workspaces.
    #[arg(long, env = "RELAY_RATE_LIMITS", value_enum, default_value_t = Switch::On)]
    pub rate_limits: Switch,

    /// What plans allow where it differs from the defaults, as JSON: `{"free":{"agents":10}}`.
    #[arg(long, env = "RELAY_PLANS", default_value = "{}", value_parser = plans)]
    pub plans: Plans,

    /// Proxies whose `X-Forwarded-For` is believed, as networks separated by commas. None by default.
    #[arg(long, env = "RELAY_TRUSTED_PROXIES", value_delimiter = ',', value_parser = network)]
    pub trusted_proxies: Vec<IpNet>,

    /// Seals the private halves of the keys that sign observer tokens, at least 32 bytes; the same for all
    /// gateways. Without it they are stored as they are.
    #[arg(long, env = "RELAY_SIGNING_SECRET", hide_env_values = true, value_parser = check::secret)]
    pub signing_secret: Option<String>,

    /// What an operator shows to create workspaces, set quotas and rotate signing keys, at least 32 bytes.
    #[arg(long, env = "RELAY_BOOTSTRAP_SECRET", hide_env_values = true, value_parser = check::secret)]
    pub bootstrap_secret: Option<String>,

    /// The OIDC issuer whose JWTs operators show, as in their `iss`. Its discovery document is read.
    #[arg(long, env = "RELAY_OPERATOR_ISSUER", value_parser = check::issuer_url)]
    pub operator_issuer: Option<String>,

    /// What the JWTs' `aud` must name. Every JWT for it is an operator's.
    #[arg(long, env = "RELAY_OPERATOR_AUDIENCE")]
    pub operator_audience: Option<String>,

    /// Where the issuer's keys are, if it has no discovery document.
    #[arg(long, env = "RELAY_OPERATOR_JWKS_URL", value_parser = check::issuer_url)]
    pub operator_jwks_url: Option<String>,

    /// Whether workspaces are created by operators and by owners of others only.
    #[arg(long, env = "RELAY_HOSTED", value_enum, default_value_t = Switch::Off)]
    pub hosted: Switch,

    /// What addresses that the engine mints begin with: `https://relay.example`. Without it they begin as
    /// the client reached the gateway, which a proxy may hide.
    #[arg(long, env = "RELAY_PUBLIC_URL", value_parser = public_url)]
    pub public_url: Option<String>,

    /// What secrets are sealed and addresses signed with: `id:base64` of 32 bytes, several separated by
    /// commas. The first one is used, all are understood. Without any, a key that is kept in Postgres.
    #[arg(long, env = "RELAY_SECRET_KEYS", default_value = "", hide_env_values = true)]
    pub secret_keys: KeyList,

    /// Where files are kept, and which.
    #[command(flatten)]
    pub files: FilesConfig,

    /// Which URLs of tenants may be registered.
    #[command(flatten)]
    pub egress: EgressConfig,
}

impl Settings for Config {
    fn clashes(values: &Values) -> Vec<String> {
        let hosted_by_nobody = values.of("RELAY_HOSTED") == Some("on")
            && values.of("RELAY_BOOTSTRAP_SECRET").is_none()
            && values.of("RELAY_OPERATOR_ISSUER").is_none();
        let operators = hosted_by_nobody
            .then(|| "RELAY_HOSTED=on needs RELAY_BOOTSTRAP_SECRET or RELAY_OPERATOR_ISSUER".to_owned());
        let half = values.of("RELAY_FILES_S3_BUCKET").and_then(|_| {
            FilesConfig::half_a_key(
                values.of("RELAY_FILES_S3_ACCESS_KEY_ID"),
                values.of("RELAY_FILES_S3_SECRET_ACCESS_KEY"),
            )
        });
        let lone = [
            ("RELAY_OPERATOR_ISSUER", "RELAY_OPERATOR_AUDIENCE"),
            ("RELAY_OPERATOR_AUDIENCE", "RELAY_OPERATOR_ISSUER"),
            ("RELAY_OPERATOR_JWKS_URL", "RELAY_OPERATOR_ISSUER"),
        ];
        let lone = lone.into_iter().filter_map(|(setting, needs)| values.lone(setting, needs));
        operators.into_iter().chain(half).chain(lone).collect()
    }
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

fn plans(text: &str) -> Result<Plans, String> {
    let changes: PlanChanges = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Plans::changed(&changes).ok_or_else(|| OwnLimits::USABLE.to_owned())
}

/// A network, or a single address.
fn network(text: &str) -> Result<IpNet, String> {
    let text = text.trim();
    text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from)).map_err(|error| error.to_string())
}

/// A base without a path, a query or a slash at its end.
fn public_url(text: &str) -> Result<String, &'static str> {
    let wrong = "must be http:// or https:// and a host, with nothing behind it";
    let uri: http::Uri = text.trim_end_matches('/').parse().map_err(|_| wrong)?;
    let scheme = uri.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https")).ok_or(wrong)?;
    let authority = uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or(wrong)?;
    if uri.path().len() > 1 || uri.query().is_some() { Err(wrong) } else { Ok(format!("{scheme}://{authority}")) }
}

#[cfg(test)]
mod tests {
    use relay_runtime::settings::{Surroundings, told};

    use super::*;

    struct Given<'a>(&'a [(&'a str, &'a str)]);

    impl Surroundings for Given<'_> {
        fn variable(&self, name: &str) -> Option<String> {
            self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        }

        fn file(&self, _: &str) -> Result<String, String> {
            Err("not found".to_owned())
        }
    }

    #[test]
    fn everything_that_can_be_known_to_be_wrong_is_told_at_once() {
        let wrong = [
            ("DATABASE_URL", "mysql://relay@db/relay"),
            ("NATS_URL", "http://nats:4222"),
            ("RELAY_LISTEN", "here"),
            ("RELAY_SIGNING_SECRET", "short"),
            ("RELAY_HOSTED", "on"),
            ("RELAY_OPERATOR_JWKS_URL", "http://id.example/keys"),
            ("RELAY_FILES_S3_BUCKET", "files"),
            ("RELAY_FILES_S3_ACCESS_KEY_ID", "id"),
        ];
        let said = told::<Config>(&["relay-gateway".to_owned()], &Given(&wrong)).unwrap_err();
        for part in [
            "DATABASE_URL (from",
            "NATS_URL (from",
            "RELAY_LISTEN (from",
            "RELAY_SIGNING_SECRET (from RELAY_SIGNING_SECRET): must have at least 32 bytes",
            "RELAY_HOSTED=on needs",
            "RELAY_OPERATOR_JWKS_URL (from",
            "RELAY_OPERATOR_JWKS_URL is of no use without RELAY_OPERATOR_ISSUER",
            "RELAY_FILES_S3_ACCESS_KEY_ID and",
        ] {
            assert!(said.contains(part), "{part} is not in {said}");
        }
        assert!(!said.contains("short"), "{said}");
    }

    #[test]
    fn an_installation_with_an_operator_may_be_hosted() {
        let base = [("DATABASE_URL", "postgres://relay@db/relay"), ("RELAY_HOSTED", "on")];
        let issuer = ("RELAY_OPERATOR_ISSUER", "https://id.example");
        let check = |more: &[(&str, &str)], good: bool| {
            let all = [&base[..], more].concat();
            let said = told::<Config>(&["relay-gateway".to_owned()], &Given(&all));
            assert_eq!(said.is_ok(), good, "{more:?}: {:?}", said.err());
        };
        check(&[], false);
        check(&[("RELAY_BOOTSTRAP_SECRET", "0123456789abcdef0123456789abcdef")], true);
        check(&[issuer], false);
        check(&[issuer, ("RELAY_OPERATOR_AUDIENCE", "relay")], true);
    }

    #[test]
    fn plans_and_networks_are_checked_at_the_start() {
        assert!(plans(r#"{"free":{"agents":3},"pro":{"requests_per_minute":60}}"#).is_ok());
        for text in ["", r#"{"gold":{}}"#, r#"{"free":{"requests":1}}"#, r#"{"free":{"agents":-1}}"#] {
            assert!(plans(text).is_err(), "{text}");
        }
        assert!(plans(r#"{"free":{"requests_per_minute":1}}"#).is_err());
        assert_eq!(network(" 10.0.0.0/8"), Ok("10.0.0.0/8".parse().unwrap()));
        assert_eq!(network("192.0.2.1"), Ok("192.0.2.1/32".parse().unwrap()));
        assert!(network("proxy.example").is_err());
    }

    #[test]
    fn a_public_url_is_a_bare_base() {
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
            assert_eq!(public_url(text).ok().as_deref(), expected, "{text}");
        }
    }
}
