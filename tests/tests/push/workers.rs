//! Dispatch by several workers: none yet, one that is killed, two that must agree; and attempts that Postgres cannot
//! record.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use relay_acceptance::{
    chaos::{
        database::Database,
        end_state::{judge, record_calls},
        sender::send_accepted,
    },
    push_scene::Scene,
};
use relay_testkit::{
    binaries,
    history::{History, Losses},
    ports::Port,
    receiver::{Receiver, Reply},
    stack::{Backends, Service, ServiceSpec, Stack},
    wait,
};
use serde_json::{Value, json};

/// Leases and delays of half a minute; the limit allows for a loaded machine.
const EVENTUALLY: Duration = Duration::from_secs(150);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Starts another worker of a stack.
async fn start_worker(stack: &Stack, name: &str) -> Result<Service> {
    let program = binaries::find(&binaries::directory()?, "relay-worker")?;
    let backends = Backends { database_url: stack.database_url().to_owned(), nats_url: stack.nats_url() };
    let port = Port::free()?;
    let log = stack.state_dir().join(format!("{name}.log"));
    let spec = ServiceSpec { name, program, backends: &backends, env: &[], log };
    let worker = Service::worker(&spec, &port.address())?.with_reserved_ports([port]);
    worker.wait_ready().await?;
    Ok(worker)
}

#[tokio::test]
async fn deliveries_accepted_before_a_worker_started_arrive_and_a_killed_worker_is_replaced() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let scene = Scene::on_gateway(stack.gateway(0).url(), "push-workers", json!({ "ack_mode": "on_2xx" })).await?;
    let history = History::default();
    history.record_post(send_accepted(&scene.ann, "bob", "one").await?.1);
    let first = start_worker(&stack, "first").await?;
    scene.wait_for_deliveries("it to be acked", "?status=acked", |rows| rows.len() == 1).await?;

    // It is killed during an attempt; the other worker takes over when the lease has expired.
    scene.receiver.script("/hook", [Reply::Hang(Vec::new()), Reply::Status(200)]);
    history.record_post(send_accepted(&scene.ann, "bob", "two").await?.1);
    scene.wait_for_calls(2).await;
    first.kill9();
    let killed_at = Instant::now();
    let _second = start_worker(&stack, "second").await?;
    wait::until("the second worker's call", EVENTUALLY, || async { scene.receiver.calls("/hook").len() >= 3 }).await;
    let took = scene.receiver.calls("/hook")[2].at - killed_at;
    assert!(took < Duration::from_secs(45), "the lease lasts for 15 s: {took:?}");
    scene.wait_for_deliveries("both to be acked", "?status=acked", |rows| rows.len() == 2).await?;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 2, 2]);
    record_calls(&history, "bob", &scene.receiver.calls("/hook"))?;
    judge(&history, &Database::connect(stack.database_url())?, &scene.key, Losses::None).await
}

/// They would find the mailbox at their next poll.
#[tokio::test]
async fn workers_get_a_hint_of_an_agent_that_is_bound_to_an_endpoint() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let nats = async_nats::connect(stack.nats_url()).await?;
    let mut hints = nats.subscribe("relay.hints").await?;
    nats.flush().await?;
    let scene = Scene::on_gateway(stack.gateway(0).url(), "push-bound", json!({ "ack_mode": "on_2xx" })).await?;
    let due = async {
        loop {
            let hint: Value = serde_json::from_slice(&hints.next().await.context("nats closed")?.payload)?;
            if hint["hint"] == "deliveries_due" {
                return anyhow::Ok(hint);
            }
        }
    };
    let due = tokio::time::timeout(EVENTUALLY, due).await.context("no hint was published")??;
    let mailbox = [scene.workspace_id().await?.to_string(), scene.bob.id];
    assert_eq!(due["agents"], json!([mailbox]), "{due}");
    Ok(())
}

#[tokio::test]
async fn two_workers_make_one_attempt_per_half_minute_at_a_failing_endpoint() -> Result<()> {
    let stack = Stack::builder().gateways(1).workers(2).start().await?;
    let scene = Scene::on_gateway(stack.gateway(0).url(), "push-agreed", json!({ "ack_mode": "on_2xx" })).await?;
    let failing = Receiver::start(|_, _| Reply::Status(500)).await?;
    let delivery = json!({ "url": failing.url("/hook"), "ack_mode": "on_2xx", "retry": { "schedule": vec![1; 32] } });
    let node = json!({ "name": "failing", "kind": "http_push", "max_agents": 10, "delivery": delivery });
    scene.key.post("/v1/nodes", node).await?.success()?;
    let names: Vec<String> = (0..10).map(|n| format!("agent-{n}")).collect();
    for name in &names {
        scene.key.register_agent(name).await?;
        scene.key.bind("failing", name).await?;
    }
    for name in &names {
        scene.ann.dm(name, "are you there").await?.success()?;
    }
    // Attempts in progress when the breaker opened end within seconds; later ones are let through by it.
    let after_opening = || {
        // Events count too: they mostly open the breaker before a delivery is attempted.
        let (deliveries, events) = (failing.calls("/hook"), failing.events("/hook"));
        let mut calls: Vec<Instant> = deliveries.iter().chain(&events).map(|call| call.at).collect();
        calls.sort_unstable();
        let opened = calls.get(4).map(|fifth| *fifth + Duration::from_secs(15));
        let before = calls.iter().filter(|at| opened.is_none_or(|opened| **at < opened)).count();
        calls[before.saturating_sub(1)..].to_vec()
    };
    wait::until("two attempts after the opening", EVENTUALLY, || async { after_opening().len() >= 3 }).await;
    let gaps: Vec<Duration> = after_opening().windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|gap| *gap > Duration::from_secs(25)), "the breaker is open for 30 s: {gaps:?}");
    Ok(())
}

#[tokio::test]
async fn an_attempt_that_cannot_be_recorded_does_not_block_others() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let pool = sqlx::PgPool::connect(stack.database_url()).await?;
    sqlx::query("ALTER TABLE delivery_attempts ADD CONSTRAINT no_teapots CHECK (error IS DISTINCT FROM 'HTTP 418')")
        .execute(&pool)
        .await?;
    let scene = Scene::on_gateway(stack.gateway(0).url(), "push-refused", json!({ "ack_mode": "on_2xx" })).await?;
    scene.receiver.script("/hook", [Reply::Status(418)]);
    let well = Receiver::accepting_all().await?;
    let cyd = scene.neighbour("cyd", &well).await?;
    scene.send("one").await?;
    for n in 0..5 {
        scene.ann.dm("cyd", &format!("message {n}")).await?.success()?;
    }
    let cyd = scene.key.as_agent(&cyd);
    wait::until_ok("the others to be acked", EVENTUALLY, || async {
        let acked = cyd.get("/v1/deliveries?status=acked").await?.success()?;
        anyhow::ensure!(acked.as_array().is_some_and(|rows| rows.len() == 5), "{acked}");
        Ok(())
    })
    .await?;
    let waiting = scene
        .wait_for_deliveries("a retry", "", |rows| rows.iter().any(|row| row["next_attempt_at"].is_string()))
        .await?;
    assert_eq!(text(&waiting[0]["last_dispatch_error"]), "the answer could not be recorded", "{waiting:?}");
    let attempts = scene.attempts(&waiting[0]).await?;
    assert_eq!((attempts.len(), &attempts[0]["status"]), (1, &json!(418)), "{attempts:?}");
    assert_eq!(well.seqs("/hook"), [1, 2, 3, 4, 5], "none of them came again");
    assert_eq!(scene.receiver.seqs("/hook"), [1]);
    Ok(())
}
