//! `GET /v1/ws`: the observer socket, which sends every visible event in order as it happens.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    extract::{
        State,
        ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, rejection::WebSocketUpgradeRejection},
    },
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use futures::{
    SinkExt as _, StreamExt as _,
    stream::{SplitSink, SplitStream},
};
use relay_domain::events::EventSeq;
use relay_engine::{
    EngineError,
    error::Denial,
    events::{EventStream, LogEvent, StreamItem},
};
use relay_tasks::byte_budget::ByteLease;
use relay_wire::events::{ObserverFrame, PONG, encode_resync_ack};

use super::access::{self, ObserverCredentials, ObserverWatch};
use crate::{
    caller::SOCKET_PROTOCOL,
    connections::{CallerPermit, Client},
    error::ApiError,
    extract::Query,
    state::AppState,
};

/// Observers send small frames only.
const FRAME_LIMIT: usize = 64 * 1024;
const SOCKET_BUFFER: usize = 4 * 1024;
/// Time to collect events before a write, so that one write carries several.
const BATCH_WINDOW: Duration = Duration::from_millis(5);
/// Maximum frames per write.
const FRAMES_PER_WRITE: usize = 256;
/// A socket that accepts nothing for this long is closed.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay between attempts while storage is unavailable.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Maximum events that one `resync` replays; older ones are read from the log.
const RESYNC_LIMIT: i64 = 2000;
/// Maximum client frames per second; further ones wait in the socket.
const CLIENT_FRAMES_PER_SECOND: u32 = 50;

const POLICY: u16 = 1008;
const RESTART: u16 = 1012;
const TRY_AGAIN: u16 = 1013;

/// Opens the socket of an observer, which sends each visible event of the workspace as it happens.
///
/// The token is in `token`, in the `Authorization` header, or in a subprotocol: `relay.v1, relay.token.<token>`. An observer token needs the scope `stream:read`.
#[utoipa::path(
    get, path = "/v1/ws", operation_id = "observer", tag = "sockets",
    security(("workspace_key" = []), ("observer_token" = [])), params(ObserverCredentials),
    responses(
        (status = 101),
        (status = 401, description = "observer_token_forbidden"),
        (status = 503, description = "too_many_connections, workspace_busy"),
        (status = 426, body = String, content_type = "text/plain; charset=utf-8", description = "No upgrade was asked for"),
    ),
)]
pub(crate) async fn upgrade(
    State(state): State<AppState>,
    Query(query): Query<ObserverCredentials>,
    headers: HeaderMap,
    client: Client,
    socket: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response {
    let Ok(socket) = socket else {
        return (StatusCode::UPGRADE_REQUIRED, "Upgrade to a WebSocket").into_response();
    };
    match authorize_observer(&state, query, &headers, &client).await {
        Ok((watch, events, permit)) => socket
            .protocols([SOCKET_PROTOCOL])
            .max_message_size(FRAME_LIMIT)
            .max_frame_size(FRAME_LIMIT)
            .read_buffer_size(SOCKET_BUFFER)
            .write_buffer_size(SOCKET_BUFFER)
            .on_upgrade(move |socket| serve(socket, state, watch, events, (permit, client))),
        Err(refusal) => refusal.into_response(),
    }
}

async fn authorize_observer(
    state: &AppState,
    query: ObserverCredentials,
    headers: &HeaderMap,
    client: &Client,
) -> Result<(ObserverWatch, EventStream, CallerPermit), ApiError> {
    let token = query.socket_token(headers)?;
    if state.shutdown.is_requested() {
        return Err(ApiError::draining());
    }
    let access = match access::authorize(state, &token, client).await {
        Err(EngineError::Forbidden(Denial::InsufficientScope(_))) => return Err(ApiError::stream_forbidden()),
        other => other?,
    };
    let family = state.engine.workspaces().family(access.scope).await;
    let permit = state.connections.observers.try_acquire(family, access.scope, access.rate_limit_subject());
    let permit = permit.map_err(ApiError::too_many_connections)?;
    let events = state.engine.events().observe(access.scope, None).await?;
    Ok((ObserverWatch::new(state.engine.clone(), access), events, permit))
}

/// End of the socket.
enum Closing {
    Left,
    Close(u16, String),
}

struct Observer {
    state: AppState,
    watch: ObserverWatch,
    events: EventStream,
    /// First event number that this connection receives live.
    started_at: i64,
    sink: SplitSink<WebSocket, Message>,
}

async fn serve<P>(socket: WebSocket, state: AppState, watch: ObserverWatch, events: EventStream, _places: P) {
    let (sink, mut inbound) = socket.split();
    let started_at = events.position();
    let mut observer = Observer { state, watch, events, started_at, sink };
    let end = observer.run(&mut inbound).await;
    // The peer may have closed already, and the socket ends either way.
    let _ = match end {
        Closing::Close(code, reason) => {
            let close = Message::Close(Some(CloseFrame { code, reason: reason.into() }));
            tokio::time::timeout(WRITE_TIMEOUT, observer.sink.send(close)).await
        }
        // The reply to the peer's close frame is queued in the socket.
        Closing::Left => tokio::time::timeout(WRITE_TIMEOUT, observer.sink.close()).await,
    };
}

impl Observer {
    async fn run(&mut self, inbound: &mut SplitStream<WebSocket>) -> Closing {
        let stop = self.state.shutdown.token();
        let mut input_rate = InputRate::default();
        loop {
            let next = tokio::select! {
                // A drain and a revocation come first: a socket with events or frames without a pause must not outlive
                // them.
                biased;
                () = stop.cancelled() => return Closing::Close(RESTART, "draining".to_owned()),
                () = self.watch.wait_recheck() => {
                    match self.watch.recheck().await {
                        Ok(()) => Ok(()),
                        Err(gone) => return Closing::Close(POLICY, gone.as_str().to_owned()),
                    }
                }
                message = inbound.next(), if input_rate.has_room() => {
                    input_rate.count_frame();
                    self.on_message(message).await
                }
                observed = self.events.next() => self.on_observed(observed).await,
            };
            if let Err(end) = next {
                return end;
            }
        }
    }

    async fn on_observed(&mut self, observed: Result<StreamItem, EngineError>) -> Result<(), Closing> {
        let first = match observed {
            Ok(StreamItem::Event(event)) => event,
            // Only streams that start in the past can be out of step.
            Ok(StreamItem::Resync { .. }) => return Ok(()),
            Ok(StreamItem::TooSlow) => return Err(close_slow_observer()),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "observer events not readable, retrying");
                tokio::time::sleep(RETRY_AFTER).await;
                return Ok(());
            }
        };
        tokio::time::sleep(BATCH_WINDOW).await;
        let mut batch = vec![first];
        while batch.len() < FRAMES_PER_WRITE {
            match self.events.try_next() {
                Some(StreamItem::Event(event)) => batch.push(event),
                Some(StreamItem::TooSlow) => return Err(close_slow_observer()),
                Some(StreamItem::Resync { .. }) | None => break,
            }
        }
        self.write(&batch).await
    }

    /// Writes the events that the observer may see.
    async fn write(&mut self, events: &[Arc<LogEvent>]) -> Result<(), Closing> {
        let mut frames = Vec::new();
        let visible: Vec<_> = events.iter().filter(|event| self.watch.can_see(event)).collect();
        for event in visible {
            match self.render(event).await {
                Ok((text, memory)) => {
                    metrics::counter!(relay_domain::metric_names::OBSERVER_FRAMES).increment(1);
                    // Nothing for a message that retention has removed. Encoded JSON is always UTF-8.
                    frames.extend(text.and_then(|text| Utf8Bytes::try_from(text).ok()).map(Message::Text));
                    // A large event is written before the next one is read.
                    if memory.is_some() {
                        self.send(std::mem::take(&mut frames)).await?;
                    }
                }
                Err(_) => {
                    self.send(frames).await?;
                    let reason = "events cannot be read now: resume from the log";
                    return Err(Closing::Close(TRY_AGAIN, reason.to_owned()));
                }
            }
        }
        self.send(frames).await
    }

    async fn render(&self, event: &Arc<LogEvent>) -> Result<(Option<Bytes>, Option<ByteLease>), EngineError> {
        let mut memory = self.watch.reserve_large(event).await?;
        let text = self.watch.render(event).await?;
        if let Some(memory) = &mut memory {
            memory.shrink_to(text.as_ref().map_or(0, Bytes::len));
        }
        Ok((text, memory))
    }

    async fn send(&mut self, frames: Vec<Message>) -> Result<(), Closing> {
        let written = async {
            for frame in frames {
                self.sink.feed(frame).await?;
            }
            self.sink.flush().await
        };
        match tokio::time::timeout(WRITE_TIMEOUT, written).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Closing::Left),
            Err(_) => Err(close_slow_observer()),
        }
    }

    async fn on_message(&mut self, message: Option<Result<Message, axum::Error>>) -> Result<(), Closing> {
        let text = match message {
            None | Some(Err(_) | Ok(Message::Close(_))) => return Err(Closing::Left),
            Some(Ok(Message::Text(text))) => text,
            // The socket answers pings itself.
            Some(Ok(_)) => return Ok(()),
        };
        match ObserverFrame::decode(&text) {
            Some(ObserverFrame::Ping) => self.send(vec![Message::Text(PONG.into())]).await,
            Some(ObserverFrame::Resync { last_seen_seq }) => self.resync(last_seen_seq).await,
            // Subscriptions have no effect: an observer receives everything it may see. Unknown and malformed frames
            // are ignored, as clients expect.
            Some(ObserverFrame::Subscribe | ObserverFrame::Pong) | None => Ok(()),
        }
    }

    /// Replays the events between the observer's last number and the start of this connection.
    async fn resync(&mut self, last_seen_seq: EventSeq) -> Result<(), Closing> {
        let scope = self.watch.access().scope;
        let oldest = last_seen_seq.max(self.started_at - 1 - RESYNC_LIMIT).max(0);
        // Not whole if older events are left out, or for a number that this log has not assigned: the ack says so.
        let (mut since, mut replayed, mut whole) =
            (oldest, 0, oldest == last_seen_seq && last_seen_seq < self.events.position());
        while since + 1 < self.started_at {
            let (events, _memory) = match self.state.engine.events().read_between(scope, since, self.started_at).await {
                Ok(read) => read,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "observer resync not readable, retrying");
                    tokio::time::sleep(RETRY_AFTER).await;
                    continue;
                }
            };
            let Some(last) = events.last().map(|event| event.seq) else { break };
            // Retention has removed events that the observer asks for.
            whole &= events.first().is_some_and(|first| first.seq == since + 1);
            since = last;
            let events: Vec<Arc<LogEvent>> = events.into_iter().map(Arc::new).collect();
            replayed += events.iter().filter(|event| self.watch.can_see(event)).count();
            self.write(&events).await?;
        }
        let ack = encode_resync_ack(last_seen_seq, self.events.position() - 1, replayed, !whole);
        self.send(vec![Message::Text(ack.into())]).await
    }
}

fn close_slow_observer() -> Closing {
    metrics::counter!(relay_domain::metric_names::OBSERVERS_CUT).increment(1);
    Closing::Close(TRY_AGAIN, "observer too slow: resume from the log".to_owned())
}

/// Rate limit of client frames.
struct InputRate {
    since: tokio::time::Instant,
    left: u32,
}

impl Default for InputRate {
    fn default() -> Self {
        Self { since: tokio::time::Instant::now(), left: CLIENT_FRAMES_PER_SECOND }
    }
}

impl InputRate {
    /// Returns whether another frame may be read in this second.
    fn has_room(&mut self) -> bool {
        if self.since.elapsed() >= Duration::from_secs(1) {
            *self = Self::default();
        }
        self.left > 0
    }

    fn count_frame(&mut self) {
        self.left = self.left.saturating_sub(1);
    }
}
