//! `GET /v1/ws`: every event that the observer may see, in order, as it happens.

use std::{sync::Arc, time::Duration};

use axum::{
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
use relay_engine::{
    EngineError,
    events::{EventStream, LogEvent, Observed},
};
use relay_wire::event::{ObserverFrame, resync_ack};

use super::{
    Seat,
    access::{ObserverCredentials, Watch},
};
use crate::{error::ApiError, extract::Query, state::AppState};

/// Observers have little to say.
const FRAME_LIMIT: usize = 64 * 1024;
const SOCKET_BUFFER: usize = 4 * 1024;
/// Events gather this long before they are written: one write for many.
const LINGER: Duration = Duration::from_millis(5);
/// Frames of one write at most.
const WRITTEN_AT_ONCE: usize = 256;
/// A socket that takes nothing for this long is closed.
const STUCK: Duration = Duration::from_secs(10);
/// How long to wait for a storage that is away.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Events that one `resync` replays at most; what is older is read from the log.
const RESYNC_LIMIT: i64 = 2000;
/// Client frames of one second at most; the rest waits in the socket.
const REQUESTS_A_SECOND: u32 = 50;

const POLICY: u16 = 1008;
const RESTART: u16 = 1012;
const TRY_AGAIN: u16 = 1013;

/// Opens the socket of an observer: each event of the workspace that it may see, as it happens.
///
/// The token goes into `token` or into the `Authorization` header. An observer token needs the scope `stream:read`.
#[utoipa::path(
    get, path = "/v1/ws", operation_id = "observer", tag = "sockets",
    security(("workspace_key" = []), ("observer_token" = [])), params(ObserverCredentials),
    responses(
        (status = 101),
        (status = 401, description = "observer_token_forbidden"),
        (status = 426, body = String, content_type = "text/plain; charset=utf-8", description = "No upgrade was asked for"),
    ),
)]
pub(crate) async fn upgrade(
    State(state): State<AppState>,
    Query(query): Query<ObserverCredentials>,
    headers: HeaderMap,
    socket: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response {
    let Ok(socket) = socket else {
        return (StatusCode::UPGRADE_REQUIRED, "Upgrade to a WebSocket").into_response();
    };
    match admit(&state, query, &headers).await {
        Ok((watch, events, seat)) => socket
            .max_message_size(FRAME_LIMIT)
            .max_frame_size(FRAME_LIMIT)
            .read_buffer_size(SOCKET_BUFFER)
            .write_buffer_size(SOCKET_BUFFER)
            .on_upgrade(move |socket| serve(socket, state, watch, events, seat)),
        Err(refusal) => refusal.into_response(),
    }
}

async fn admit(
    state: &AppState,
    query: ObserverCredentials,
    headers: &HeaderMap,
) -> Result<(Watch, EventStream, Seat), ApiError> {
    let token = query.token(headers)?;
    if state.shutdown.is_asked() {
        return Err(ApiError::unavailable("workspace_busy", "This gateway is draining, try again"));
    }
    let access = match state.engine.observe(&token).await {
        // Clients of the socket know one refusal only.
        Err(EngineError::InsufficientScope(_)) => {
            return Err(ApiError::unauthorized("observer_token_forbidden", "The token lacks the scope stream:read"));
        }
        other => other?,
    };
    let seat = state.observers.take(access.scope)?;
    let events = state.engine.observe_events(access.scope, None).await?;
    Ok((Watch::new(state.engine.clone(), access), events, seat))
}

/// Why the socket is over.
enum End {
    /// The peer has left.
    Left,
    Close(u16, String),
}

struct Observer {
    state: AppState,
    watch: Watch,
    events: EventStream,
    /// The first number that this connection could show by itself.
    started_at: i64,
    sink: SplitSink<WebSocket, Message>,
}

async fn serve(socket: WebSocket, state: AppState, watch: Watch, events: EventStream, _seat: Seat) {
    let (sink, mut inbound) = socket.split();
    let started_at = events.position();
    let mut observer = Observer { state, watch, events, started_at, sink };
    let end = observer.run(&mut inbound).await;
    let _ = match end {
        End::Close(code, reason) => {
            let close = Message::Close(Some(CloseFrame { code, reason: reason.into() }));
            tokio::time::timeout(STUCK, observer.sink.send(close)).await
        }
        // The answer to the peer's close is queued in the socket.
        End::Left => tokio::time::timeout(STUCK, observer.sink.close()).await,
    };
}

impl Observer {
    async fn run(&mut self, inbound: &mut SplitStream<WebSocket>) -> End {
        let stop = self.state.shutdown.token();
        let mut budget = Budget::default();
        loop {
            let next = tokio::select! {
                biased;
                () = stop.cancelled() => return End::Close(RESTART, "draining".to_owned()),
                () = self.watch.due() => {
                    match self.watch.recheck().await {
                        Ok(()) => Ok(()),
                        Err(gone) => return End::Close(POLICY, gone.as_str().to_owned()),
                    }
                }
                message = inbound.next(), if budget.is_left() => {
                    budget.spend();
                    self.on_message(message).await
                }
                observed = self.events.next() => self.on_observed(observed).await,
            };
            if let Err(end) = next {
                return end;
            }
        }
    }

    async fn on_observed(&mut self, observed: Result<Observed, EngineError>) -> Result<(), End> {
        let first = match observed {
            Ok(Observed::Event(event)) => event,
            // Only streams that begin in the past are out of step.
            Ok(Observed::Resync { .. }) => return Ok(()),
            Ok(Observed::TooSlow) => return Err(too_slow()),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "an observer waits for storage");
                tokio::time::sleep(RETRY_AFTER).await;
                return Ok(());
            }
        };
        tokio::time::sleep(LINGER).await;
        let mut batch = vec![first];
        while batch.len() < WRITTEN_AT_ONCE {
            match self.events.try_next() {
                Some(Observed::Event(event)) => batch.push(event),
                Some(Observed::TooSlow) => return Err(too_slow()),
                Some(Observed::Resync { .. }) | None => break,
            }
        }
        self.write(&batch).await
    }

    /// Writes what the observer may see of these events.
    async fn write(&mut self, events: &[Arc<LogEvent>]) -> Result<(), End> {
        let mut frames = Vec::new();
        for event in events.iter().filter(|event| self.watch.sees(event)) {
            match self.watch.text(event).await {
                Ok(text) => frames.extend(text.and_then(|text| Utf8Bytes::try_from(text).ok()).map(Message::Text)),
                Err(_) => {
                    self.send(frames).await?;
                    let reason = "events cannot be read now: resume from the log";
                    return Err(End::Close(TRY_AGAIN, reason.to_owned()));
                }
            }
        }
        metrics::counter!(relay_domain::metric_names::OBSERVER_FRAMES)
            .increment(u64::try_from(frames.len()).unwrap_or(0));
        self.send(frames).await
    }

    async fn send(&mut self, frames: Vec<Message>) -> Result<(), End> {
        let written = async {
            for frame in frames {
                self.sink.feed(frame).await?;
            }
            self.sink.flush().await
        };
        match tokio::time::timeout(STUCK, written).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(End::Left),
            Err(_) => Err(too_slow()),
        }
    }

    async fn on_message(&mut self, message: Option<Result<Message, axum::Error>>) -> Result<(), End> {
        let text = match message {
            None | Some(Err(_) | Ok(Message::Close(_))) => return Err(End::Left),
            Some(Ok(Message::Text(text))) => text,
            // Pings are answered by the socket itself.
            Some(Ok(_)) => return Ok(()),
        };
        match ObserverFrame::decode(&text) {
            Some(ObserverFrame::Ping) => self.send(vec![Message::Text(r#"{"type":"pong"}"#.into())]).await,
            Some(ObserverFrame::Resync { last_seen_seq }) => self.resync(last_seen_seq).await,
            // Subscriptions narrow nothing: an observer gets all that it may see. What is unknown or broken
            // is ignored, as clients expect.
            Some(ObserverFrame::Subscribe | ObserverFrame::Pong) | None => Ok(()),
        }
    }

    /// Shows again what lies between the number that the observer saw last and where this connection began.
    async fn resync(&mut self, last_seen_seq: i64) -> Result<(), End> {
        let scope = self.watch.access().scope;
        let oldest = last_seen_seq.max(self.started_at - 1 - RESYNC_LIMIT).max(0);
        let (mut since, mut replayed, mut whole) =
            (oldest, 0, oldest == last_seen_seq && last_seen_seq < self.events.position());
        while since + 1 < self.started_at {
            let events = match self.state.engine.events_between(scope, since, self.started_at).await {
                Ok(events) => events,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "an observer's resync waits");
                    tokio::time::sleep(RETRY_AFTER).await;
                    continue;
                }
            };
            let Some(last) = events.last().map(|event| event.seq) else { break };
            // Retention has passed what the observer asks for.
            whole &= events.first().is_some_and(|first| first.seq == since + 1);
            since = last;
            let events: Vec<Arc<LogEvent>> = events.into_iter().map(Arc::new).collect();
            replayed += events.iter().filter(|event| self.watch.sees(event)).count();
            self.write(&events).await?;
        }
        let ack = resync_ack(last_seen_seq, self.events.position() - 1, replayed, !whole);
        self.send(vec![Message::Text(ack.into())]).await
    }
}

fn too_slow() -> End {
    metrics::counter!(relay_domain::metric_names::OBSERVERS_CUT).increment(1);
    End::Close(TRY_AGAIN, "observer too slow: resume from the log".to_owned())
}

/// How much the observer may still say this second.
struct Budget {
    since: tokio::time::Instant,
    left: u32,
}

impl Default for Budget {
    fn default() -> Self {
        Self { since: tokio::time::Instant::now(), left: REQUESTS_A_SECOND }
    }
}

impl Budget {
    /// Counts one look at the socket.
    fn is_left(&mut self) -> bool {
        if self.since.elapsed() >= Duration::from_secs(1) {
            *self = Self::default();
        }
        self.left > 0
    }

    fn spend(&mut self) {
        self.left = self.left.saturating_sub(1);
    }
}
