//! The event stream and the replay of missed events.

use axum::{
    Json,
    extract::ws::{CloseFrame, Message, WebSocket, close_code},
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use tokio::time::{Duration, Instant, interval, timeout};

use super::{
    error::ApiError,
    extract::{Query, Ready, Upgrade},
    inbound::{Inbound, MAX_READ, close_too_large},
};
use crate::events::{Next, Subscription};

const PING_EVERY: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SinceQuery {
    #[serde(rename = "sinceSeq", alias = "since_seq")]
    since_seq: Option<u64>,
}

/// `GET /api/events/replay`
pub(super) async fn replay(ready: Ready, Query(query): Query<SinceQuery>) -> Json<Value> {
    let replay = ready.services.hub.replay(query.since_seq.unwrap_or(0));
    // Put in as they were encoded. Each is valid JSON, so none is left out.
    let events: Vec<Box<RawValue>> =
        replay.events.iter().filter_map(|event| RawValue::from_string(event.to_string()).ok()).collect();
    Json(json!({ "events": events, "gap": replay.gap, "oldestAvailable": replay.oldest_available }))
}

/// `GET /ws`
pub(super) async fn stream(ready: Ready, Query(query): Query<SinceQuery>, Upgrade(upgrade): Upgrade) -> Response {
    match ready.services.hub.subscribe(query.since_seq.unwrap_or(0)) {
        Some(subscription) => {
            let closing = ready.0.inner.closing.clone();
            upgrade.max_message_size(MAX_READ).on_upgrade(async move |socket| {
                closing.run_until_cancelled_owned(serve(socket, subscription)).await;
            })
        }
        None => ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_subscribers", "64 subscribers are connected")
            .into_response(),
    }
}

async fn serve(mut socket: WebSocket, mut subscription: Subscription) {
    let mut pings = interval(PING_EVERY);
    let mut last_inbound = Instant::now();
    loop {
        let sent = tokio::select! {
            next = subscription.next() => match next {
                Next::Events(events) => send_all(&mut socket, events).await,
                Next::FellBehind => {
                    let frame = CloseFrame { code: close_code::AGAIN, reason: "too slow".into() };
                    // The reader may have gone.
                    let _ = send(&mut socket, Message::Close(Some(frame))).await;
                    return;
                }
            },
            message = socket.recv() => {
                last_inbound = Instant::now();
                match Inbound::from(message) {
                    Inbound::Frame(_) => Ok(()),
                    Inbound::TooLarge => return close_too_large(&mut socket).await,
                    Inbound::Ended => return,
                }
            }
            _ = pings.tick() => {
                if last_inbound.elapsed() >= SILENCE {
                    return;
                }
                send(&mut socket, Message::Ping(Vec::new().into())).await
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

async fn send_all(socket: &mut WebSocket, events: Vec<std::sync::Arc<str>>) -> Result<(), SubscriberClosed> {
    for event in events {
        send(socket, Message::text(&*event)).await?;
    }
    Ok(())
}

/// Sends to a reader that takes each frame in time. Any other would keep its place among the subscribers for ever.
async fn send(socket: &mut WebSocket, message: Message) -> Result<(), SubscriberClosed> {
    match timeout(SILENCE, socket.send(message)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(SubscriberClosed),
    }
}

/// The subscriber has closed the socket, or a write to it timed out.
struct SubscriberClosed;
