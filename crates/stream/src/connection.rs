//! The connection to NATS, which may come and go.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_nats::{Client, ConnectOptions, Event, ServerAddr, connection::State, jetstream};
use tokio::sync::watch;

use crate::{StreamError, StreamResult, subjects};

/// Messages buffered per subscription before NATS' copy is dropped; the silence check repairs that.
const SUBSCRIPTION_CAPACITY: usize = 1024;
/// The stream outlives the longest default delivery TTL (one hour) by ten minutes.
const LOG_MAX_AGE: Duration = Duration::from_secs(70 * 60);
/// Bytes that the log keeps before it drops the oldest: replay does not need them, Postgres has all.
const LOG_MAX_BYTES: i64 = 4 << 30;

/// Watchers read what is older from Postgres.
const EVENTS_MAX_AGE: Duration = Duration::from_secs(10 * 60);
const EVENTS_MAX_BYTES: i64 = 1 << 30;

/// On the delivery stream, in its metadata: all that Postgres had to give has been put into it.
pub(crate) const REBUILT: &str = "relay-rebuilt";

/// Name, subjects, greatest age and greatest size of each stream: deliveries, then events.
pub(crate) const STREAMS: [(&str, &str, Duration, i64); 2] = [
    ("RELAY_DELIVERIES", subjects::LOG_WILDCARD, LOG_MAX_AGE, LOG_MAX_BYTES),
    ("RELAY_EVENTS", subjects::EVENTS_WILDCARD, EVENTS_MAX_AGE, EVENTS_MAX_BYTES),
];

/// Whether `url` is a NATS URL, or several separated by commas, without going there.
///
/// # Errors
/// When one is none, with the reason and without the URL.
pub fn check_url(url: &str) -> Result<(), String> {
    servers(url).map(drop).map_err(|error| error.to_string())
}

pub(crate) fn servers(url: &str) -> std::io::Result<Vec<ServerAddr>> {
    let nobody = || std::io::Error::other("an address is empty");
    url.split(',').map(str::trim).map(|server| if server.is_empty() { Err(nobody()) } else { server.parse() }).collect()
}

/// What the tail should make of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Link {
    /// Whether NATS is connected.
    pub up: bool,
    /// Rises whenever live copies may have been lost: a disconnect, a slow consumer.
    pub doubts: u64,
}

/// A handle on NATS. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Stream {
    pub(crate) client: Client,
    pub(crate) jetstream: jetstream::Context,
    link: watch::Sender<Link>,
    /// Names this process in its hints.
    pub(crate) origin: Arc<str>,
}

impl Stream {
    /// Connects, in the background if NATS is away, and goes on reconnecting for ever.
    ///
    /// `name` is what NATS shows; `origin` is unique to this process, so that it does not hear itself.
    ///
    /// # Errors
    /// When the URL is not a NATS URL. Several, of the servers of a cluster, are separated by commas.
    pub async fn connect(url: &str, name: &str, origin: &str) -> StreamResult<Self> {
        let (link, _) = watch::channel(Link::default());
        let events = link.clone();
        let client = ConnectOptions::new()
            .name(name)
            .retry_on_initial_connect()
            .subscription_capacity(SUBSCRIPTION_CAPACITY)
            .reconnect_delay_callback(|attempt| {
                Duration::from_millis((50 * u64::try_from(attempt).unwrap_or(u64::MAX)).min(1000))
            })
            .event_callback(move |event| {
                let events = events.clone();
                async move {
                    match event {
                        Event::Connected => events.send_modify(|link| {
                            link.up = true;
                            link.doubts += 1;
                        }),
                        Event::Disconnected | Event::Closed => events.send_modify(|link| {
                            link.up = false;
                            link.doubts += 1;
                        }),
                        Event::SlowConsumer(_) => events.send_modify(|link| link.doubts += 1),
                        _ => {}
                    }
                }
            })
            .connect(servers(url).map_err(StreamError::from_nats("reading the nats url"))?)
            .await
            .map_err(StreamError::from_nats("connecting"))?;
        let jetstream = jetstream::context::ContextBuilder::new().timeout(Duration::from_secs(5)).build(client.clone());
        Ok(Self { client, jetstream, link, origin: origin.into() })
    }

    /// Whether NATS is connected, and how often live copies may have been lost.
    #[must_use]
    pub fn link(&self) -> watch::Receiver<Link> {
        self.link.subscribe()
    }

    /// Whether NATS is connected right now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Creates the delivery and the event stream with `replicas` copies each, or brings them to their settings.
    /// Idempotent. Tells whether the delivery stream holds all that it should: one that is new does not.
    ///
    /// # Errors
    /// When JetStream is away, or cannot keep so many copies or bytes; the caller tries again.
    pub async fn ensure_log(&self, replicas: u8) -> StreamResult<bool> {
        let mut rebuilt = false;
        for (nth, (name, subjects, max_age, max_bytes)) in STREAMS.into_iter().enumerate() {
            let metadata = self.ensure_stream(name, subjects, max_age, max_bytes, replicas).await?;
            rebuilt |= nth == 0 && metadata.contains_key(REBUILT);
        }
        Ok(rebuilt)
    }

    /// A stream over `subjects` that republishes what it has stored, for live tails.
    async fn ensure_stream(
        &self,
        name: &str,
        subjects: &str,
        max_age: Duration,
        max_bytes: i64,
        replicas: u8,
    ) -> StreamResult<HashMap<String, String>> {
        let found = self.jetstream.get_stream(name).await.ok();
        let mut metadata = found.map(|stream| stream.cached_info().config.metadata.clone()).unwrap_or_default();
        // NATS puts words of its own there.
        metadata.retain(|key, _| key == REBUILT);
        let kept = metadata.clone();
        self.jetstream
            .create_or_update_stream(jetstream::stream::Config {
                name: name.to_owned(),
                subjects: vec![subjects.to_owned()],
                max_age,
                max_bytes,
                num_replicas: replicas.into(),
                discard: jetstream::stream::DiscardPolicy::Old,
                duplicate_window: Duration::from_secs(120),
                allow_direct: true,
                republish: Some(jetstream::stream::Republish {
                    source: subjects.to_owned(),
                    destination: format!("{}{subjects}", subjects::LIVE_PREFIX),
                    headers_only: false,
                }),
                metadata,
                ..Default::default()
            })
            .await
            .map(|_| kept)
            .map_err(StreamError::from_nats("creating a stream"))
    }

    /// Sends what is buffered and closes.
    pub async fn close(&self) {
        if let Err(error) = self.client.drain().await {
            tracing::debug!(%error, "nats was gone before the drain");
        }
    }
}
