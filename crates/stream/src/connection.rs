//! The connection to NATS, which may come and go.

use std::{sync::Arc, time::Duration};

use async_nats::{Client, ConnectOptions, Event, connection::State, jetstream};
use tokio::sync::watch;

use crate::{StreamError, StreamResult, subjects};

/// Messages buffered per subscription before NATS' copy is dropped; the silence check repairs that.
const SUBSCRIPTION_CAPACITY: usize = 1024;
/// The stream outlives the longest default delivery TTL (one hour) by ten minutes.
const LOG_MAX_AGE: Duration = Duration::from_secs(70 * 60);
/// Bytes that the log keeps before it drops the oldest: replay does not need them, Postgres has all.
const LOG_MAX_BYTES: i64 = 4 << 30;

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
    /// When the URL is not a NATS URL.
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
            .connect(url)
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

    /// Creates the delivery stream, or brings it to its settings. Idempotent.
    ///
    /// # Errors
    /// When JetStream is away; the caller tries again.
    pub async fn ensure_log(&self) -> StreamResult<()> {
        self.jetstream
            .create_or_update_stream(jetstream::stream::Config {
                name: "RELAY_DELIVERIES".to_owned(),
                subjects: vec![subjects::LOG_WILDCARD.to_owned()],
                max_age: LOG_MAX_AGE,
                max_bytes: LOG_MAX_BYTES,
                discard: jetstream::stream::DiscardPolicy::Old,
                duplicate_window: Duration::from_secs(120),
                allow_direct: true,
                republish: Some(jetstream::stream::Republish {
                    source: subjects::LOG_WILDCARD.to_owned(),
                    destination: format!("{}{}", subjects::LIVE_PREFIX, subjects::LOG_WILDCARD),
                    headers_only: false,
                }),
                ..Default::default()
            })
            .await
            .map(drop)
            .map_err(StreamError::from_nats("creating the delivery stream"))
    }

    /// Sends what is buffered and closes.
    pub async fn close(&self) {
        if let Err(error) = self.client.drain().await {
            tracing::debug!(%error, "nats was gone before the drain");
        }
    }
}
