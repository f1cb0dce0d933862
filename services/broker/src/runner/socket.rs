//! The runner's socket: one at a time, requests side by side.

use std::time::Duration;

use axum::{
    extract::ws::{CloseFrame, Message, WebSocket, close_code},
    response::Response,
};
use serde_json::{Value, json};
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    outbox::Outbox,
    requests::{self, truncate},
};
use crate::{
    agents::SpawnSource,
    api::{
        Api, ApiError, Broker, Inbound, MAX_READ, Ready, Upgrade, close_too_large, routes, start_agent,
        types::{
            HandlerResult, Hello, RegisterHandlers, RegisterNode, RunnerAnswer, SpawnAgent, SpawnBody,
            runner_frame::{self, Frame, Refusal, VERSION},
        },
    },
    engine_link::Registration,
    unreadable_json::unreadable,
    version,
};

/// Maximum number of concurrent requests of one runner. The socket is not read beyond it.
const MAX_REQUESTS: usize = 64;
/// Largest output of a handler.
const MAX_OUTPUT: usize = 768 << 10;
/// Close code towards a runner whose place was taken.
const SUPERSEDED: u16 = 4001;
/// Time without progress after which the connection of a runner without calls in flight is closed.
const SILENCE: Duration = Duration::from_secs(60);
/// The same of a runner with calls in flight: a handler that computes on the runner's only thread reads nothing and
/// answers no ping, and its call must not be given back while it works. It is the time that a handler has.
const BUSY_SILENCE: Duration = Duration::from_secs(15 * 60);
const PING_EVERY: Duration = Duration::from_secs(30);
/// A runner that reads nothing gets no reason when its connection ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which the capabilities of a disconnected runner are withdrawn.
const GRACE: Duration = Duration::from_secs(60);

/// `GET /api/fleet/ws`
pub(crate) async fn open(ready: Ready, Upgrade(upgrade): Upgrade) -> Response {
    let api = ready.api();
    upgrade.max_message_size(MAX_READ).on_upgrade(async move |socket| {
        let closing = api.inner.closing.clone();
        closing.run_until_cancelled_owned(serve(socket, api)).await;
    })
}

async fn serve(mut socket: WebSocket, api: Api) {
    let Some(broker) = api.broker() else { return };
    let (outbox, mut frames) = Outbox::new();
    let superseded = CancellationToken::new();
    let id = broker.runners.connect(outbox.clone(), superseded.clone());
    // Handlers of an earlier one are gone.
    broker.services.link.set_handlers_live(false);
    let mut refusals = broker.services.link.runner_refusals();
    // Dropped with the socket, which ends requests that are left. The start of an agent goes on in a task of the
    // broker.
    let mut requests: JoinSet<bool> = JoinSet::new();
    let mut pings = interval(PING_EVERY);
    // After a send that took long, one ping is enough.
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last_inbound = Instant::now();
    loop {
        let sent = tokio::select! {
            // A runner is silent only if nothing of it waits: nothing is read during a send, so the ping comes last.
            // Reading does not starve the sends: answers that are not taken fill the outbox, their requests stay, and
            // at `MAX_REQUESTS` nothing more is read.
            biased;
            () = superseded.cancelled() => {
                close(&mut socket, SUPERSEDED, "superseded").await;
                break;
            }
            Some(ended) = requests.join_next() => {
                if ended.is_ok_and(|leaves| leaves) {
                    while let Ok(frame) = frames.try_recv() {
                        if send(&mut socket, broker, &superseded, Message::text(frame.text.as_str())).await.is_err() {
                            break;
                        }
                    }
                    close(&mut socket, close_code::NORMAL, "deregistered").await;
                    break;
                }
                Ok(())
            }
            // It connects again, and gets the reason as the answer to its registration.
            Ok(()) = refusals.changed() => {
                close(&mut socket, close_code::POLICY, "the engine has refused the manifest").await;
                break;
            }
            message = socket.recv(), if requests.len() < MAX_REQUESTS => {
                last_inbound = Instant::now();
                match Inbound::from(message) {
                    Inbound::Frame(Message::Text(text)) => match runner_frame::decode(text.as_str()) {
                        Some(frame) => {
                            requests.spawn(handle(api.clone(), id, frame, outbox.clone()));
                            Ok(())
                        }
                        None => {
                            let refusal = Refusal::new("invalid_frame", "a frame is {v: 2, type, payload}");
                            let answer = Message::text(runner_frame::answer(None, Err(refusal)));
                            send(&mut socket, broker, &superseded, answer).await
                        }
                    },
                    Inbound::Frame(_) => Ok(()),
                    Inbound::TooLarge => {
                        // The runner may read nothing.
                        let _ = timeout(CLOSE_TIMEOUT, close_too_large(&mut socket)).await;
                        break;
                    }
                    Inbound::Ended => break,
                }
            }
            frame = frames.recv() => match frame {
                Some(frame) => send(&mut socket, broker, &superseded, Message::text(frame.text.as_str())).await,
                None => break,
            },
            _ = pings.tick() => {
                if requests.len() == MAX_REQUESTS {
                    // The socket is not read now, so nothing can be heard of it.
                    last_inbound = Instant::now();
                }
                if last_inbound.elapsed() >= silence_timeout(broker) {
                    tracing::warn!("runner ping timed out, closing the connection");
                    break;
                }
                send(&mut socket, broker, &superseded, Message::Ping(Vec::new().into())).await
            }
        };
        if sent.is_err() {
            break;
        }
    }
    if broker.runners.disconnect(id) {
        broker.services.link.set_handlers_live(false);
        if broker.services.link.offers_runner() {
            broker.services.tasks.spawn(withdraw(api.clone()));
        }
    }
}

/// Withdraws what the runner offered, unless one comes back in time.
async fn withdraw(api: Api) {
    let Some(broker) = api.broker() else { return };
    let stop = api.inner.stop.clone();
    let is_gone = stop.run_until_cancelled(broker.runners.stays_absent(GRACE)).await;
    if is_gone == Some(true) && broker.services.link.offers_runner() {
        broker.services.link.withdraw();
    }
}

/// Time without progress after which the connection is closed.
fn silence_timeout(broker: &Broker) -> Duration {
    if broker.runners.is_busy() { BUSY_SILENCE } else { SILENCE }
}

/// The runner has closed the socket, or a write to it timed out.
struct SendFailed;

/// Sends to a runner that takes each frame in time. One that is superseded meanwhile is not waited for.
async fn send(
    socket: &mut WebSocket,
    broker: &Broker,
    superseded: &CancellationToken,
    message: Message,
) -> Result<(), SendFailed> {
    match superseded.run_until_cancelled(timeout(silence_timeout(broker), socket.send(message))).await {
        None | Some(Ok(Ok(()))) => Ok(()),
        Some(Ok(Err(_))) => Err(SendFailed),
        Some(Err(_)) => {
            tracing::warn!("runner write timed out, closing the connection");
            Err(SendFailed)
        }
    }
}

/// Sends a close frame and reads until the runner closes too: the kernel resets a socket that is closed with unread
/// bytes, and the runner may then lose the close frame.
async fn close(socket: &mut WebSocket, code: u16, reason: &'static str) {
    let frame = CloseFrame { code, reason: reason.into() };
    let closed = async {
        // The runner may have closed first.
        let _ = socket.send(Message::Close(Some(frame))).await;
        while let Some(Ok(_)) = socket.recv().await {}
    };
    // It may read nothing.
    let _ = timeout(CLOSE_TIMEOUT, closed).await;
}

/// Answers a request. Returns whether the runner leaves with it.
async fn handle(api: Api, id: u64, frame: Frame, outbox: Outbox) -> bool {
    let Frame { kind, request_id, payload, .. } = frame;
    let outcome = match payload {
        Value::Object(_) => answer(&api, id, &kind, payload).await,
        // Some libraries leave out an empty object.
        Value::Null => answer(&api, id, &kind, json!({})).await,
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            Err(Refusal::new("frame_failed", "the payload must be a JSON object"))
        }
    };
    let leaves = kind == "deregister_node" && outcome.is_ok();
    // Waits for room, so that an answer is never dropped; it counts as a request until then.
    outbox.send(runner_frame::answer(request_id.as_deref(), outcome)).await;
    leaves
}

async fn answer(api: &Api, id: u64, kind: &str, payload: Value) -> Result<Value, Refusal> {
    let broker = api.broker().ok_or_else(|| Refusal::new("not_ready", "the broker is starting"))?;
    let link = &broker.services.link;
    match kind {
        "hello" => {
            let Hello { client_name, client_version } = read(payload)?;
            let [name, version] = [client_name, client_version].map(|text| text.map(|text| truncate(&text)));
            tracing::info!(client_name = name, client_version = version, "runner introduced itself");
            Ok(RunnerAnswer::Hello { broker_version: version::VERSION, protocol_version: VERSION }.into())
        }
        "register_node" => {
            let registration = register_node(api, broker, payload).await?;
            let pending = matches!(registration, Registration::Pending);
            Ok(RunnerAnswer::NodeRegistered { registered: true, pending }.into())
        }
        "register_handlers" => {
            let RegisterHandlers { names } = read(payload)?;
            let handlers_live = broker.runners.set_handlers(id, &names);
            link.set_handlers_live(handlers_live);
            Ok(RunnerAnswer::HandlersRegistered { handlers_live }.into())
        }
        "handler_result" => {
            let HandlerResult { invocation_id, output, error } = read(payload)?;
            let outcome = match (output, error) {
                // `null` is an output, an absent field is none.
                (Some(output), None) => Ok(output.unwrap_or(Value::Null)),
                (None, Some(error)) => Err(error),
                _ => return Err(Refusal::new("frame_failed", "exactly one of output and error is needed")),
            };
            let outcome = outcome.and_then(|output| {
                if output.to_string().len() > MAX_OUTPUT { Err("output_too_large".to_owned()) } else { Ok(output) }
            });
            if broker.runners.complete(&invocation_id, outcome) {
                Ok(RunnerAnswer::ResultTaken { completed: true }.into())
            } else {
                Err(Refusal::new("unknown_invocation", "no such invocation is in flight"))
            }
        }
        "spawn_agent" => spawn_agent(api, payload).await,
        "deregister_node" => {
            // Given back at once, so that the engine can place them on another node.
            broker.runners.fail_calls();
            broker.runners.supervisor.end();
            link.withdraw();
            Ok(RunnerAnswer::NodeDeregistered { deregistered: true }.into())
        }
        _ => requests::call(routes(api.clone()), &api.inner.key, kind, &payload).await,
    }
}

async fn register_node(api: &Api, broker: &Broker, payload: Value) -> Result<Registration, Refusal> {
    let RegisterNode { manifest, supervision } = read(payload)?;
    let name = manifest.name.clone();
    if name.trim().is_empty() {
        return Err(Refusal::new("frame_failed", "the manifest needs a name"));
    }
    if supervision.as_ref().is_some_and(|supervision| !supervision.is_valid()) {
        return Err(Refusal::new("frame_failed", "supervision.argv needs a program"));
    }
    // Before the supervision, which a refused registration must leave as it was.
    let registered = broker.services.link.register_runner(manifest).await;
    let registration = registered.map_err(|refused| Refusal::new(&refused.code, refused.message))?;
    match supervision {
        Some(supervision) => {
            let runners = broker.runners.clone();
            let stop = api.inner.stop.clone();
            let host = broker.services.host.clone();
            broker.runners.supervisor.begin(supervision, name, runners, host, stop);
        }
        None => broker.runners.supervisor.end(),
    }
    Ok(registration)
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

fn read<T: serde::de::DeserializeOwned>(payload: Value) -> Result<T, Refusal> {
    serde_json::from_value(payload).map_err(|error| Refusal::new("frame_failed", unreadable(&error)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// JSON of any shape, often with the keys that payloads have.
    fn payloads() -> impl Strategy<Value = Value> {
        let keys = [
            "manifest",
            "name",
            "capabilities",
            "supervision",
            "argv",
            "cwd",
            "names",
            "invocation_id",
            "output",
            "error",
            "agent",
            "cli",
            "channels",
            "harnessConfig",
            "runtime",
            "auth",
            "type",
            "restartPolicy",
            "metadata",
        ];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,6}".prop_map(Value::from),
            prop::sample::select(&["pty", "headless", "bearer", "x"][..]).prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 6, move |inner| {
            let object = prop::collection::vec((prop::sample::select(keys.to_vec()), inner.clone()), 0..6);
            prop_oneof![
                prop::collection::vec(inner, 0..4).prop_map(Value::from),
                object.prop_map(|fields| fields
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), value))
                    .collect::<Value>()),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_payload_is_read_or_refused(payload in payloads()) {
            let refusals = [
                read::<RegisterNode>(payload.clone()).err(),
                read::<RegisterHandlers>(payload.clone()).err(),
                read::<HandlerResult>(payload.clone()).err(),
                read::<SpawnAgent>(payload).err(),
            ];
            prop_assert!(refusals.iter().flatten().all(|refusal| refusal.code == "frame_failed"));
        }
    }
}
