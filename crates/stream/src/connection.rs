//! Connection to NATS with automatic reconnects, and the definition of the streams. Main type: [`Stream`].

use std::{
    collections::HashMap,
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::Duration,
};

use async_nats::{Client, ConnectOptions, Event, ServerAddr, connection::State, jetstream};
use percent_encoding::percent_decode_str;
use tokio::sync::watch;

use crate::{FrameKeys, StreamError, StreamResult, subjects};

/// Messages buffered per subscription; NATS drops further ones, and the silence check repairs the gap.
const SUBSCRIPTION_CAPACITY: usize = 1024;
/// A server that answers none of three pings in a row is left for another one. A partition closes no connection.
const PING_INTERVAL: Duration = Duration::from_secs(3);

/// Retention of deliveries: the longest default TTL (one hour) and ten minutes.
const LOG_MAX_AGE: Duration = Duration::from_secs(70 * 60);
/// Storage limit of the delivery stream, in bytes. The oldest frames are dropped beyond it; Postgres has all of them.
const LOG_MAX_BYTES: i64 = 4 << 30;

/// Retention of events; observers read older ones from Postgres.
const EVENTS_MAX_AGE: Duration = Duration::from_secs(10 * 60);
const EVENTS_MAX_BYTES: i64 = 1 << 30;

/// Metadata key of the delivery stream: everything that Postgres holds has been published again.
pub(crate) const REBUILT: &str = "relay-rebuilt";

/// Definition of a stream.
pub(crate) struct StreamSpec {
    pub(crate) name: &'static str,
    pub(crate) subjects: &'static str,
    pub(crate) max_age: Duration,
    pub(crate) max_bytes: i64,
    /// `true` if NATS publishes each stored message again under [`subjects::LIVE_PREFIX`], for live tails.
    pub(crate) republishes: bool,
}

/// All streams: deliveries, then events.
pub(crate) const STREAMS: [StreamSpec; 2] = [
    StreamSpec {
        name: "RELAY_DELIVERIES",
        subjects: subjects::LOG_WILDCARD,
        max_age: LOG_MAX_AGE,
        max_bytes: LOG_MAX_BYTES,
        // Live copies go from gateway to gateway; republishing takes a third of the time that NATS needs for a
        // delivery.
        republishes: false,
    },
    StreamSpec {
        name: "RELAY_EVENTS",
        subjects: subjects::EVENTS_WILDCARD,
        max_age: EVENTS_MAX_AGE,
        max_bytes: EVENTS_MAX_BYTES,
        republishes: true,
    },
];

/// Checks the syntax of a NATS URL, or of several separated by commas, without connecting.
///
/// # Errors
/// If a URL is invalid. The text states the reason and does not contain the URL, which may hold a password.
pub fn check_url(url: &str) -> Result<(), String> {
    parse_servers(url).map(drop).map_err(|error| error.to_string())
}

/// Returns the hosts of a NATS URL that need not prove their names, because it does not require TLS; none of an
/// unusable URL.
pub fn unverified_hosts(url: &str) -> Vec<String> {
    let servers = parse_servers(url).unwrap_or_default();
    servers.iter().filter(|server| !server.tls_required()).map(|server| server.host().to_owned()).collect()
}

pub(crate) fn parse_servers(url: &str) -> std::io::Result<Vec<ServerAddr>> {
    let empty = || std::io::Error::other("an address is empty");
    url.split(',').map(str::trim).map(|server| if server.is_empty() { Err(empty()) } else { server.parse() }).collect()
}

/// Address of the NATS servers.
#[derive(Debug, Clone)]
pub struct NatsServers {
    /// URL, or several of one cluster separated by commas. `tls://` requires TLS with a certificate for the host.
    pub url: String,
    /// Certificates, in PEM, of the authorities that the servers' certificates are checked against besides the
    /// system's.
    pub ca_file: Option<PathBuf>,
}

impl NatsServers {
    /// Returns the addresses, and options with the URL's user and the given authorities.
    pub(crate) fn parse(&self) -> StreamResult<(Vec<ServerAddr>, ConnectOptions)> {
        let servers = parse_servers(&self.url).map_err(StreamError::from_nats("reading the nats url"))?;
        let mut options = ConnectOptions::new();
        // The client does not use credentials of URLs by itself.
        if let Some((user, password)) = servers.iter().find_map(credentials) {
            options = options.user_and_password(user, password);
        }
        if let Some(file) = &self.ca_file {
            options = options.add_root_certificates(file.clone());
        }
        Ok((servers, options))
    }
}

/// Clock that all processes share approximately, in unix milliseconds.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> i64 + Send + Sync>);

impl Clock {
    /// Creates a clock from its reading.
    pub fn new(now_ms: impl Fn() -> i64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(now_ms))
    }

    pub(crate) fn now_ms(&self) -> i64 {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Clock").field(&self.now_ms()).finish()
    }
}

/// Identity of this process among those that share NATS.
#[derive(Debug, Clone)]
pub struct ProcessIdentity {
    /// Name of the connection, shown by NATS.
    pub name: &'static str,
    /// Unique per start of a process, which ignores its own hints by it.
    pub origin: String,
    /// Keys that sign and verify messages.
    pub keys: FrameKeys,
    /// Clock by which old hints are recognized.
    pub clock: Clock,
}

/// Logs why NATS cannot be connected to: once for each reason, not for each attempt.
fn log_new_failure(logged: &Mutex<Option<String>>, reason: String) {
    let mut logged = logged.lock().unwrap_or_else(PoisonError::into_inner);
    if logged.as_ref() != Some(&reason) {
        tracing::warn!(error = reason, "nats connection failed, retrying; relayctl doctor shows the cause");
        *logged = Some(reason);
    }
}

/// Logs what NATS refuses, such as a subject without a permission: the first after a connect, not each message.
fn log_first_refusal(logged: &Mutex<Option<String>>, reason: String) {
    let mut logged = logged.lock().unwrap_or_else(PoisonError::into_inner);
    if logged.is_none() {
        tracing::warn!(
            error = reason,
            "nats refused a message or a subscription, deploy/nats/roles.conf has what roles need"
        );
        *logged = Some(reason);
    }
}

/// Returns the user and the password of a URL, all servers of a cluster having the same.
fn credentials(server: &ServerAddr) -> Option<(String, String)> {
    let decode = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    Some((decode(server.username()?), decode(server.password().unwrap_or_default())))
}

/// Opens the connection. `link` shows its state.
async fn open(servers: &NatsServers, name: &str, link: watch::Sender<LinkState>) -> StreamResult<Client> {
    let logged_failure: Arc<Mutex<Option<String>>> = Arc::default();
    let (addresses, options) = servers.parse()?;
    options
        .name(name)
        .retry_on_initial_connect()
        .subscription_capacity(SUBSCRIPTION_CAPACITY)
        .ping_interval(PING_INTERVAL)
        .reconnect_delay_callback(|attempt| {
            Duration::from_millis((50 * u64::try_from(attempt).unwrap_or(u64::MAX)).min(1000))
        })
        .event_callback(move |event| {
            let (link, logged_failure) = (link.clone(), Arc::clone(&logged_failure));
            async move { handle_event(event, &link, &logged_failure) }
        })
        .connect(addresses)
        .await
        .map_err(StreamError::from_nats("connecting"))
}

fn handle_event(event: Event, link: &watch::Sender<LinkState>, logged: &Mutex<Option<String>>) {
    let is_up = match event {
        Event::Connected => {
            *logged.lock().unwrap_or_else(PoisonError::into_inner) = None;
            Some(true)
        }
        Event::Disconnected | Event::Closed => Some(false),
        Event::SlowConsumer(_) => None,
        Event::ClientError(error) => return log_new_failure(logged, error.to_string()),
        Event::ServerError(error) => return log_first_refusal(logged, error.to_string()),
        Event::LameDuckMode | Event::Draining => return,
    };
    // A connect counts, too: copies that were sent since the disconnect did not arrive.
    link.send_modify(|link| {
        link.is_up = is_up.unwrap_or(link.is_up);
        link.possible_losses += 1;
    });
}

/// Connection state, as observed by receivers of live copies and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkState {
    /// `true` while NATS is connected.
    pub is_up: bool,
    /// Counter that increases whenever live copies may have been lost: on a disconnect or a slow consumer.
    pub possible_losses: u64,
}

/// Handle on NATS. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Stream {
    pub(crate) client: Client,
    pub(crate) jetstream: jetstream::Context,
    link: watch::Sender<LinkState>,
    pub(crate) identity: Arc<ProcessIdentity>,
    /// Number of the last hint that was sent.
    pub(crate) hints_sent: Arc<AtomicU64>,
}

impl Stream {
    /// Connects in the background and reconnects forever, so NATS may be unavailable at startup.
    ///
    /// # Errors
    /// If a URL is invalid, or the file with authorities cannot be read.
    pub async fn connect(servers: &NatsServers, identity: ProcessIdentity) -> StreamResult<Self> {
        let (link, _) = watch::channel(LinkState::default());
        let client = open(servers, identity.name, link.clone()).await?;
        // Also bounds the wait of the publisher for an acknowledgement.
        let jetstream = jetstream::context::ContextBuilder::new().timeout(Duration::from_secs(5)).build(client.clone());
        Ok(Self { client, jetstream, link, identity: Arc::new(identity), hints_sent: Arc::default() })
    }

    /// Returns a watch on the connection state.
    #[must_use]
    pub fn watch_link(&self) -> watch::Receiver<LinkState> {
        self.link.subscribe()
    }

    /// Returns whether NATS is connected right now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Creates or updates the delivery and event streams with `replicas` copies each. Idempotent. Returns whether the
    /// delivery stream holds everything that Postgres had; a new stream does not.
    ///
    /// # Errors
    /// If JetStream is unavailable, or cannot provide the replicas or the storage; the caller retries.
    pub async fn ensure_streams(&self, replicas: u8) -> StreamResult<bool> {
        let mut rebuilt = false;
        for (nth, spec) in STREAMS.into_iter().enumerate() {
            let metadata = self.ensure_stream(spec, replicas).await?;
            // Only the delivery stream is rebuilt.
            rebuilt |= nth == 0 && metadata.contains_key(REBUILT);
        }
        Ok(rebuilt)
    }

    /// Creates or updates a stream. Returns the metadata that it had.
    async fn ensure_stream(&self, spec: StreamSpec, replicas: u8) -> StreamResult<HashMap<String, String>> {
        let found = self.jetstream.get_stream(spec.name).await.ok();
        // A stream that does not exist yet has none. After a failed read the mark is lost, which costs another rebuild.
        let mut metadata = found.map(|stream| stream.cached_info().config.metadata.clone()).unwrap_or_default();
        // Drop the keys that NATS adds itself, otherwise the update is refused.
        metadata.retain(|key, _| key == REBUILT);
        let kept = metadata.clone();
        self.jetstream
            .create_or_update_stream(jetstream::stream::Config {
                name: spec.name.to_owned(),
                subjects: vec![spec.subjects.to_owned()],
                max_age: spec.max_age,
                max_bytes: spec.max_bytes,
                num_replicas: replicas.into(),
                // A full stream takes new frames all the same: Postgres has the old ones.
                discard: jetstream::stream::DiscardPolicy::Old,
                // A frame that is published again later is stored twice; recovery restores it once.
                duplicate_window: Duration::from_secs(120),
                // Recovery reads by position, which any replica can answer.
                allow_direct: true,
                republish: spec.republishes.then(|| jetstream::stream::Republish {
                    source: spec.subjects.to_owned(),
                    destination: format!("{}{}", subjects::LIVE_PREFIX, spec.subjects),
                    headers_only: false,
                }),
                metadata,
                ..Default::default()
            })
            .await
            .map(|_| kept)
            .map_err(StreamError::from_nats("creating a stream"))
    }

    /// Flushes buffered messages and closes the connection.
    pub async fn close(&self) {
        if let Err(error) = self.client.drain().await {
            tracing::debug!(%error, "failed to drain the nats connection");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_of_a_url_is_decoded() {
        let found = |url: &str| parse_servers(url).unwrap().iter().find_map(credentials);
        assert_eq!(found("nats://a:4222,b:4222"), None);
        let expected = Some(("relay-worker".to_owned(), "a@b/c".to_owned()));
        assert_eq!(found("tls://relay-worker:a%40b%2Fc@a:4222,tls://b:4222"), expected);
    }
}
