//! A subscriber of the broker's events that keeps up: it collects the durable ones and signs of work, and counts the
//! output. It shows what the broker reports about the context that an agent has left.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::StreamExt as _;
use relay_testkit::node::NodeBroker;
use relay_testkit::wait;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;

use crate::scene::{SOON, Scene};

/// Arrivals that a test has not looked at; further ones are not noted.
const ARRIVALS: usize = 1024;

#[derive(Debug, Default)]
struct Collected {
    events: Vec<Value>,
    output_bytes: usize,
    problems: Vec<String>,
    watches: Vec<Watch>,
}

/// Receiver of the instants at which events of one agent and kind come.
#[derive(Debug)]
struct Watch {
    name: String,
    kind: String,
    arrivals: Sender<Instant>,
}

impl Collected {
    fn take(&mut self, event: Value, last_seq: &mut u64) {
        let now = Instant::now();
        for watch in self.watches.iter().filter(|watch| event["name"] == *watch.name && event["kind"] == *watch.kind) {
            // The test may have ended.
            let _ = watch.arrivals.try_send(now);
        }
        match (event["kind"].as_str(), event["seq"].as_u64()) {
            (Some("worker_stream"), _) => self.output_bytes += event["chunk"].as_str().map_or(0, str::len),
            (_, Some(seq)) => {
                if seq != *last_seq + 1 {
                    self.problems.push(format!("{seq} follows {last_seq}"));
                }
                *last_seq = seq;
                self.events.push(event);
            }
            (Some("delivery_active"), None) => self.events.push(event),
            (Some("worker_stream_dropped" | "replay_gap"), None) => self.problems.push(event.to_string()),
            (_, None) => {}
        }
    }
}

/// Events of one broker process since the subscription.
pub(crate) struct EventLog {
    collected: Arc<Mutex<Collected>>,
    reader: JoinHandle<()>,
}

impl EventLog {
    /// Subscribes. `pause` makes the reader slow: it waits so long before each frame.
    pub(crate) async fn subscribe(broker: &NodeBroker, pause: Duration) -> Result<Self> {
        let mut request = broker.socket_url("/ws?sinceSeq=0").into_client_request()?;
        request.headers_mut().insert("x-api-key", broker.key().parse()?);
        let (mut socket, _) = connect_async(request).await?;
        let collected = Arc::<Mutex<Collected>>::default();
        let reader = tokio::spawn({
            let collected = collected.clone();
            async move {
                let mut last_seq = 0;
                while let Some(Ok(frame)) = socket.next().await {
                    let Ok(text) = frame.to_text() else { continue };
                    let Ok(event) = serde_json::from_str::<Value>(text) else { continue };
                    collected.lock().unwrap_or_else(PoisonError::into_inner).take(event, &mut last_seq);
                    if !pause.is_zero() {
                        sleep(pause).await;
                    }
                }
            }
        });
        Ok(Self { collected, reader })
    }

    /// Returns the events of one agent and kind.
    pub(crate) fn events(&self, name: &str, kind: &str) -> Vec<Value> {
        let collected = self.collected.lock().unwrap_or_else(PoisonError::into_inner);
        collected.events.iter().filter(|event| event["name"] == name && event["kind"] == kind).cloned().collect()
    }

    /// Returns the instants at which further events of one agent and kind come.
    pub(crate) fn arrivals(&self, name: &str, kind: &str) -> Receiver<Instant> {
        let (arrivals, receiver) = channel(ARRIVALS);
        let watch = Watch { name: name.to_owned(), kind: kind.to_owned(), arrivals };
        self.collected.lock().unwrap_or_else(PoisonError::into_inner).watches.push(watch);
        receiver
    }

    /// Returns the bytes of output so far.
    pub(crate) fn output_bytes(&self) -> usize {
        self.collected.lock().unwrap_or_else(PoisonError::into_inner).output_bytes
    }

    /// Returns gaps between durable events, and reports of missing output.
    pub(crate) fn problems(&self) -> Vec<String> {
        self.collected.lock().unwrap_or_else(PoisonError::into_inner).problems.clone()
    }

    /// Fails if an event was missed or output was dropped.
    pub(crate) fn check_complete(&self) -> Result<()> {
        let collected = self.collected.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(collected.problems.is_empty(), "{:?}", collected.problems);
        Ok(())
    }
}

impl Drop for EventLog {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// It prints each line that is typed to it, after one of its own.
const REPEATING: &str = r#"stty -echo; echo started; while read -r line; do echo "$line"; done"#;

#[tokio::test]
async fn little_context_is_reported_once_for_each_share_and_the_share_is_listed() -> Result<()> {
    let scene = Scene::new("context").await?;
    let events = EventLog::subscribe(&scene.broker, Duration::ZERO).await?;
    let share = async || {
        let agents = scene.broker.call("GET", "/api/spawned", None).await?.body;
        agents["agents"][0].get("context_budget_pct").cloned().context("no field")
    };
    let body = json!({ "name": "full", "cli": "sh", "args": ["-c", REPEATING] });
    scene.broker.call("POST", "/api/spawn", Some(body)).await?.success()?;
    wait::until_ok("the first line", SOON, || async {
        ensure!(events.output_bytes() > 0, "no output");
        anyhow::Ok(())
    })
    .await?;
    assert_eq!(share().await?, Value::Null);
    let statements = [
        ("context window 42% left", 42),
        ("building: 3% left", 42),
        ("Context left until auto-compact: 11%", 11),
        ("Context left until auto-compact: 10%", 10),
        ("Context left until auto-compact: 10%", 10),
        ("context window 7% remaining", 7),
        // It was compacted.
        ("Context left until auto-compact: 90%", 90),
        ("Context left until auto-compact: 7%", 7),
    ];
    for (statement, expected) in statements {
        let shown = events.output_bytes() + statement.len();
        let keys = json!({ "data": format!("{statement}\r") });
        scene.broker.call("POST", "/api/input/full", Some(keys)).await?.success()?;
        wait::until_ok(statement, SOON, || async {
            ensure!(events.output_bytes() >= shown, "it was not printed");
            let share = share().await?;
            ensure!(share == expected, "the share is {share}");
            anyhow::Ok(())
        })
        .await?;
    }
    wait::until_ok("the events", SOON, || async {
        let low = events.events("full", "agent_context_low");
        let shares: Vec<&Value> = low.iter().map(|event| &event["pct"]).collect();
        ensure!(shares == [&json!(10), &json!(7), &json!(7)], "{low:?}");
        anyhow::Ok(())
    })
    .await?;
    events.check_complete()
}
