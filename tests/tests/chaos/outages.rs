//! Outages of NATS and Postgres, and a COMMIT cut in transit.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use relay_acceptance::chaos::{
    by_run_size,
    node::Node,
    outage_duration,
    scene::Scene,
    sender::{Outcome, SentMessage, Target, send_keyed, send_once},
};
use relay_testkit::{
    client::Agent,
    history::tick,
    proxy::{Direction, Verdict},
    stack::Stack,
    wait,
};
use serde_json::json;

/// Timeout for a loaded machine; every condition is expected to be met.
const SOON: Duration = Duration::from_secs(30);
const RECOVERED_WITHIN: Duration = Duration::from_secs(40);

/// Creates a sender without a node and one agent at each gateway.
async fn pair(scene: &Scene) -> Result<(Agent, ConnectedNodes)> {
    let sam = scene.workspace.register_agent("sam").await?;
    let (ada, _) = scene.broker("broker-ada", &["ada"], 0).await?;
    let (bob, _) = scene.direct("bob", 1).await?;
    Ok((sam, ConnectedNodes(ada, bob)))
}

/// Keeps two nodes connected.
struct ConnectedNodes(#[expect(dead_code, reason = "held")] Node, #[expect(dead_code, reason = "held")] Node);

/// Returns a metric's sum over the gateways.
async fn gateway_metric_sum(scene: &Scene, metric: &str) -> Result<f64> {
    let mut sum = 0.0;
    for gateway in scene.stack.gateways() {
        sum += gateway.metric(metric).await?;
    }
    Ok(sum)
}

/// Waits until each process reports this value.
async fn wait_for_metric(scene: &Scene, metric: &str, value: f64) {
    for process in scene.stack.gateways().iter().chain(scene.stack.workers()) {
        wait::until(&format!("{metric} of {} to be {value}", process.name()), SOON, || async {
            process.metric(metric).await.is_ok_and(|reported| (reported - value).abs() < f64::EPSILON)
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn posts_and_deliveries_continue_while_nats_is_unavailable() -> Result<()> {
    let scene = Scene::start().await?;
    let (sam, _nodes) = pair(&scene).await?;
    scene.dm(&sam, 0, "ada", "before ada").await?;
    scene.dm(&sam, 1, "bob", "before bob").await?;
    scene.wait_received("ada", 1, SOON).await;
    scene.wait_received("bob", 1, SOON).await;
    wait_for_metric(&scene, "relay_nats_connected", 1.0).await;
    let missed = gateway_metric_sum(&scene, "relay_deliveries_repaired_total").await?;
    let replayed = gateway_metric_sum(&scene, "relay_deliveries_replayed_total").await?;

    scene.stack.nats().stop().await?;
    let until = Instant::now() + outage_duration();
    let (mut sent, mut slowest) = (1, Duration::ZERO);
    while Instant::now() < until {
        sent += 1;
        let started = Instant::now();
        // Each agent gets messages from both gateways.
        let gateway = usize::try_from(sent % 2)?;
        scene.dm(&sam, gateway, "ada", &format!("ada {sent}")).await?;
        scene.dm(&sam, gateway, "bob", &format!("bob {sent}")).await?;
        scene.wait_received("ada", sent, SOON).await;
        scene.wait_received("bob", sent, SOON).await;
        slowest = slowest.max(started.elapsed());
    }
    println!("{sent} each with NATS unavailable, the slowest after {slowest:?}");
    scene.wait_acked("ada", sent, SOON).await;
    wait_for_metric(&scene, "relay_nats_connected", 0.0).await;
    // Both agents were connected all the time, so messages without a live copy were not replays.
    assert!(gateway_metric_sum(&scene, "relay_deliveries_repaired_total").await? > missed, "no frame was missing");
    assert_eq!(gateway_metric_sum(&scene, "relay_deliveries_replayed_total").await?, replayed);

    scene.stack.nats().restart().await?;
    for _ in 0..20 {
        sent += 1;
        scene.dm(&sam, usize::try_from(sent % 2)?, "ada", &format!("ada {sent}")).await?;
        scene.dm(&sam, usize::try_from(sent % 2)?, "bob", &format!("bob {sent}")).await?;
    }
    scene.wait_received("ada", sent, SOON).await;
    scene.wait_received("bob", sent, SOON).await;
    // Messages committed meanwhile are published from the outbox.
    wait::until("the outbox to be empty", RECOVERED_WITHIN, || async {
        scene.database.unpublished().await.is_ok_and(|count| count == 0)
    })
    .await;
    scene.verify(&[]).await?;
    ensure!(scene.ledger.repeats() == 0, "a live connection repeats nothing");
    ensure!(scene.ledger.nodes_down().is_empty() && scene.ledger.links("broker-ada").registered == 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn posts_are_refused_and_sockets_stay_open_while_postgres_is_unavailable() -> Result<()> {
    let scene = Scene::start().await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (ada_node, _) = scene.broker("broker-ada", &["ada"], 0).await?;
    let (bob_node, _) = scene.direct("bob", 1).await?;
    // Messages sent shortly before the outage are acknowledged during it.
    for node in [&ada_node, &bob_node] {
        node.change_behaviour(|manner| manner.acks = false);
    }
    for n in 1..=5 {
        scene.dm(&sam, n % 2, "ada", &format!("ada {n}")).await?;
        scene.dm(&sam, n % 2, "bob", &format!("bob {n}")).await?;
    }
    scene.wait_received("ada", 5, SOON).await;
    scene.wait_received("bob", 5, SOON).await;

    scene.stack.postgres().stop().await?;
    for node in [&ada_node, &bob_node] {
        node.change_behaviour(|manner| manner.acks = true);
    }
    let until = Instant::now() + outage_duration();
    let mut refused = Vec::new();
    let (mut slowest, mut nth) = (Duration::ZERO, 0);
    while Instant::now() < until {
        nth += 1;
        let (started, asked_at) = (Instant::now(), tick());
        let text = format!("away {nth}");
        let reply = scene.api_of(&sam, nth % 2).without_retries().dm("ada", &text).await?;
        ensure!(reply.status == 503, "answered {}: {}", reply.status, reply.body);
        ensure!(reply.headers.contains_key("retry-after"), "no Retry-After");
        slowest = slowest.max(started.elapsed());
        refused.push(SentMessage {
            text,
            target: Target::Dm("ada".into()),
            outcome: Outcome::Refused(503),
            attempts: 1,
            ticks: (asked_at, tick()),
            key: None,
        });
        for gateway in scene.stack.gateways() {
            if nth == 3 {
                wait::until("the gateway to notice", SOON, || async { !gateway.is_ready().await }).await;
            } else if nth > 3 {
                ensure!(!gateway.is_ready().await, "{} is ready without postgres", gateway.name());
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    println!("{nth} posts refused, the slowest after {slowest:?}");
    scene.stack.postgres().restart().await?;
    let back = Instant::now();
    for gateway in scene.stack.gateways() {
        wait::until("the gateway to be ready", RECOVERED_WITHIN, || gateway.is_ready()).await;
    }
    scene.wait_acked("ada", 5, RECOVERED_WITHIN).await;
    scene.wait_acked("bob", 5, RECOVERED_WITHIN).await;
    println!("ready and acks stored {:?} after postgres came back", back.elapsed());
    for n in 6..=10 {
        scene.dm(&sam, n % 2, "ada", &format!("ada {n}")).await?;
        scene.dm(&sam, n % 2, "bob", &format!("bob {n}")).await?;
    }
    scene.wait_received("ada", 10, SOON).await;
    scene.wait_received("bob", 10, SOON).await;
    scene.verify(&refused).await?;
    ensure!(scene.ledger.repeats() == 0, "sockets that stayed repeat nothing");
    for node in ["broker-ada", bob_node.name()] {
        let links = scene.ledger.links(node);
        ensure!(links.up && links.registered == 1, "{node} lost its socket: {links:?}");
    }
    Ok(())
}

/// A database that hangs must not block callers beyond their timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_false_success_is_reported_while_postgres_is_frozen() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().through_proxies(true)).await?;
    let (sam, _nodes) = pair(&scene).await?;
    scene.dm(&sam, 0, "ada", "before").await?;
    scene.wait_received("ada", 1, SOON).await;

    scene.stack.postgres_proxy().blackhole();
    let apis = [scene.api_of(&sam, 0), scene.api_of(&sam, 1)];
    let mut posts = tokio::task::JoinSet::new();
    for n in 0..10 {
        let api = apis[n % 2].clone();
        posts.spawn(async move { send_once(&api, &Target::Dm("ada".into()), &format!("frozen {n}")).await });
    }
    tokio::time::sleep(outage_duration()).await;
    for gateway in scene.stack.gateways() {
        wait::until("the gateway to notice", SOON, || async { !gateway.is_ready().await }).await;
    }
    scene.stack.postgres_proxy().restore();
    let mut sent = Vec::new();
    while let Some(one) = posts.join_next().await {
        sent.push(one??);
    }
    println!("outcomes: {:?}", sent.iter().map(|one| &one.outcome).collect::<Vec<_>>());
    for gateway in scene.stack.gateways() {
        wait::until("the gateway to be ready", RECOVERED_WITHIN, || gateway.is_ready()).await;
    }
    for (n, api) in apis.iter().enumerate() {
        sent.push(send_keyed(std::slice::from_ref(api), &Target::Dm("ada".into()), &format!("after {n}")).await?);
    }
    let head = scene.database.mailbox_position("ada").await?.head;
    scene.wait_received("ada", head, RECOVERED_WITHIN).await;
    scene.verify(&sent).await
}

/// Cuts the commit of a batch, before or after it arrives, and posts through it: first commits by one statement, then
/// COMMITs of transactions with a statement per step.
async fn post_through_cut_commits(verdict: Verdict) -> Result<()> {
    let scene = Scene::start_with(Stack::builder().through_proxies(true)).await?;
    let (sam, _nodes) = pair(&scene).await?;
    // Both conversations exist before: a lost COMMIT that creates one would leave its post without a status.
    for (gateway, agent) in [(0, "ada"), (1, "bob")] {
        scene.dm(&sam, gateway, agent, &format!("before {agent}")).await?;
        scene.wait_received(agent, 1, SOON).await;
    }
    let apis = [scene.api_of(&sam, 0), scene.api_of(&sam, 1)];
    let mut sent = Vec::new();
    let rounds = by_run_size(6, 40);
    for round in 0..rounds {
        if round == rounds / 2 {
            scene.commit_in_steps().await?;
        }
        // Other transactions commit too, so the cut is armed by the message itself.
        let marker = format!("cut-{round}-");
        let fired = if round < rounds / 2 {
            scene.cut_statement_of(&marker, verdict)
        } else {
            scene.cut_commit_of(&marker, verdict)
        };
        let mut posts = tokio::task::JoinSet::new();
        for n in 0..4 {
            let (apis, text) = (apis.clone(), format!("{marker}{n}"));
            let target = Target::Dm(if n % 2 == 0 { "ada" } else { "bob" }.into());
            posts.spawn(async move {
                if n < 2 {
                    send_once(&apis[n % 2], &target, &text).await
                } else {
                    send_keyed(&apis, &target, &text).await
                }
            });
        }
        wait::until("a commit to be cut", SOON, || async { fired.load(Ordering::Relaxed) }).await;
        // Long enough that the first check of the commit outcome finds no result.
        tokio::time::sleep(Duration::from_millis(400)).await;
        scene.stack.postgres_proxy().restore();
        while let Some(one) = posts.join_next().await {
            sent.push(one??);
        }
        for gateway in scene.stack.gateways() {
            wait::until("the gateway to be ready", RECOVERED_WITHIN, || gateway.is_ready()).await;
        }
    }
    let outcomes: Vec<_> = sent.iter().map(|one| (&one.text, &one.outcome, one.attempts)).collect();
    println!("{outcomes:?}");
    for agent in ["ada", "bob"] {
        let head = scene.database.mailbox_position(agent).await?.head;
        scene.wait_received(agent, head, RECOVERED_WITHIN).await;
    }
    let unknown = sent.iter().filter(|one| one.outcome == Outcome::Unknown).count();
    ensure!(unknown == 0, "postgres came back at once: every post gets its verdict");
    scene.verify(&sent).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_with_a_lost_answer_takes_effect_once() -> Result<()> {
    post_through_cut_commits(Verdict::ForwardThenCut).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrives_is_retried() -> Result<()> {
    post_through_cut_commits(Verdict::DropThenCut).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_lost_with_its_connection_is_retried() -> Result<()> {
    post_through_cut_commits(Verdict::DropThenReset).await
}

/// An operation that may have succeeded gets no status: clients retry after a 5xx and would get a name conflict.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_with_unknown_commit_outcome_is_not_retryable() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().through_proxies(true)).await?;
    let mut unanswered = 0;
    for round in 0..by_run_size(4, 40) {
        let name = format!("cut-{round}");
        let fired = scene.cut_commit_of(&name, Verdict::ForwardThenCut);
        let (api, body) = (scene.workspace.clone(), json!({ "name": name, "type": "agent" }));
        let asked = tokio::spawn(async move { api.post("/v1/agents", body).await });
        wait::until("a COMMIT to be cut", SOON, || async { fired.load(Ordering::Relaxed) }).await;
        let proxy = scene.stack.postgres_proxy();
        wait::until("its connection to be cut", SOON, || async { proxy.connection_count() == 0 }).await;
        proxy.restore();
        match asked.await? {
            // Another COMMIT was cut, or this one never arrived and was retried.
            Ok(reply) => drop(reply.success()?),
            Err(_) => unanswered += 1,
        }
        for gateway in scene.stack.gateways() {
            wait::until("the gateway to be ready", RECOVERED_WITHIN, || gateway.is_ready()).await;
        }
    }
    ensure!(unanswered > 0, "no COMMIT of a registration was cut");
    Ok(())
}

/// Packets are dropped for a second, as with a host that fails without a reset: the affected connections never answer
/// again, and nothing in the engine may wait for them forever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unresponsive_database_connections_are_closed() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().through_proxies(true)).await?;
    let (sam, _nodes) = pair(&scene).await?;
    scene.dm(&sam, 0, "ada", "before ada").await?;
    scene.dm(&sam, 1, "bob", "before bob").await?;
    scene.wait_received("ada", 1, SOON).await;
    scene.wait_received("bob", 1, SOON).await;
    let apis = [scene.api_of(&sam, 0), scene.api_of(&sam, 1)];
    let mut posts = tokio::task::JoinSet::new();
    scene.stack.postgres_proxy().set_filter(Direction::ToServer, |_, chunk| {
        chunk.clear();
        Verdict::Forward
    });
    for n in 0..20 {
        let (apis, to) = (apis.clone(), Target::Dm(if n % 2 == 0 { "ada" } else { "bob" }.into()));
        posts.spawn(async move {
            if n < 10 {
                send_once(&apis[n / 2 % 2], &to, &format!("vanished {n}")).await
            } else {
                send_keyed(&apis, &to, &format!("vanished {n}")).await
            }
        });
        tokio::time::sleep(Duration::from_millis(75)).await;
    }
    scene.stack.postgres_proxy().clear_filter(Direction::ToServer);
    let since = Instant::now();
    for n in 0..4 {
        posts.spawn({
            let apis = apis.clone();
            async move { send_keyed(&apis[n % 2..=n % 2], &Target::Dm("ada".into()), &format!("after {n}")).await }
        });
    }
    let mut sent = Vec::new();
    while let Some(one) = posts.join_next().await {
        sent.push(one??);
    }
    println!("all posts have their answer after {:?}", since.elapsed());
    ensure!(since.elapsed() < Duration::from_secs(80), "the committer waited {:?}", since.elapsed());
    for agent in ["ada", "bob"] {
        let head = scene.database.mailbox_position(agent).await?.head;
        scene.wait_received(agent, head, RECOVERED_WITHIN).await;
        scene.wait_acked(agent, head, RECOVERED_WITHIN).await;
    }
    println!("everything is acknowledged after {:?}", since.elapsed());
    for gateway in scene.stack.gateways() {
        wait::until("the gateway to be ready", RECOVERED_WITHIN, || gateway.is_ready()).await;
    }
    scene.verify(&sent).await
}

/// A gateway stops in the middle of a transaction with heads locked: commits of other gateways for the same mailboxes
/// wait for a few seconds, and its own sender gets a correct answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_stopped_midway_blocks_others_only_briefly() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().through_proxies(true)).await?;
    let (sam, _nodes) = pair(&scene).await?;
    scene.dm(&sam, 0, "ada", "before").await?;
    scene.dm(&sam, 1, "ada", "before, too").await?;
    // A commit by one statement cannot stop midway.
    scene.commit_in_steps().await?;
    let fired = scene.swallow_commit_of("stopped");
    let apis = [scene.api_of(&sam, 0), scene.api_of(&sam, 1)];
    let since = Instant::now();
    let stopped = tokio::spawn({
        let api = apis[0].clone();
        async move { send_once(&api, &Target::Dm("ada".into()), "stopped").await }
    });
    wait::until("a COMMIT to be swallowed", SOON, || async { fired.load(Ordering::Relaxed) }).await;
    let mut sent = vec![send_once(&apis[1], &Target::Dm("ada".into()), "of another gateway").await?];
    // Without a timeout for idle transactions, this would wait for the test client's own timeout of a minute.
    println!("the other gateway's post took {:?}", since.elapsed());
    ensure!(since.elapsed() < Duration::from_secs(30), "the other gateway waited {:?}", since.elapsed());
    sent.push(stopped.await??);
    println!("the stopped post took {:?}", since.elapsed());
    ensure!(sent.iter().all(|one| matches!(one.outcome, Outcome::Accepted(_))), "{sent:?}");
    let head = scene.database.mailbox_position("ada").await?.head;
    ensure!(head == 4, "{head} deliveries");
    scene.wait_received("ada", head, SOON).await;
    scene.verify(&sent).await
}
