//! `GET /v1/workspace/events/stream`: the event stream as server-sent events.
//!
//! Each event carries its number as `id`, so that a browser resumes with `Last-Event-ID`. A cursor that is no longer
//! kept gets one `resync` event, then the oldest events available.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    extract::State,
    http::HeaderMap,
    response::sse::{Event, KeepAlive, Sse},
};
use futures::Stream;
use relay_engine::{
    EngineError,
    events::{EventStream, LogEvent, StreamItem},
};
use relay_tasks::byte_budget::ByteLease;
use relay_wire::{
    events::{StreamClosed, StreamResync},
    field::ToValue as _,
};
use serde::Deserialize;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::access::{self, ObserverCredentials, ObserverWatch};
use crate::{
    connections::{CallerPermit, Client},
    error::ApiError,
    extract::Query,
    state::AppState,
};

/// Interval of keep-alive comments, so that proxies do not close an idle connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Delay between attempts while storage is unavailable.
const RETRY_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct StreamQuery {
    /// Token, for clients that cannot set a header. It takes precedence over the header.
    #[serde(default)]
    token: Option<String>,
    /// Resume after this number, as with `Last-Event-ID`.
    #[serde(default)]
    #[param(minimum = 0)]
    since: Option<i64>,
}

/// Streams the workspace's events as server-sent events.
///
/// Each event has its number as `id`, so that `Last-Event-ID` resumes after it. A `resync` event says that older ones
/// are no longer kept, a `close` event why the stream ends.
#[utoipa::path(
    get, path = "/v1/workspace/events/stream", tag = "observers",
    security(("workspace_key" = []), ("observer_token" = [])), params(StreamQuery),
    responses(
        (status = 200, body = String, content_type = "text/event-stream"),
        (status = 403, description = "insufficient_scope"),
        (status = 503, description = "too_many_connections"),
    ),
)]
pub(crate) async fn stream(
    State(state): State<AppState>,
    Query(query): Query<StreamQuery>,
    headers: HeaderMap,
    client: Client,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let last_id = match headers.get("last-event-id") {
        Some(id) => {
            let id = id.to_str().ok().and_then(|id| id.trim().parse::<i64>().ok());
            Some(id.ok_or_else(|| ApiError::invalid_request("Last-Event-ID must be a number"))?)
        }
        None => None,
    };
    // A browser reconnects to the same URL, with its first `since`: the header is the newer position.
    let since = last_id.or(query.since);
    if since.is_some_and(i64::is_negative) {
        return Err(ApiError::invalid_request("since must not be negative"));
    }
    let token = ObserverCredentials { token: query.token }.token(&headers)?;
    let access = access::authorize(&state, &token, &client).await?;
    let family = state.engine.workspaces().family(access.scope).await;
    let permit = state.connections.observers.try_acquire(family, access.scope, access.rate_limit_subject());
    let permit = permit.map_err(ApiError::too_many_connections)?;
    let events = state.engine.events().observe(access.scope, since).await?;
    let reader = StreamReader {
        watch: ObserverWatch::new(state.engine.clone(), access),
        events,
        stop: state.shutdown.token(),
        position_sent_at: Instant::now(),
        ended: false,
        memory: None,
        _permits: (permit, client),
    };
    let stream = futures::stream::unfold(reader, |mut reader| async move {
        let event = reader.next().await?;
        Some((Ok(event), reader))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

struct StreamReader {
    watch: ObserverWatch,
    events: EventStream,
    stop: CancellationToken,
    /// Time when the client last received a position.
    position_sent_at: Instant,
    ended: bool,
    /// Memory of the large event that is being written.
    memory: Option<ByteLease>,
    _permits: (CallerPermit, Client),
}

impl StreamReader {
    async fn next(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        // Polled again only after the connection has taken the previous event.
        self.memory = None;
        loop {
            tokio::select! {
                // As for sockets: events without a pause must not delay a drain or a revocation.
                biased;
                () = self.stop.cancelled() => return self.close("draining"),
                () = self.watch.wait_recheck() => {
                    if let Err(gone) = self.watch.recheck().await {
                        return self.close(gone.as_str());
                    }
                    if self.position_sent_at.elapsed() >= KEEP_ALIVE {
                        // Advances the cursor of a reader whose filter hides the events, so that it can resume from
                        // here.
                        self.position_sent_at = Instant::now();
                        return Some(Event::default().id((self.events.position() - 1).to_string()));
                    }
                }
                observed = self.events.next() => match observed {
                    Ok(StreamItem::Event(event)) if !self.watch.can_see(&event) => {}
                    Ok(StreamItem::Event(event)) => {
                        let text = match self.render(&event).await {
                            Ok(Some(text)) => text,
                            Ok(None) => continue,
                            Err(_) => return self.close("events cannot be read now: resume with Last-Event-ID"),
                        };
                        self.position_sent_at = Instant::now();
                        let text = String::from_utf8_lossy(&text);
                        return Some(Event::default().id(event.seq.to_string()).data(text));
                    }
                    Ok(StreamItem::Resync { oldest_seq, latest_seq }) => {
                        let data = StreamResync { oldest_seq, latest_seq }.to_value();
                        return Some(Event::default().event("resync").data(data.to_string()));
                    }
                    Ok(StreamItem::TooSlow) => return self.close("too slow: resume with Last-Event-ID"),
                    Err(error) => {
                        tracing::debug!(error = &error as &dyn std::error::Error, "observer events not readable, retrying");
                        tokio::time::sleep(RETRY_AFTER).await;
                    }
                }
            }
        }
    }

    async fn render(&mut self, event: &Arc<LogEvent>) -> Result<Option<Bytes>, EngineError> {
        self.memory = self.watch.reserve_large(event).await?;
        let text = self.watch.render(event).await?;
        if let Some(memory) = &mut self.memory {
            memory.shrink_to(text.as_ref().map_or(0, Bytes::len));
        }
        Ok(text)
    }

    /// Builds the last event, which says why the stream ends.
    fn close(&mut self, reason: &str) -> Option<Event> {
        self.ended = true;
        Some(Event::default().event("close").data(StreamClosed { reason }.to_value().to_string()))
    }
}
