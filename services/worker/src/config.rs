//! Configuration of a worker. Read by `main`.

use std::net::SocketAddr;

use relay_dispatch::{destinations::DestinationConfig, push::PushConfig};
use relay_engine::{
    EgressConfig, EngineConfig,
    access::{limits::LimitsConfig, secrets::KeyList},
    files::FilesConfig,
    maintenance::Retention,
    settings as check,
};
use relay_runtime::settings::{Settings, Values};

use crate::loops::TICK_TIMEOUT;

/// Postgres connections of a worker. Loops take turns, so a few are enough; more let more of them run at once.
/// http_push uses two more.
const DATABASE_CONNECTIONS: u32 = 6;

/// Runs the background loops of a Relay engine.
#[derive(Debug, clap::Parser)]
#[command(name = "relay-worker", version)]
pub(crate) struct Config {
    /// As for gateways.
    #[command(flatten)]
    database: check::DatabaseConfig,
    /// As for gateways.
    #[command(flatten)]
    nats: check::NatsConfig,
    /// As for gateways: replicas that JetStream keeps of each stream.
    #[arg(long, env = "RELAY_NATS_REPLICAS", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=5))]
    nats_replicas: u8,
    /// Address of /metrics, /health and /ready. Not for clients: keep it inside the cluster.
    #[arg(long, env = "RELAY_METRICS_LISTEN", default_value = "127.0.0.1:9465")]
    pub(crate) metrics_listen: SocketAddr,
    /// Days to keep deliveries and the ack log, besides today. At least 8.
    #[arg(long, env = "RELAY_DELIVERY_RETENTION_DAYS", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(i64::from(Retention::LEAST_DAYS)..=3650))]
    delivery_retention_days: u32,
    /// Days to keep messages, besides today. Raised to the deliveries' if lower.
    #[arg(long, env = "RELAY_MESSAGE_RETENTION_DAYS", default_value_t = 90,
          value_parser = clap::value_parser!(u32).range(i64::from(Retention::LEAST_DAYS)..=36500))]
    message_retention_days: u32,
    /// Days to keep the event log, besides today. Observers can go back no further.
    #[arg(long, env = "RELAY_EVENT_RETENTION_DAYS", default_value_t = 7,
          value_parser = clap::value_parser!(u32).range(1..=3650))]
    event_retention_days: u32,
    /// Maximum events in the log of each workspace, however recent.
    #[arg(long, env = "RELAY_EVENT_RETENTION_COUNT", default_value_t = 1_000_000,
          value_parser = clap::value_parser!(u32).range(1000..))]
    event_retention_count: u32,
    /// As for gateways: added to numbers in a restored database if the assigned ones cannot be determined.
    #[arg(long, env = "RELAY_RESTORE_MARGIN", default_value_t = relay_engine::recovery::DEFAULT_MARGIN, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    restore_margin: i64,
    /// As for gateways: `id:base64` of 32 bytes, separated by commas.
    #[arg(long, env = "RELAY_SECRET_KEYS", default_value = "", hide_env_values = true)]
    secret_keys: KeyList,
    /// As for gateways, where it restricts the creation of workspaces: a hosted installation warns of insecure
    /// settings.
    #[arg(long, env = "RELAY_HOSTED", value_enum, default_value_t = check::Switch::Off)]
    pub(crate) hosted: check::Switch,
    /// As for gateways: refuses to start with insecure settings.
    #[arg(long, env = "RELAY_REQUIRE_SECURE", value_enum, default_value_t = check::Switch::Off)]
    require_secure: check::Switch,
    /// As for gateways.
    #[command(flatten)]
    files: FilesConfig,
    /// Dispatch settings of http_push nodes.
    #[command(flatten)]
    pub(crate) push: PushConfig,
    /// Limits of calls to one host.
    #[command(flatten)]
    pub(crate) destinations: DestinationConfig,
    /// As for gateways: rules for the URLs of tenants.
    #[command(flatten)]
    egress: EgressConfig,
}

impl Settings for Config {
    fn check_combinations(values: &Values) -> Vec<String> {
        let incomplete_key = values.get("RELAY_FILES_S3_BUCKET").and_then(|_| {
            FilesConfig::check_key_pair(
                values.get("RELAY_FILES_S3_ACCESS_KEY_ID"),
                values.get("RELAY_FILES_S3_SECRET_ACCESS_KEY"),
            )
        });
        let insecure = (values.get("RELAY_REQUIRE_SECURE") == Some("on"))
            .then(|| check::SecuritySettings::from_variables(|name| values.get(name), None).problems());
        let insecure = insecure.into_iter().flatten().map(ToOwned::to_owned);
        let pooler = check::DatabaseConfig::check_pooler(|name| values.get(name));
        pooler.into_iter().chain(incomplete_key).chain(insecure).collect()
    }
}

impl Config {
    /// Settings on which the installation's security depends.
    pub(crate) fn security(&self) -> check::SecuritySettings<'_> {
        check::SecuritySettings {
            database_url: Some(&self.database.database_url),
            database_direct_url: self.database.database_direct_url.as_deref(),
            nats_url: Some(&self.nats.nats_url),
            has_secret_keys: !self.secret_keys.is_empty(),
            // Workers sign no tokens of observers.
            has_signing_secret: None,
        }
    }

    pub(crate) fn engine(&self) -> EngineConfig {
        EngineConfig {
            limits: LimitsConfig::default(),
            // No statement may outlast the tick that waits for it.
            statement_limit: TICK_TIMEOUT,
            database: self.database.address(),
            nats: self.nats.servers(),
            nats_replicas: self.nats_replicas,
            database_connections: DATABASE_CONNECTIONS,
            restore_margin: self.restore_margin,
            files: self.files.clone(),
            secret_keys: self.secret_keys.clone(),
            egress: self.egress.clone(),
        }
    }

    pub(crate) const fn retention(&self) -> Retention {
        Retention {
            delivery_days: self.delivery_retention_days,
            message_days: self.message_retention_days,
            event_days: self.event_retention_days,
            workspace_events: self.event_retention_count,
        }
    }
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
            ("DATABASE_URL", "db:5432"),
            ("NATS_URL", "nats://a:4222,"),
            ("RELAY_DELIVERY_RETENTION_DAYS", "1"),
            ("RELAY_PUSH_PROXY_URL", "proxy:3128"),
            ("RELAY_FILES_S3_SECRET_ACCESS_KEY", "sesame"),
        ];
        // An incomplete key matters only with a bucket.
        let given = [&problems[..], &[("RELAY_FILES_S3_BUCKET", "files")]].concat();
        let result = resolve::<Config>(&["relay-worker".to_owned()], &TestEnvironment(&given)).unwrap_err();
        for (variable, _) in problems {
            assert!(result.contains(variable), "{variable} is not in {result}");
        }
        assert!(!result.contains("sesame"), "{result}");
        let right = [("DATABASE_URL", "postgres://relay@db/relay"), ("NATS_URL", "nats://a:4222,nats://b:4222")];
        let fits = resolve::<Config>(&["relay-worker".to_owned()], &TestEnvironment(&right));
        assert!(fits.is_ok(), "{:?}", fits.err());
    }
}
