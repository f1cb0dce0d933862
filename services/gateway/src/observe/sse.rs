//! `GET /v1/workspace/events/stream`: the socket's twin for whoever prefers server-sent events.
//!
//! Each event carries its number as `id`, so that a browser resumes with `Last-Event-ID` by itself. A cursor
//! that is no longer kept gets one `resync` event, then the oldest events there are.

use std::{convert::Infallible, time::Duration};

use axum::{
    extract::State,
    http::HeaderMap,
    response::sse::{Event, KeepAlive, Sse},
};
use futures::Stream;
use relay_engine::events::{EventStream, Observed};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::access::{ObserverCredentials, Watch};
use crate::{error::ApiError, extract::Query, state::AppState};

/// A comment goes out after this much silence, so that nothing in between gives the connection up.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long to wait for a storage that is away.
const RETRY_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct StreamQuery {
    /// A token, where no header can be set. It wins over the header.
    #[serde(default)]
    token: Option<String>,
    /// Resume behind this number, as `Last-Event-ID` does.
    #[serde(default)]
    #[param(minimum = 0)]
    since: Option<i64>,
}

/// Streams the workspace's events as server-sent events.
///
/// Each event has its number as `id`, so that `Last-Event-ID` resumes behind it. An event `resync` says that older ones
/// are no longer kept, an event `close` why the stream ends.
#[utoipa::path(
    get, path = "/v1/workspace/events/stream", tag = "observers",
    security(("workspace_key" = []), ("observer_token" = [])), params(StreamQuery),
    responses(
        (status = 200, body = String, content_type = "text/event-stream"),
        (status = 403, description = "insufficient_scope"),
    ),
)]
pub(crate) async fn stream(
    State(state): State<AppState>,
    Query(query): Query<StreamQuery>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let last_id = match headers.get("last-event-id") {
        Some(id) => {
            let id = id.to_str().ok().and_then(|id| id.trim().parse::<i64>().ok());
            Some(id.ok_or_else(|| ApiError::invalid_request("Last-Event-ID must be a number"))?)
        }
        None => None,
    };
    let since = last_id.or(query.since);
    if since.is_some_and(i64::is_negative) {
        return Err(ApiError::invalid_request("since must not be negative"));
    }
    let token = ObserverCredentials { token: query.token }.token(&headers)?;
    let access = state.engine.observe(&token).await?;
    let seat = state.observers.take(access.scope)?;
    let events = state.engine.observe_events(access.scope, since).await?;
    let reader = Reader {
        watch: Watch::new(state.engine.clone(), access),
        events,
        stop: state.shutdown.token(),
        told_at: Instant::now(),
        over: false,
        _seat: seat,
    };
    let stream = futures::stream::unfold(reader, |mut reader| async move {
        let event = reader.next().await?;
        Some((Ok(event), reader))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

struct Reader {
    watch: Watch,
    events: EventStream,
    stop: CancellationToken,
    /// When the reader last heard its position.
    told_at: Instant,
    over: bool,
    _seat: super::Seat,
}

impl Reader {
    async fn next(&mut self) -> Option<Event> {
        if self.over {
            return None;
        }
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return self.close("draining"),
                () = self.watch.due() => {
                    if let Err(gone) = self.watch.recheck().await {
                        return self.close(gone.as_str());
                    }
                    if self.told_at.elapsed() >= KEEP_ALIVE {
                        // Moves a filtered reader's cursor on, so that it can resume from here.
                        self.told_at = Instant::now();
                        return Some(Event::default().id((self.events.position() - 1).to_string()));
                    }
                }
                observed = self.events.next() => match observed {
                    Ok(Observed::Event(event)) if !self.watch.sees(&event) => {}
                    Ok(Observed::Event(event)) => {
                        let text = match self.watch.text(&event).await {
                            Ok(Some(text)) => text,
                            Ok(None) => continue,
                            Err(_) => return self.close("events cannot be read now: resume with Last-Event-ID"),
                        };
                        self.told_at = Instant::now();
                        let text = String::from_utf8_lossy(&text);
                        return Some(Event::default().id(event.seq.to_string()).data(text));
                    }
                    Ok(Observed::Resync { oldest_seq, latest_seq }) => {
                        let data = json!({ "type": "resync", "oldest_seq": oldest_seq, "latest_seq": latest_seq });
                        return Some(Event::default().event("resync").data(data.to_string()));
                    }
                    Ok(Observed::TooSlow) => return self.close("too slow: resume with Last-Event-ID"),
                    Err(error) => {
                        tracing::debug!(error = &error as &dyn std::error::Error, "an observer waits for storage");
                        tokio::time::sleep(RETRY_AFTER).await;
                    }
                }
            }
        }
    }

    /// The last event: why the stream ends.
    fn close(&mut self, reason: &str) -> Option<Event> {
        self.over = true;
        Some(Event::default().event("close").data(json!({ "type": "close", "reason": reason }).to_string()))
    }
}
