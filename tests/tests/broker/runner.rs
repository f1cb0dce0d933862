//! A runner that hosts handlers for the engine.

mod packages;
mod transcript;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::{SinkExt as _, StreamExt as _};
use relay_testkit::node::{BrokerSpec, NodeBroker};
use relay_testkit::wait;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest as _};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::scene::{SOON, Scene, is_running};

pub(crate) struct Runner {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    sent: u32,
}

impl Runner {
    pub(crate) async fn connect(scene: &Scene) -> Result<Self> {
        Self::connect_to(&scene.broker).await
    }

    pub(crate) async fn connect_to(broker: &NodeBroker) -> Result<Self> {
        let mut request = broker.socket_url("/api/fleet/ws").into_client_request()?;
        request.headers_mut().insert("x-api-key", broker.key().parse()?);
        let (socket, _) = connect_async(request).await?;
        Ok(Self { socket, sent: 0 })
    }

    pub(crate) async fn send(&mut self, kind: &str, payload: Value) -> Result<String> {
        self.sent += 1;
        let id = format!("r{}", self.sent);
        let frame = json!({ "v": 2, "type": kind, "request_id": id, "payload": payload });
        self.send_frame(&frame).await?;
        Ok(id)
    }

    pub(crate) async fn send_frame(&mut self, frame: &Value) -> Result<()> {
        self.send_text(&frame.to_string()).await
    }

    pub(crate) async fn send_text(&mut self, text: &str) -> Result<()> {
        self.send_message(Message::text(text.to_owned())).await
    }

    pub(crate) async fn send_message(&mut self, message: Message) -> Result<()> {
        Ok(self.socket.send(message).await?)
    }

    pub(crate) async fn next(&mut self) -> Result<Value> {
        loop {
            let message = timeout(SOON, self.socket.next()).await?.context("the socket has ended")??;
            if let Message::Text(text) = message {
                return Ok(serde_json::from_str(&text)?);
            }
            if let Message::Close(frame) = message {
                bail!("closed: {frame:?}");
            }
        }
    }

    /// Sends a request and returns its answer; other frames are left out.
    pub(crate) async fn ask(&mut self, kind: &str, payload: Value) -> Result<Value> {
        let id = self.send(kind, payload).await?;
        loop {
            let frame = self.next().await?;
            if frame["request_id"] == id.as_str() {
                return Ok(frame);
            }
        }
    }
}

fn manifest(name: &str) -> Value {
    json!({ "manifest": { "name": name, "version": "1.0", "max_agents": 4, "tags": ["test"],
                          "capabilities": [{ "name": "build", "kind": "action" }] } })
}

#[tokio::test]
async fn a_runner_handles_invocations_and_uses_the_broker_meanwhile() -> Result<()> {
    let scene = Scene::new("runner").await?;
    scene.broker.wait_connected().await?;
    let mut runner = Runner::connect(&scene).await?;
    let hello = runner.ask("hello", json!({ "client_name": "test", "client_version": "1" })).await?;
    assert_eq!((&hello["type"], &hello["payload"]["result"]["protocol_version"]), (&json!("ok"), &json!(2)));
    let registered = runner.ask("register_node", manifest("workshop")).await?;
    assert_eq!(registered["payload"]["result"], json!({ "registered": true }), "{registered}");
    let handlers = runner.ask("register_handlers", json!({ "names": ["build"] })).await?;
    assert_eq!(handlers["payload"]["result"]["handlers_live"], true);

    let caller = scene.sender.clone();
    let invoke = wait::until_ok("an invocation", SOON, || async {
        caller.post("/v1/actions/build/invoke", json!({ "input": { "ref": "main" } })).await?.success()
    });
    let invoked = invoke.await?;
    let call = runner.next().await?;
    assert_eq!(call["type"], "invoke_handler", "{call}");
    assert_eq!((&call["payload"]["name"], &call["payload"]["input"]["ref"]), (&json!("build"), &json!("main")));
    // A handler that runs uses the same socket.
    let list = runner.ask("list_agents", json!({})).await?;
    assert_eq!(list["payload"]["result"]["agents"], json!([]));
    let unknown = runner.ask("no_such_type", json!({})).await?;
    assert_eq!(unknown["payload"]["code"], "frame_failed");
    let result = json!({ "invocation_id": call["payload"]["invocation_id"], "output": { "ok": 1 } });
    let completed = runner.ask("handler_result", result.clone()).await?;
    assert_eq!(completed["payload"]["result"]["completed"], true);
    let late = runner.ask("handler_result", result).await?;
    assert_eq!(late["payload"]["code"], "unknown_invocation");
    let id = invoked["invocation_id"].as_str().context("an id")?;
    wait::until_ok("the outcome", SOON, || async {
        let path = format!("/v1/actions/build/invocations/{id}");
        let outcome = caller.get(&path).await?.success()?;
        ensure!(outcome["status"] == "completed", "{outcome}");
        Ok::<_, anyhow::Error>(())
    })
    .await
}

#[tokio::test]
async fn hosted_agents_keep_their_mail_when_a_runner_leaves() -> Result<()> {
    let scene = Scene::new("leaving").await?;
    let agent = scene.spawn("worker", "cooked", &[]).await?;
    let mut runner = Runner::connect(&scene).await?;
    runner.ask("register_node", manifest("leaving")).await?;
    runner.ask("deregister_node", json!({})).await?;
    scene.sender.dm("worker", "message-1").await?.success()?;
    scene.wait_for("worker", &agent, &["message-1".to_owned()], 1).await
}

#[tokio::test]
async fn a_manifest_that_the_engine_refuses_later_takes_the_node_not_offline() -> Result<()> {
    let (scene, proxy) = Scene::behind_proxy("refusing").await?;
    let agent = scene.spawn("worker", "cooked", &[]).await?;
    let folder = tempfile::tempdir()?;
    let gateway = relay_testkit::shared().await.any_gateway();
    let other = BrokerSpec::new(gateway, scene.workspace.token(), "taken", folder.path())?;
    let other = NodeBroker::start(&other).await?;
    other.wait_connected().await?;
    let mut runner = Runner::connect(&scene).await?;
    proxy.cut();
    wait::until_ok("the node to be offline", SOON, || async {
        let health = scene.broker.call_with("GET", "/health", &[]).await?.body;
        ensure!(health["relaycastConnected"] == false, "{health}");
        anyhow::Ok(())
    })
    .await?;
    let pending = runner.ask("register_node", manifest("taken")).await?;
    assert_eq!(pending["payload"]["result"], json!({ "registered": true, "pending": true }), "{pending}");
    proxy.restore();
    scene.sender.dm("worker", "message-1").await?.success()?;
    scene.wait_for("worker", &agent, &["message-1".to_owned()], 1).await?;
    let closed = runner.next().await;
    assert!(closed.is_err_and(|error| error.to_string().contains("refused")));
    let mut again = Runner::connect(&scene).await?;
    let refused = again.ask("register_node", manifest("taken")).await?;
    assert_eq!(refused["payload"]["code"], "node_name_conflict", "{refused}");
    Ok(())
}

#[tokio::test]
async fn the_program_of_a_runner_is_started_again_until_it_leaves_or_the_broker_stops() -> Result<()> {
    let scene = Scene::new("supervised").await?;
    scene.broker.wait_connected().await?;
    let folder = tempfile::tempdir()?;
    let starts = folder.path().join("starts");
    // Children of two kinds: one in the program's group that SIGTERM does not end, one in a session of its own.
    let script = r#"
        env > environment
        sh -c 'trap "" TERM; echo $$ >> children; while :; do sleep 600; done' &
        setsid sh -c 'echo $$ >> children; exec sleep 600' &
        echo $$ ${RELAY_BROKER_API_KEY:-none} $GIVEN >> starts
        wait; exit 3
    "#;
    let supervision = json!({
        "argv": ["sh", "-c", script], "cwd": folder.path(), "env": { "GIVEN": "yes" },
        "restart_policy": { "cooldown_ms": 10 },
    });
    let mut payload = manifest("supervised");
    payload["supervision"] = json!({ "argv": [], "cwd": "/" });
    let mut runner = Runner::connect(&scene).await?;
    let refused = runner.ask("register_node", payload.clone()).await?;
    assert_eq!(refused["payload"]["code"], "frame_failed", "{refused}");
    payload["supervision"] = supervision;
    let registered = runner.ask("register_node", payload).await?;
    assert_eq!(registered["type"], "ok", "{registered}");
    drop(runner);

    let started = async |count: usize| {
        wait::until_ok("the program to be started", SOON, || async {
            let text = std::fs::read_to_string(&starts).unwrap_or_default();
            ensure!(text.lines().count() == count && text.ends_with('\n'), "{text}");
            let line = text.lines().last().context("a line")?;
            ensure!(line.ends_with(" none yes"), "{line}");
            line.split(' ').next().context("a pid")?.parse::<i32>().context("a pid")
        })
        .await
        .with_context(|| scene.broker.log_tail(30))
    };
    let children = async |count: usize| {
        wait::until_ok("the children of the program", SOON, || async {
            let text = std::fs::read_to_string(folder.path().join("children"))?;
            ensure!(text.lines().count() == count && text.ends_with('\n'), "{text}");
            text.lines().map(|pid| pid.parse::<u32>().context("a pid")).collect::<Result<Vec<u32>>>()
        })
        .await
    };
    let first = started(1).await?;
    let environment = std::fs::read_to_string(folder.path().join("environment"))?;
    assert!(environment.contains("GIVEN=yes") && !environment.contains(scene.workspace.token()), "{environment}");
    let earlier = children(2).await?;
    assert!(earlier.iter().copied().all(is_running));
    ensure!(std::process::Command::new("kill").arg("-9").arg(first.to_string()).status()?.success());
    let second = started(2).await?;
    assert!(!earlier.iter().copied().any(is_running), "children of the ended program: {earlier:?}");
    let all = children(4).await?;
    scene.broker.terminate().await?;
    assert!(!is_running(u32::try_from(second)?) && !all.iter().copied().any(is_running), "{second} {all:?}");
    Ok(())
}

#[tokio::test]
async fn a_runner_that_answers_no_ping_is_disconnected() -> Result<()> {
    let scene = Scene::new("hanging").await?;
    scene.broker.wait_connected().await?;
    let mut runner = Runner::connect(&scene).await?;
    let registered = runner.ask("register_node", manifest("hanging")).await?;
    assert_eq!(registered["type"], "ok", "{registered}");
    runner.ask("register_handlers", json!({ "names": ["build"] })).await?;
    let handlers_live = async |expected: bool, limit: Duration| {
        wait::until_ok("the engine to know of the handlers", limit, || async {
            let nodes = scene.workspace.get("/v1/nodes").await?.success()?;
            let node = nodes.as_array().and_then(|nodes| nodes.iter().find(|node| node["name"] == "hanging"));
            ensure!(node.context("the node")?["handlers_live"] == expected, "{nodes}");
            anyhow::Ok(())
        })
        .await
    };
    handlers_live(true, SOON).await?;
    // From here on it reads nothing, and so answers no ping.
    handlers_live(false, Duration::from_secs(150)).await?;
    let ended = loop {
        if let Err(ended) = runner.next().await {
            break ended;
        }
    };
    assert!(!ended.is::<tokio::time::error::Elapsed>(), "the socket is open");
    let mut again = Runner::connect(&scene).await?;
    assert_eq!(again.ask("hello", json!({})).await?["type"], "ok");
    Ok(())
}

#[tokio::test]
async fn the_newest_runner_takes_over() -> Result<()> {
    let scene = Scene::new("takeover").await?;
    let mut first = Runner::connect(&scene).await?;
    first.ask("hello", json!({})).await?;
    let mut second = Runner::connect(&scene).await?;
    second.ask("hello", json!({})).await?;
    let closed = timeout(Duration::from_secs(10), first.next()).await?;
    assert!(closed.is_err_and(|error| error.to_string().contains("superseded")));
    Ok(())
}
