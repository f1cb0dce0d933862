//! Servers go away and come back: NATS, Postgres, and a COMMIT cut in flight.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use relay_acceptance::chaos::{
    node::Node,
    outage,
    scene::Scene,
    sender::{Outcome, Sent, Target, send_keyed, send_once},
    sized,
};
use relay_testkit::{
    client::Agent,
    proxy::{Direction, Verdict},
    stack::Stack,
    wait,
};
use serde_json::json;

/// Nothing here is waited for in vain: the limits are for a busy machine.
const SOON: Duration = Duration::from_secs(30);
const RECOVERED_WITHIN: Duration = Duration::from_secs(40);

/// A sender without a node, one agent at each gateway.
async fn pair(scene: &Scene) -> Result<(Agent, Both)> {
    let sam = scene.workspace.register_agent("sam").await?;
    let (ada, _) = scene.broker("broker-ada", &["ada"], 0).await?;
    let (bob, _) = scene.direct("bob", 1).await?;
    Ok((sam, Both(ada, bob)))
}

/// Keeps two nodes alive.
struct Both(#[expect(dead_code, reason = "held")] Node, #[expect(dead_code, reason = "held")] Node);

/// A metric's sum over the gateways.
async fn of_gateways(scene: &Scene, metric: &str) -> Result<f64> {
    let mut sum = 0.0;
    for gateway in scene.stack.gateways() {
        sum += gateway.metric(metric).await?;
    }
    Ok(sum)
}

/// Waits until each process reports this.
async fn reports(scene: &Scene, metric: &str, value: f64) {
    for process in scene.stack.gateways().iter().chain(scene.stack.workers()) {
        wait::until(&format!("{metric} of {} to be {value}", process.name()), SOON, || async {
            process.metric(metric).await.is_ok_and(|reported| (reported - value).abs() < f64::EPSILON)
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_nats_away_posts_and_delivery_go_on_from_postgres() -> Result<()> {
    let scene = Scene::start().await?;
    let (sam, _nodes) = pair(&scene).await?;
    scene.dm(&sam, 0, "ada", "before").await?;
    scene.dm(&sam, 1, "bob", "before").await?;
    scene.reaches("ada", 1, SOON).await;
    scene.reaches("bob", 1, SOON).await;
    reports(&scene, "relay_nats_connected", 1.0).await;
    let missed = of_gateways(&scene, "relay_deliveries_repaired_total").await?;
    let replayed = of_gateways(&scene, "relay_deliveries_replayed_total").await?;

    scene.stack.nats().stop().await?;
    let until = Instant::now() + outage();
    let (mut sent, mut slowest) = (1, Duration::ZERO);
    while Instant::now() < until {
        sent += 1;
        let started = Instant::now();
        // Each agent is written to from both gateways, the other one's included.
        let gateway = usize::try_from(sent % 2)?;
        scene.dm(&sam, gateway, "ada", &format!("ada {sent}")).await?;
        scene.dm(&sam, gateway, "bob", &format!("bob {sent}")).await?;
        scene.reaches("ada", sent, SOON).await;
        scene.reaches("bob", sent, SOON).await;
        slowest = slowest.max(started.elapsed());
    }
    println!("{sent} each with nats away, the slowest after {slowest:?}");
    scene.acked("ada", sent, SOON).await;
    reports(&scene, "relay_nats_connected", 0.0).await;
    // Both agents were connected all the time: what had no live copy was no replay.
    assert!(of_gateways(&scene, "relay_deliveries_repaired_total").await? > missed, "no frame was missing");
    assert_eq!(of_gateways(&scene, "relay_deliveries_replayed_total").await?, replayed);

    scene.stack.nats().restart().await?;
    for _ in 0..20 {
        sent += 1;
        scene.dm(&sam, usize::try_from(sent % 2)?, "ada", &format!("ada {sent}")).await?;
        scene.dm(&sam, usize::try_from(sent % 2)?, "bob", &format!("bob {sent}")).await?;
    }
    scene.reaches("ada", sent, SOON).await;
    scene.reaches("bob", sent, SOON).await;
    // What was committed meanwhile is owed to the log, and paid.
    wait::until("the outbox to be empty", RECOVERED_WITHIN, || async {
        scene.database.unpublished().await.is_ok_and(|count| count == 0)
    })
    .await;
    scene.ledger.assert_clean();
    ensure!(scene.ledger.repeats() == 0, "a live connection repeats nothing");
    ensure!(scene.ledger.nodes_down().is_empty() && scene.ledger.links("broker-ada").registered == 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_postgres_away_posts_are_refused_and_sockets_stay() -> Result<()> {
    let scene = Scene::start().await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (ada_node, _) = scene.broker("broker-ada", &["ada"], 0).await?;
    let (bob_node, _) = scene.direct("bob", 1).await?;
    // What is sent shortly before the outage is acknowledged during it.
    for node in [&ada_node, &bob_node] {
        node.behave(|manner| manner.acks = false);
    }
    for n in 1..=5 {
        scene.dm(&sam, n % 2, "ada", &format!("ada {n}")).await?;
        scene.dm(&sam, n % 2, "bob", &format!("bob {n}")).await?;
    }
    scene.reaches("ada", 5, SOON).await;
    scene.reaches("bob", 5, SOON).await;

    scene.stack.postgres().stop().await?;
    for node in [&ada_node, &bob_node] {
        node.behave(|manner| manner.acks = true);
    }
    let until = Instant::now() + outage();
    let mut refused = Vec::new();
    let (mut slowest, mut nth) = (Duration::ZERO, 0);
    while Instant::now() < until {
        nth += 1;
        let started = Instant::now();
        let text = format!("away {nth}");
        let reply = scene.speaker(&sam, nth % 2).impatient().dm("ada", &text).await?;
        ensure!(reply.status == 503, "answered {}: {}", reply.status, reply.body);
        ensure!(reply.headers.contains_key("retry-after"), "no Retry-After");
        slowest = slowest.max(started.elapsed());
        refused.push(Sent { text, recipients: vec!["ada".into()], outcome: Outcome::Refused(503), tries: 1 });
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
    scene.acked("ada", 5, RECOVERED_WITHIN).await;
    scene.acked("bob", 5, RECOVERED_WITHIN).await;
    println!("ready and acks stored {:?} after postgres came back", back.elapsed());
    for n in 6..=10 {
        scene.dm(&sam, n % 2, "ada", &format!("ada {n}")).await?;
        scene.dm(&sam, n % 2, "bob", &format!("bob {n}")).await?;
    }
    scene.reaches("ada", 10, SOON).await;
    scene.reaches("bob", 10, SOON).await;
    scene.judge(&refused).await?;
    ensure!(scene.ledger.repeats() == 0, "sockets that stayed repeat nothing");
    for node in ["broker-ada", bob_node.name()] {
        let links = scene.ledger.links(node);
        ensure!(links.up && links.registered == 1, "{node} lost its socket: {links:?}");
    }
    Ok(())
}

/// A database that hangs instead of refusing must not hang its callers beyond their patience.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_postgres_frozen_nobody_is_told_what_is_not_true() -> Result<()> {
    let scene = Scene::with(Stack::builder().through_proxies(true)).await?;
    let (sam, _nodes) = pair(&scene).await?;
    scene.dm(&sam, 0, "ada", "before").await?;
    scene.reaches("ada", 1, SOON).await;

    scene.stack.postgres_proxy().blackhole();
    let apis = [scene.speaker(&sam, 0), scene.speaker(&sam, 1)];
    let mut posts = tokio::task::JoinSet::new();
    for n in 0..10 {
        let api = apis[n % 2].clone();
        posts.spawn(async move { send_once(&api, &Target::Dm("ada".into()), &format!("frozen {n}")).await });
    }
    tokio::time::sleep(outage()).await;
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
    let head = scene.database.stand("ada").await?.head;
    scene.reaches("ada", head, RECOVERED_WITHIN).await;
    scene.judge(&sent).await
}

/// Cuts the COMMIT of a batch, with the statement arriving or not, and posts through it.
async fn commit_is_cut(verdict: Verdict) -> Result<()> {
    let scene = Scene::with(Stack::builder().through_proxies(true)).await?;
    let (sam, _nodes) = pair(&scene).await?;
    scene.dm(&sam, 0, "ada", "before").await?;
    scene.reaches("ada", 1, SOON).await;
    let apis = [scene.speaker(&sam, 0), scene.speaker(&sam, 1)];
    let mut sent = Vec::new();
    for round in 0..sized(6, 40) {
        // Other writers commit too, so the cut is armed by the message itself.
        let marker = format!("cut-{round}-");
        let fired = scene.cut_commit_of(&marker, verdict);
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
        wait::until("a COMMIT to be cut", SOON, || async { fired.load(Ordering::Relaxed) }).await;
        // Long enough that the first look for the verdict finds nobody.
        tokio::time::sleep(Duration::from_millis(400)).await;
        scene.stack.postgres_proxy().restore();
        while let Some(one) = posts.join_next().await {
            sent.push(one??);
        }
        for gateway in scene.stack.gateways() {
            wait::until("the gateway to be ready", RECOVERED_WITHIN, || gateway.is_ready()).await;
        }
    }
    let outcomes: Vec<_> = sent.iter().map(|one| (&one.text, &one.outcome, one.tries)).collect();
    println!("{outcomes:?}");
    for agent in ["ada", "bob"] {
        let head = scene.database.stand(agent).await?.head;
        scene.reaches(agent, head, RECOVERED_WITHIN).await;
    }
    let unknown = sent.iter().filter(|one| one.outcome == Outcome::Unknown).count();
    ensure!(unknown == 0, "postgres came back at once: every post gets its verdict");
    scene.judge(&sent).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_counts_once() -> Result<()> {
    commit_is_cut(Verdict::ForwardThenCut).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrives_is_made_again() -> Result<()> {
    commit_is_cut(Verdict::DropThenCut).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_lost_with_its_connection_is_made_again() -> Result<()> {
    commit_is_cut(Verdict::DropThenReset).await
}

/// What may be done gets no status: clients send a request again after a 5xx, and would be told that the name is taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_whose_commit_is_cut_is_never_to_be_sent_again() -> Result<()> {
    let scene = Scene::with(Stack::builder().through_proxies(true)).await?;
    let mut unanswered = 0;
    for round in 0..sized(4, 40) {
        let name = format!("cut-{round}");
        let fired = scene.cut_commit_of(&name, Verdict::ForwardThenCut);
        let (api, body) = (scene.workspace.clone(), json!({ "name": name, "type": "agent" }));
        let asked = tokio::spawn(async move { api.post("/v1/agents", body).await });
        wait::until("a COMMIT to be cut", SOON, || async { fired.load(Ordering::Relaxed) }).await;
        let proxy = scene.stack.postgres_proxy();
        wait::until("its connection to be cut", SOON, || async { proxy.connection_count() == 0 }).await;
        proxy.restore();
        match asked.await? {
            // Somebody else's COMMIT was cut, or this one never arrived: it was sent again until it was done.
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

/// Bytes vanish for a second, as with a host that is gone without a reset: the connections that lost them never
/// answer again, and nothing in the engine may wait for them for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_never_answer_again_are_given_up() -> Result<()> {
    let scene = Scene::with(Stack::builder().through_proxies(true)).await?;
    let (sam, _nodes) = pair(&scene).await?;
    scene.dm(&sam, 0, "ada", "before").await?;
    scene.dm(&sam, 1, "bob", "before").await?;
    scene.reaches("ada", 1, SOON).await;
    scene.reaches("bob", 1, SOON).await;
    let apis = [scene.speaker(&sam, 0), scene.speaker(&sam, 1)];
    let mut posts = tokio::task::JoinSet::new();
    scene.stack.postgres_proxy().set_filter(Direction::ToServer, |chunk| {
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
        let head = scene.database.stand(agent).await?.head;
        scene.reaches(agent, head, RECOVERED_WITHIN).await;
        scene.acked(agent, head, RECOVERED_WITHIN).await;
    }
    println!("everything is acknowledged after {:?}", since.elapsed());
    for gateway in scene.stack.gateways() {
        wait::until("the gateway to be ready", RECOVERED_WITHIN, || gateway.is_ready()).await;
    }
    scene.judge(&sent).await
}

/// A gateway stops in the middle of a transaction, heads locked: the others' commits for the same mailboxes wait
/// for a few seconds, and its own sender is told the truth.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_stops_in_the_middle_holds_nobody_up_for_long() -> Result<()> {
    let scene = Scene::with(Stack::builder().through_proxies(true)).await?;
    let (sam, _nodes) = pair(&scene).await?;
    scene.dm(&sam, 0, "ada", "before").await?;
    scene.dm(&sam, 1, "ada", "before, too").await?;
    let fired = scene.swallow_commit_of("stopped");
    let apis = [scene.speaker(&sam, 0), scene.speaker(&sam, 1)];
    let since = Instant::now();
    let stopped = tokio::spawn({
        let api = apis[0].clone();
        async move { send_once(&api, &Target::Dm("ada".into()), "stopped").await }
    });
    wait::until("a COMMIT to be swallowed", SOON, || async { fired.load(Ordering::Relaxed) }).await;
    let mut sent = vec![send_once(&apis[1], &Target::Dm("ada".into()), "of another gateway").await?];
    // A transaction that nobody ended would be waited for until the test's own client gives up, after a minute.
    println!("the other gateway's post took {:?}", since.elapsed());
    ensure!(since.elapsed() < Duration::from_secs(30), "the other gateway waited {:?}", since.elapsed());
    sent.push(stopped.await??);
    println!("the stopped post took {:?}", since.elapsed());
    ensure!(sent.iter().all(|one| matches!(one.outcome, Outcome::Accepted(_))), "{sent:?}");
    let head = scene.database.stand("ada").await?.head;
    ensure!(head == 4, "{head} deliveries");
    scene.reaches("ada", head, SOON).await;
    scene.judge(&sent).await
}
