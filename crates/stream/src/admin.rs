//! Health checks and cleanup of NATS for operators. Used by the admin use cases.

use std::time::Duration;

use async_nats::jetstream;
use relay_domain::WorkspaceScope;

use crate::{
    NatsServers, StreamError, StreamResult,
    connection::{STREAMS, StreamSpec},
    recovery::find_stream,
    subjects,
};

/// Timeout of one request to NATS.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// State of a NATS server and its JetStream.
#[derive(Debug, Clone)]
pub struct NatsHealth {
    /// Server version, such as `2.12.1`.
    pub version: String,
    /// Maximum message size, in bytes.
    pub max_payload: usize,
    /// Error that makes JetStream unusable, if any.
    pub jetstream_error: Option<String>,
    /// File storage that the account may use, in bytes; `None` for unlimited.
    pub storage_limit: Option<i64>,
    /// File storage that streams have reserved, in bytes.
    pub storage_reserved: u64,
    /// State of each of the engine's streams.
    pub streams: Vec<StreamHealth>,
}

/// Expected settings and actual state of a stream.
#[derive(Debug, Clone)]
pub struct StreamHealth {
    /// Name of the stream.
    pub name: &'static str,
    /// Expected retention.
    pub max_age: Duration,
    /// Expected storage reservation, in bytes.
    pub max_bytes: i64,
    /// `true` if the stream has to republish stored messages.
    pub republishes: bool,
    /// Actual state; `None` when the stream does not exist.
    pub found: Option<FoundStream>,
}

/// Actual state of a stream.
#[derive(Debug, Clone)]
pub struct FoundStream {
    /// Configured number of replicas.
    pub replicas: usize,
    /// Number of replicas that are up to date, including the leader; equals `replicas` on a single server.
    pub current: usize,
    /// `true` if the stream republishes stored messages.
    pub republishes: bool,
    /// Actual retention; zero means unlimited.
    pub max_age: Duration,
    /// Actual storage limit in bytes; -1 means unlimited.
    pub max_bytes: i64,
    /// Number of stored messages.
    pub messages: u64,
    /// Size of the stored messages, in bytes.
    pub bytes: u64,
}

/// Inspects NATS over a connection of its own.
///
/// # Errors
/// If NATS is unavailable for 5 s.
pub async fn inspect(servers: &NatsServers) -> StreamResult<NatsHealth> {
    let (client, context) = connect(servers).await?;
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
            // Streams cannot be read without JetStream; the report has the cause.
            health.jetstream_error = Some(error.to_string());
            return Ok(health);
        }
    }
    for StreamSpec { name, max_age, max_bytes, republishes, .. } in STREAMS {
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
        health.streams.push(StreamHealth { name, max_age, max_bytes, republishes, found });
    }
    Ok(health)
}

/// Removes all messages of a workspace from the streams and returns their number.
///
/// # Errors
/// If NATS is unavailable or refuses; the streams may then still hold messages of the workspace.
pub async fn purge_workspace(servers: &NatsServers, scope: WorkspaceScope) -> StreamResult<u64> {
    let (_client, context) = connect(servers).await?;
    let mut purged = 0;
    for (spec, subject) in STREAMS.iter().zip(subjects::workspace_filters(scope)) {
        let Some(stream) = find_stream(&context, spec.name).await? else { continue };
        let answer = stream.purge().filter(subject).await.map_err(StreamError::from_nats("purging a stream"))?;
        purged += answer.purged;
    }
    Ok(purged)
}

async fn connect(servers: &NatsServers) -> StreamResult<(async_nats::Client, jetstream::Context)> {
    let (addresses, options) = servers.parse()?;
    let connecting = options.name("relayctl").connection_timeout(ANSWER_TIMEOUT).connect(addresses);
    // One bound for all servers: the timeout of the client is for each of them.
    let client = match tokio::time::timeout(ANSWER_TIMEOUT, connecting).await {
        Ok(connected) => connected.map_err(StreamError::from_nats("connecting"))?,
        Err(elapsed) => return Err(StreamError { operation: "connecting", source: elapsed.into() }),
    };
    let context = jetstream::context::ContextBuilder::new().timeout(ANSWER_TIMEOUT).build(client.clone());
    Ok((client, context))
}
