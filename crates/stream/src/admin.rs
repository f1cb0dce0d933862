//! What operators ask NATS: `relay_engine::admin`.

use std::time::Duration;

use async_nats::{ConnectOptions, jetstream};
use relay_domain::WorkspaceScope;

use crate::{
    StreamError, StreamResult,
    connection::{STREAMS, servers},
    recovery::find,
    subjects,
};

/// How long to wait for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A NATS server and its JetStream, as doctor needs them.
#[derive(Debug, Clone)]
pub struct NatsHealth {
    /// As in `2.12.1`.
    pub version: String,
    /// The largest message, in bytes.
    pub max_payload: usize,
    /// Why JetStream cannot be used, if it cannot.
    pub jetstream_error: Option<String>,
    /// Bytes of file storage that the account may use; `None` for any.
    pub storage_limit: Option<i64>,
    /// Bytes of it that streams have reserved.
    pub storage_reserved: u64,
    /// The engine's streams.
    pub streams: Vec<StreamHealth>,
}

/// One of the engine's streams.
#[derive(Debug, Clone)]
pub struct StreamHealth {
    /// Its name.
    pub name: &'static str,
    /// How long it should keep what it holds.
    pub max_age: Duration,
    /// Bytes that it should reserve.
    pub max_bytes: i64,
    /// `None` when it is not there.
    pub found: Option<FoundStream>,
}

/// A stream that is there.
#[derive(Debug, Clone)]
pub struct FoundStream {
    /// Copies that are kept.
    pub replicas: usize,
    /// Copies that are up to date, the leader's included; as many as `replicas` on a single server.
    pub current: usize,
    /// Whether live copies go out.
    pub republishes: bool,
    /// How long it keeps what it holds; zero for ever.
    pub max_age: Duration,
    /// Bytes that it keeps; -1 for any number.
    pub max_bytes: i64,
    /// Messages in it.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Looks at NATS over a connection of its own.
///
/// # Errors
/// When it cannot be reached within 5 s.
pub async fn examine(url: &str) -> StreamResult<NatsHealth> {
    let (client, context) = connect(url).await?;
    let info = client.server_info();
    let mut health = NatsHealth {
        version: info.version.clone(),
        max_payload: info.max_payload,
        jetstream_error: None,
        storage_limit: None,
        storage_reserved: 0,
        streams: Vec::new(),
    };
    match context.query_account().await {
        Ok(account) => {
            health.storage_limit = account.limits.max_storage;
            health.storage_reserved = account.reserved_storage;
        }
        Err(error) => {
            health.jetstream_error = Some(error.to_string());
            return Ok(health);
        }
    }
    for (name, _, max_age, max_bytes) in STREAMS {
        let found = context.get_stream(name).await.ok().map(|stream| {
            let info = stream.cached_info();
            let followers = info
                .cluster
                .as_ref()
                .map_or(0, |cluster| cluster.replicas.iter().filter(|peer| peer.current && !peer.offline).count());
            FoundStream {
                replicas: info.config.num_replicas,
                current: followers + 1,
                republishes: info.config.republish.is_some(),
                max_age: info.config.max_age,
                max_bytes: info.config.max_bytes,
                messages: info.state.messages,
                bytes: info.state.bytes,
            }
        });
        health.streams.push(StreamHealth { name, max_age, max_bytes, found });
    }
    Ok(health)
}

/// Removes what the streams hold of a workspace. Returns how many messages that were.
///
/// # Errors
/// When NATS cannot be reached, does not answer, or refuses: then what it holds is not known.
pub async fn forget_workspace(url: &str, scope: WorkspaceScope) -> StreamResult<u64> {
    let (_client, context) = connect(url).await?;
    let mut purged = 0;
    for ((name, ..), subject) in STREAMS.iter().zip(subjects::all_of_workspace(scope)) {
        let Some(stream) = find(&context, name).await? else { continue };
        let answer = stream.purge().filter(subject).await.map_err(StreamError::from_nats("purging a stream"))?;
        purged += answer.purged;
    }
    Ok(purged)
}

async fn connect(url: &str) -> StreamResult<(async_nats::Client, jetstream::Context)> {
    let servers = servers(url).map_err(StreamError::from_nats("reading the nats url"))?;
    let connecting = ConnectOptions::new().name("relayctl").connection_timeout(PATIENCE).connect(servers);
    let client = match tokio::time::timeout(PATIENCE, connecting).await {
        Ok(connected) => connected.map_err(StreamError::from_nats("connecting"))?,
        Err(elapsed) => return Err(StreamError { doing: "connecting", source: elapsed.into() }),
    };
    let context = jetstream::context::ContextBuilder::new().timeout(PATIENCE).build(client.clone());
    Ok((client, context))
}
