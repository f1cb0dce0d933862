//! Brokers that are killed or stopped.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos;
use relay_testkit::node::{BrokerSpec, NodeBroker};
use relay_testkit::proxy::TcpProxy;
use relay_testkit::{shared, wait};
use serde_json::{Value, json};

use crate::harness::Harnesses;
use crate::scene::{SOON, Scene, is_running, numbered};

#[tokio::test]
async fn a_killed_broker_continues_with_its_agents() -> Result<()> {
    let mut scene = Scene::new("killed").await?;
    let agent = scene.spawn("worker", "cooked", &["--ignore-signals"]).await?;
    for body in numbered(1, 3) {
        scene.sender.dm("worker", &body).await?.success()?;
    }
    scene.wait_for("worker", &agent, &numbered(1, 3), 3).await?;
    let first = agent.messages()[0].0;

    scene.broker.kill_and_restart().await?;
    for body in numbered(4, 6) {
        scene.sender.dm("worker", &body).await?.success()?;
    }
    scene.wait_for("worker", &agent, &numbered(1, 6), 6).await?;
    let processes: Vec<u32> = agent.messages().iter().map(|(pid, _)| *pid).collect();
    assert!(processes[3..].iter().all(|pid| *pid != first), "{processes:?}");
    assert!(!is_running(first), "a process of the killed broker is left");
    Ok(())
}

#[tokio::test]
async fn a_resumed_session_gets_nothing_again_that_it_has() -> Result<()> {
    let gateway = shared().await.any_gateway();
    let proxy = TcpProxy::start(gateway.trim_start_matches("http://"))?;
    let mut harnesses = Harnesses::at("resumed", &proxy.through(gateway)?).await?;
    let agent = harnesses.spawn("claude", "worker", "cooked", &[], json!({})).await?;
    let scene = &mut harnesses.scene;
    let manual = json!({ "mode": "manual_flush" });
    scene.broker.call("PUT", "/api/spawned/worker/delivery-mode", Some(manual)).await?;
    scene.sender.dm("worker", "message-1").await?.success()?;
    wait::until_ok("the message to be held", SOON, || async {
        let pending = scene.broker.call("GET", "/api/spawned/worker/pending", None).await?.body;
        ensure!(pending["pending"].as_array().is_some_and(|list| list.len() == 1), "{pending}");
        anyhow::Ok(())
    })
    .await?;
    // It is typed and proven, and the engine does not hear of it.
    proxy.cut();
    scene.broker.call("POST", "/api/spawned/worker/flush", None).await?;
    wait::until_ok("the confirmation", SOON, || async {
        let confirmed = scene.broker.events("worker", "message_delivery_confirmed").await?;
        ensure!(confirmed.len() == 1, "{confirmed:?}");
        anyhow::Ok(())
    })
    .await?;
    proxy.restore();
    scene.broker.kill_and_restart().await?;
    scene.sender.dm("worker", "message-2").await?.success()?;
    scene.wait_for("worker", &agent, &numbered(1, 2), 2).await?;
    let process = |body: &str| {
        let mut lines = agent.messages().into_iter();
        lines.find(|(_, line)| line.ends_with(body)).map(|(pid, _)| pid)
    };
    assert_ne!(process("message-1"), process("message-2"), "the first one was not typed again into the later process");
    Ok(())
}

#[tokio::test]
async fn an_agent_that_asks_for_its_end_gets_it_after_the_verdict() -> Result<()> {
    let scene = Scene::new("leaving").await?;
    // It shows nothing of the message, whose verdict takes 2 s.
    let script = "stty -echo; read line; echo /exit; exec sleep 1000";
    let body = json!({ "name": "done", "cli": "sh", "args": ["-c", script] });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    scene.sender.dm("done", "message-1").await?.success()?;
    wait::until_ok("the end", SOON, || async {
        let exited = scene.broker.events("done", "agent_exited").await?;
        ensure!(exited.len() == 1, "{exited:?}");
        anyhow::Ok(())
    })
    .await?;
    let asked = scene.broker.events("done", "agent_exit").await?;
    assert_eq!((asked.len(), &asked[0]["reason"]), (1, &json!("agent_requested")));
    let exited = scene.broker.events("done", "agent_exited").await?;
    let status = (exited[0].get("code").unwrap_or(&Value::Null), &exited[0]["signal"]);
    assert_eq!(status, (&Value::Null, &json!("1")), "it ran on and was hung up");
    let verdicts = scene.broker.events("done", "delivery_verified").await?;
    assert_eq!(verdicts.len(), 1);
    let waited = verdicts[0]["latency_ms"].as_u64();
    assert!(waited.is_some_and(|millis| millis >= 2000), "the verdict came after {waited:?} ms");
    assert!(scene.broker.names().await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn nothing_is_typed_after_an_agent_has_asked_for_its_end() -> Result<()> {
    let scene = Scene::new("closed").await?;
    // The verdict on the first message takes 2 s. Whatever is typed after it is noted.
    let script = "stty -echo; read line; echo /exit; while read line; do echo \"$line\" >> typed; done";
    let body = json!({ "name": "done", "cli": "sh", "args": ["-c", script] });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    let set_mode = async |mode: &str| {
        scene.broker.call("PUT", "/api/spawned/done/delivery-mode", Some(json!({ "mode": mode }))).await
    };
    set_mode("manual_flush").await?;
    for body in numbered(1, 2) {
        scene.sender.dm("done", &body).await?.success()?;
    }
    wait::until_ok("both messages", SOON, || async {
        let pending = scene.broker.call("GET", "/api/spawned/done/pending", None).await?.body;
        ensure!(pending["pending"].as_array().is_some_and(|list| list.len() == 2), "{pending}");
        anyhow::Ok(())
    })
    .await?;
    set_mode("auto_inject").await?;
    wait::until_ok("the end", SOON, || async {
        let exited = scene.broker.events("done", "agent_exited").await?;
        ensure!(exited.len() == 1, "{exited:?}");
        anyhow::Ok(())
    })
    .await?;
    assert!(!scene.broker.folder().join("typed").exists(), "the second message was typed");
    assert_eq!(scene.broker.events("done", "delivery_verified").await?.len(), 1);
    let dropped = scene.broker.events("done", "delivery_dropped").await?;
    assert_eq!((&dropped[0]["count"], &dropped[0]["reason"]), (&json!(1), &json!("agent_exited")));
    // The engine has it for the next agent of the name.
    let next = scene.spawn("done", "cooked", &[]).await?;
    scene.wait_for("done", &next, &numbered(2, 2), 2).await
}

#[tokio::test]
async fn an_ack_that_is_written_at_the_end_counts() -> Result<()> {
    let scene = Scene::new("last-ack").await?;
    // It reads nothing, and hands its ack in when it is asked to end.
    let script =
        "stty -echo; trap 'mv ready/* \"$AGENT_RELAY_ACK_DIR\"; exit 0' HUP TERM; while :; do sleep 0.05; done";
    let body = json!({ "name": "late", "cli": "sh", "args": ["-c", script] });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    scene.sender.dm("late", "message-1").await?.success()?;
    let typed = wait::until_ok("the message to be typed", SOON, || async {
        let typed = scene.broker.events("late", "delivery_injected").await?;
        ensure!(typed.len() == 1, "{typed:?}");
        anyhow::Ok(typed[0].clone())
    })
    .await?;
    let ready = scene.broker.folder().join("ready");
    std::fs::create_dir(&ready)?;
    let ack = json!({ "delivery_id": typed["delivery_id"], "event_id": typed["event_id"], "status": "received" });
    std::fs::write(ready.join(typed["delivery_id"].as_str().context("a delivery")?), ack.to_string())?;
    assert_eq!(scene.broker.call("DELETE", "/api/spawned/late", None).await?.status, 200);
    let mut known = scene.broker.events("late", "delivery_upgraded").await?;
    known.extend(scene.broker.events("late", "delivery_verified").await?);
    assert!(known.iter().any(|event| event["method"] == "file"), "{known:?}");
    assert!(!scene.broker.folder().join(".agent-relay").exists());
    Ok(())
}

#[tokio::test]
async fn unread_acks_do_not_outlive_their_agent() -> Result<()> {
    let mut scene = Scene::new("left-acks").await?;
    let agent = scene.spawn("worker", "cooked", &[]).await?;
    let acks = scene.broker.folder().join(".agent-relay/worker/acks");
    std::fs::write(acks.join("of-a-dead-process"), "{}")?;
    scene.broker.kill_and_restart().await?;
    scene.sender.dm("worker", "message-1").await?.success()?;
    scene.wait_for("worker", &agent, &numbered(1, 1), 1).await?;
    assert!(acks.is_dir() && !acks.join("of-a-dead-process").exists());
    std::fs::write(acks.join("unread"), "{}")?;
    assert_eq!(scene.broker.call("DELETE", "/api/spawned/worker", None).await?.status, 200);
    assert!(!scene.broker.folder().join(".agent-relay").exists());
    Ok(())
}

/// Waits until a broker has run for so many seconds.
async fn wait_uptime(broker: &NodeBroker, seconds: u64) -> Result<()> {
    wait::until_ok("a later time", Duration::from_secs(150), || async {
        let health = broker.call_with("GET", "/health", &[]).await?.body;
        ensure!(health["uptimeMs"].as_u64().is_some_and(|uptime| uptime >= seconds * 1000), "{health}");
        anyhow::Ok(())
    })
    .await
}

/// At full size it lasts as long as a lease that is renewed once.
#[tokio::test]
async fn a_broker_with_an_owner_lives_as_long_as_its_lease_is_renewed() -> Result<()> {
    let scene = Scene::new("owned").await?;
    let renewed = scene.broker.call("POST", "/api/session/renew", None).await?.body;
    assert_eq!(renewed, json!({ "renewed": true, "expires_in_secs": 0, "persist": true }));
    let folder = tempfile::tempdir()?;
    let gateway = shared().await.any_gateway();
    let spec = BrokerSpec::new(gateway, scene.workspace.token(), "ephemeral", folder.path())?;
    let broker = NodeBroker::start(&BrokerSpec { persists: false, ..spec }).await?;
    assert_eq!(broker.call("GET", "/api/session", None).await?.body["mode"], "ephemeral");
    if chaos::is_full() {
        wait_uptime(&broker, 100).await?;
    }
    let renewed = broker.call("POST", "/api/session/renew", None).await?.body;
    assert_eq!(renewed, json!({ "renewed": true, "expires_in_secs": 120, "persist": false }));
    if chaos::is_full() {
        wait_uptime(&broker, 130).await?;
        wait::until_ok("the end", Duration::from_secs(110), || async {
            ensure!(!broker.is_running(), "it runs");
            anyhow::Ok(())
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_stop_leaves_no_process_no_connection_file_and_no_folder_for_acks() -> Result<()> {
    let scene = Scene::new("stopped").await?;
    scene.spawn("stubborn", "cooked", &["--ignore-signals"]).await?;
    scene.spawn("polite", "cooked", &[]).await?;
    let acks = |agent: &str| scene.broker.folder().join(format!(".agent-relay/{agent}/acks"));
    assert!(acks("stubborn").is_dir() && acks("polite").is_dir());
    let list = scene.broker.call("GET", "/api/spawned", None).await?;
    let agents = list.body["agents"].as_array().context("a list")?;
    let pids = agents.iter().filter_map(|agent| agent["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()));
    let pids: Vec<u32> = pids.collect();
    assert!(pids.len() == 2 && pids.iter().all(|pid| is_running(*pid)), "{}", list.body);
    let status = scene.broker.terminate().await?;
    assert_eq!(status.code(), Some(0), "{}", scene.broker.log_tail(30));
    assert!(!pids.iter().any(|pid| is_running(*pid)));
    assert!(!scene.broker.folder().join(".agentworkforce/relay/connection.json").exists());
    assert!(!scene.broker.folder().join(".agent-relay").exists());
    Ok(())
}

#[tokio::test]
async fn a_broker_that_stops_starts_no_further_agents() -> Result<()> {
    let scene = Scene::new("stopping").await?;
    // The stop waits for it.
    scene.spawn("stubborn", "cooked", &["--ignore-signals"]).await?;
    scene.broker.call("POST", "/api/shutdown", None).await?.success()?;
    // The answer comes before the stop begins. Without a terminal, since the host of the terminals refuses programs.
    let late = json!({ "name": "late", "cli": "claude", "transport": "headless" });
    wait::until_ok("the refusal", SOON, || async {
        let spawned = scene.broker.call("POST", "/api/spawn", Some(late.clone())).await?;
        ensure!((spawned.status, &spawned.body["code"]) == (503, &json!("worker_disappeared")), "{}", spawned.body);
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn an_agent_that_fails_is_restarted_and_its_end_is_reported() -> Result<()> {
    let scene = Scene::new("failing").await?;
    let policy = json!({ "restartPolicy": { "maxRestarts": 1, "cooldownMs": 50 } });
    let failing = ["--exit-after", "1", "--exit-code", "3"];
    let agent = scene.spawn_with("failing", "cooked", &failing, policy).await?;
    scene.sender.dm("failing", "message-1").await?.success()?;
    wait::until_ok("a restart", SOON, || async {
        let restarted = scene.broker.events("failing", "agent_restarted").await?;
        ensure!(restarted.len() == 1, "{restarted:?}");
        Ok::<_, anyhow::Error>(())
    })
    .await?;
    assert!(scene.broker.events("failing", "agent_exited").await?.is_empty());
    scene.sender.dm("failing", "message-2").await?.success()?;
    let exited = wait::until_ok("the end", SOON, || async {
        let exited = scene.broker.events("failing", "agent_exited").await?;
        ensure!(exited.len() == 1, "{:?}", agent.messages());
        Ok::<_, anyhow::Error>(exited)
    })
    .await?;
    assert_eq!((&exited[0]["code"], &exited[0]["signal"]), (&json!(3), &json!(null)));
    assert_eq!(scene.broker.events("failing", "agent_permanently_dead").await?.len(), 1);
    assert!(scene.broker.names().await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_cut_socket_loses_and_repeats_nothing() -> Result<()> {
    let (scene, proxy) = Scene::behind_proxy("cut").await?;
    let agents = [scene.spawn("first", "cooked", &[]).await?, scene.spawn("second", "screen", &[]).await?];
    for round in 0..3 {
        for body in numbered(round * 4 + 1, round * 4 + 4) {
            for name in ["first", "second"] {
                scene.sender.dm(name, &body).await?.success()?;
            }
            if body.ends_with(['2', '7']) {
                proxy.reset_all();
            }
        }
    }
    for (name, agent) in ["first", "second"].into_iter().zip(&agents) {
        scene.wait_for(name, agent, &numbered(1, 12), 12).await?;
    }
    Ok(())
}

#[tokio::test]
async fn messages_that_were_accepted_survive_a_broker_that_is_killed_in_between() -> Result<()> {
    let mut scene = Scene::new("storm").await?;
    let agent = scene.spawn("worker", "cooked", &[]).await?;
    for body in numbered(1, 10) {
        scene.sender.dm("worker", &body).await?.success()?;
    }
    scene.broker.kill_and_restart().await?;
    for body in numbered(11, 20) {
        scene.sender.dm("worker", &body).await?.success()?;
    }
    wait::until_ok("the last message", SOON, || async {
        let floor = scene.floor("worker").await?;
        ensure!(floor == 20, "the engine has an ack up to {floor}: {:?}", agent.bodies());
        Ok::<_, anyhow::Error>(())
    })
    .await?;
    // Each process has its messages in order; a repeat was typed into a process that ended before its verdict.
    let messages = agent.messages();
    let mut processes: Vec<u32> = messages.iter().map(|(pid, _)| *pid).collect();
    processes.dedup();
    assert!(processes.len() <= 2, "{processes:?}");
    let mut last = [0; 2];
    for ((pid, _), body) in messages.iter().zip(agent.bodies()) {
        let number: u32 = body.trim_start_matches("message-").parse()?;
        let turn = usize::from(*pid != processes[0]);
        ensure!(number > last[turn], "{body} after message-{} in process {pid}", last[turn]);
        last[turn] = number;
    }
    let mut bodies = agent.bodies();
    bodies.sort_unstable();
    bodies.dedup();
    assert_eq!(bodies.len(), 20, "{bodies:?}");
    Ok(())
}
