//! Pushing by several workers: none yet, one that is killed, two that must agree; and records that Postgres refuses.

use std::time::{Duration, Instant};

use anyhow::Result;
use relay_acceptance::push_scene::Scene;
use relay_testkit::{
    binaries,
    ports::Port,
    receiver::{Receiver, Reply},
    stack::{Backends, Service, Stack},
    wait,
};
use serde_json::{Value, json};

/// Leases and pauses of half a minute; a loaded machine is given time.
const IN_THE_END: Duration = Duration::from_secs(150);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Another worker of a stack, ready.
async fn start_worker(stack: &Stack, name: &str) -> Result<Service> {
    let program = binaries::find(&binaries::directory()?, "relay-worker")?;
    let backends = Backends { database_url: stack.database_url().to_owned(), nats_url: stack.nats_url() };
    let port = Port::free()?;
    let log = stack.state_dir().join(format!("{name}.log"));
    let worker = Service::worker(name, program, &backends, &port.address(), &[], &log)?.keeping([port]);
    worker.wait_ready().await?;
    Ok(worker)
}

#[tokio::test]
async fn what_was_accepted_before_there_was_a_worker_arrives_and_a_killed_one_is_replaced() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let scene = Scene::at(stack.gateway(0).url(), "push-workers", json!({ "ack_mode": "on_2xx" })).await?;
    scene.send("one").await?;
    let first = start_worker(&stack, "first").await?;
    scene.until("it to be acked", "?status=acked", |rows| rows.len() == 1).await?;

    // It is killed in the middle of a try; the other takes over when the lease has run out.
    scene.receiver.script("/hook", [Reply::Hang(Vec::new()), Reply::Status(200)]);
    scene.send("two").await?;
    scene.until_called(2).await;
    first.kill9();
    let killed_at = Instant::now();
    let _second = start_worker(&stack, "second").await?;
    wait::until("the second worker's call", IN_THE_END, || async { scene.receiver.calls("/hook").len() >= 3 }).await;
    let took = scene.receiver.calls("/hook")[2].at - killed_at;
    assert!(took < Duration::from_secs(45), "the lease lasts for 15 s: {took:?}");
    scene.until("both to be acked", "?status=acked", |rows| rows.len() == 2).await?;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 2, 2]);
    Ok(())
}

#[tokio::test]
async fn two_workers_give_an_endpoint_that_fails_one_try_each_half_minute() -> Result<()> {
    let stack = Stack::builder().gateways(1).workers(2).start().await?;
    let scene = Scene::at(stack.gateway(0).url(), "push-agreed", json!({ "ack_mode": "on_2xx" })).await?;
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
    // What was under way when the breaker opened ends within seconds; the tries that it lets through come later.
    let after_opening = || {
        // Events count as well: they mostly open the breaker, before a delivery is tried.
        let (deliveries, events) = (failing.calls("/hook"), failing.events("/hook"));
        let mut calls: Vec<Instant> = deliveries.iter().chain(&events).map(|call| call.at).collect();
        calls.sort_unstable();
        let opened = calls.get(4).map(|fifth| *fifth + Duration::from_secs(15));
        let before = calls.iter().filter(|at| opened.is_none_or(|opened| **at < opened)).count();
        calls[before.saturating_sub(1)..].to_vec()
    };
    wait::until("two tries after the opening", IN_THE_END, || async { after_opening().len() >= 3 }).await;
    let gaps: Vec<Duration> = after_opening().windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|gap| *gap > Duration::from_secs(25)), "the breaker is open for 30 s: {gaps:?}");
    Ok(())
}

#[tokio::test]
async fn a_try_whose_record_is_refused_holds_up_nobody_else() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let pool = sqlx::PgPool::connect(stack.database_url()).await?;
    sqlx::query("ALTER TABLE delivery_attempts ADD CONSTRAINT no_teapots CHECK (error IS DISTINCT FROM 'HTTP 418')")
        .execute(&pool)
        .await?;
    let scene = Scene::at(stack.gateway(0).url(), "push-refused", json!({ "ack_mode": "on_2xx" })).await?;
    scene.receiver.script("/hook", [Reply::Status(418)]);
    let well = Receiver::obliging().await?;
    let cyd = scene.neighbour("cyd", &well).await?;
    scene.send("one").await?;
    for n in 0..5 {
        scene.ann.dm("cyd", &format!("message {n}")).await?.success()?;
    }
    let cyd = scene.key.as_agent(&cyd);
    wait::until_ok("the others to be acked", IN_THE_END, || async {
        let acked = cyd.get("/v1/deliveries?status=acked").await?.success()?;
        anyhow::ensure!(acked.as_array().is_some_and(|rows| rows.len() == 5), "{acked}");
        Ok(())
    })
    .await?;
    let waiting = scene.until("a retry", "", |rows| rows.iter().any(|row| row["next_attempt_at"].is_string())).await?;
    assert_eq!(text(&waiting[0]["last_dispatch_error"]), "the answer could not be recorded", "{waiting:?}");
    let attempts = scene.attempts(&waiting[0]).await?;
    assert_eq!((attempts.len(), &attempts[0]["status"]), (1, &json!(418)), "{attempts:?}");
    assert_eq!(well.seqs("/hook"), [1, 2, 3, 4, 5], "none of them came again");
    assert_eq!(scene.receiver.seqs("/hook"), [1]);
    Ok(())
}
