//! The runner's socket: one at a time, requests side by side.

use std::time::Duration;

use axum::{
    extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code},
    response::Response,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinSet, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    frames::{self, Frame, Refusal, VERSION},
    requests,
};
use crate::{
    agents::SpawnSource,
    api::{Api, ApiError, Ready, SpawnBody, routes, start_agent},
    engine_link::{Registration, RunnerManifest},
    version,
};

/// Frames that wait to be written to a runner; one that reads nothing gets no more.
const OUTBOX: usize = 512;
/// Requests of one runner that are worked on at the same time. The socket is not read beyond it.
const MOST_REQUESTS: usize = 64;
const MAX_FRAME: usize = 1 << 20;
/// Largest output of a handler.
const MAX_OUTPUT: usize = 768 << 10;
/// Close code towards a runner whose place was taken.
const SUPERSEDED: u16 = 4001;
/// The capabilities of a runner that is gone are withdrawn after this time.
const GRACE: Duration = Duration::from_secs(60);

/// `GET /api/fleet/ws`
pub(crate) async fn open(ready: Ready, upgrade: WebSocketUpgrade) -> Response {
    let api = ready.api();
    upgrade.max_message_size(MAX_FRAME).on_upgrade(async move |socket| {
        let closing = api.inner.closing.clone();
        closing.run_until_cancelled_owned(serve(socket, api)).await;
    })
}

async fn serve(mut socket: WebSocket, api: Api) {
    let Some(broker) = api.broker() else { return };
    let (outbox, mut frames) = mpsc::channel(OUTBOX);
    let superseded = CancellationToken::new();
    let id = broker.runners.connect(outbox.clone(), superseded.clone());
    let mut requests: JoinSet<bool> = JoinSet::new();
    loop {
        let sent = tokio::select! {
            frame = frames.recv() => match frame {
                Some(frame) => socket.send(Message::text(frame)).await,
                None => break,
            },
            message = socket.recv(), if requests.len() < MOST_REQUESTS => match message {
                Some(Ok(Message::Text(text))) => {
                    match frames::decode(text.as_str()) {
                        Some(frame) => {
                            requests.spawn(handle(api.clone(), id, frame, outbox.clone()));
                            Ok(())
                        }
                        None => {
                            let refusal = Refusal::new("invalid_frame", "a frame is {v: 2, type, payload}");
                            socket.send(Message::text(frames::answer(None, Err(refusal)))).await
                        }
                    }
                }
                Some(Ok(Message::Binary(_) | Message::Ping(_) | Message::Pong(_))) => Ok(()),
                Some(Ok(Message::Close(_)) | Err(_)) | None => break,
            },
            Some(ended) = requests.join_next() => {
                if ended.is_ok_and(|leaves| leaves) {
                    while let Ok(frame) = frames.try_recv() {
                        // The runner may have closed first.
                        let _ = socket.send(Message::text(frame)).await;
                    }
                    close(&mut socket, close_code::NORMAL, "deregistered").await;
                    break;
                }
                Ok(())
            }
            () = superseded.cancelled() => {
                close(&mut socket, SUPERSEDED, "superseded").await;
                break;
            }
        };
        if sent.is_err() {
            break;
        }
    }
    if broker.runners.disconnect(id) {
        broker.services.link.set_handlers_live(false);
        broker.services.tasks.spawn(withdraw(api.clone()));
    }
}

/// Withdraws what the runner offered, unless one has come back.
async fn withdraw(api: Api) {
    let stop = api.inner.stop.clone();
    let waited = stop.run_until_cancelled(sleep(GRACE)).await;
    if let (Some(()), Some(broker)) = (waited, api.broker())
        && !broker.runners.is_connected()
    {
        broker.services.link.withdraw();
    }
}

async fn close(socket: &mut WebSocket, code: u16, reason: &'static str) {
    let frame = CloseFrame { code, reason: reason.into() };
    // The runner may have closed first.
    let _ = socket.send(Message::Close(Some(frame))).await;
}

/// Answers a request. Returns whether the runner leaves with it.
async fn handle(api: Api, id: u64, frame: Frame, outbox: mpsc::Sender<String>) -> bool {
    let Frame { kind, request_id, payload, .. } = frame;
    let outcome = answer(&api, id, &kind, payload).await;
    let leaves = kind == "deregister_node" && outcome.is_ok();
    // A runner that is gone needs no answer.
    let _ = outbox.send(frames::answer(request_id.as_deref(), outcome)).await;
    leaves
}

async fn answer(api: &Api, id: u64, kind: &str, payload: Value) -> Result<Value, Refusal> {
    let broker = api.broker().ok_or_else(|| Refusal::new("not_ready", "the broker is starting"))?;
    let link = &broker.services.link;
    match kind {
        "hello" => Ok(json!({ "broker_version": version::VERSION, "protocol_version": VERSION })),
        "register_node" => {
            let RegisterNode { manifest } = read(payload)?;
            if manifest.name.trim().is_empty() {
                return Err(Refusal::new("frame_failed", "the manifest needs a name"));
            }
            match link.register_runner(manifest).await {
                Ok(Registration::Accepted) => Ok(json!({ "registered": true })),
                Ok(Registration::Pending) => Ok(json!({ "registered": true, "pending": true })),
                Err(refused) => Err(Refusal::new(&refused.code, refused.message)),
            }
        }
        "register_handlers" => {
            let RegisterHandlers { names } = read(payload)?;
            let handlers_live = broker.runners.set_handlers(id, &names);
            link.set_handlers_live(handlers_live);
            Ok(json!({ "handlers_live": handlers_live }))
        }
        "handler_result" => {
            let HandlerResult { invocation_id, output, error } = read(payload)?;
            let outcome = match (output, error) {
                (Some(output), None) => Ok(output.unwrap_or(Value::Null)),
                (None, Some(error)) => Err(error),
                _ => return Err(Refusal::new("frame_failed", "exactly one of output and error is needed")),
            };
            let outcome = outcome.and_then(|output| {
                if output.to_string().len() > MAX_OUTPUT { Err("output_too_large".to_owned()) } else { Ok(output) }
            });
            if broker.runners.complete(&invocation_id, outcome) {
                Ok(json!({ "completed": true }))
            } else {
                Err(Refusal::new("unknown_invocation", "no such invocation is in flight"))
            }
        }
        "spawn_agent" => spawn_agent(api, payload).await,
        "deregister_node" => {
            broker.runners.fail_calls();
            link.withdraw();
            Ok(json!({ "deregistered": true }))
        }
        _ => requests::call(routes(api.clone()), &api.inner.key, kind, &payload).await,
    }
}

async fn spawn_agent(api: &Api, payload: Value) -> Result<Value, Refusal> {
    let broker = api.broker().ok_or_else(|| Refusal::new("not_ready", "the broker is starting"))?;
    let SpawnAgent { agent, initial_task, skip_relay_prompt, invocation_id } = read(payload)?;
    let body = SpawnBody {
        task: initial_task.or(agent.task),
        skip_relay_prompt: skip_relay_prompt.unwrap_or(agent.skip_relay_prompt),
        invocation_id: invocation_id.or_else(|| broker.runners.only_spawn()),
        ..agent
    };
    let refused = |error: crate::agents::AgentError| {
        let error = ApiError::from(error);
        Refusal { retryable: error.status().is_server_error(), ..Refusal::new(error.code(), error.message()) }
    };
    let spec = body.into_spec(&broker.services).map_err(refused)?;
    start_agent(broker, spec, SpawnSource::Runner).await.map_err(refused)
}

#[derive(Debug, Deserialize)]
struct RegisterNode {
    manifest: RunnerManifest,
}

#[derive(Debug, Deserialize)]
struct RegisterHandlers {
    names: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct HandlerResult {
    invocation_id: String,
    #[serde(default, deserialize_with = "relay_wire::field::present")]
    output: Option<Option<Value>>,
    #[serde(default)]
    error: Option<String>,
}

#[derive(Debug, Deserialize)]
struct SpawnAgent {
    agent: SpawnBody,
    #[serde(default, alias = "initialTask")]
    initial_task: Option<String>,
    #[serde(default, alias = "skipRelayPrompt")]
    skip_relay_prompt: Option<bool>,
    #[serde(default, alias = "invocationId")]
    invocation_id: Option<String>,
}

fn read<T: serde::de::DeserializeOwned>(payload: Value) -> Result<T, Refusal> {
    serde_json::from_value(payload).map_err(|error| Refusal::new("frame_failed", error.to_string()))
}
