//! Delivery that must not stall: a lost live copy, a stuck socket, rows that will never be delivered.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::{scene::Scene, sized};
use relay_testkit::{stack::Stack, wait};
use serde_json::json;

/// What is lost is found by the silence check, each 3 s; the rest is for a busy machine. A socket that is stuck is given up
/// after 30 s only, so that nothing that waits for it makes this limit.
const SOON: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lost_live_copy_of_a_last_message_costs_seconds_at_most() -> Result<()> {
    let scene = Scene::with(Stack::builder().through_proxies(true)).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (_ada, _) = scene.broker("broker-ada", &["ada"], 0).await?;
    let (_bob, _) = scene.direct("bob", 1).await?;
    for round in 1..=sized(2, 10) {
        scene.stack.nats_proxy().keep_nats_messages();
        scene.dm(&sam, 0, "ada", "arrives live").await?;
        scene.dm(&sam, 0, "bob", "arrives live").await?;
        scene.reaches("ada", 2 * round - 1, SOON).await;
        scene.reaches("bob", 2 * round - 1, SOON).await;
        scene.stack.nats_proxy().drop_nats_messages(|subject| subject.starts_with("live."));
        // From the other gateway, so that no memory of the process helps.
        scene.dm(&sam, 1, "ada", "its live copy is lost").await?;
        scene.dm(&sam, 0, "bob", "its live copy is lost").await?;
        let since = Instant::now();
        scene.reaches("ada", 2 * round, SOON).await;
        scene.reaches("bob", 2 * round, SOON).await;
        println!("repaired after {:?}", since.elapsed());
    }
    scene.ledger.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stuck_socket_stops_its_own_agents_only() -> Result<()> {
    let scene = Scene::start().await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (stuck, _) = scene.broker("broker-stuck", &["ada", "eve"], 0).await?;
    let (own, _) = scene.direct("dora", 0).await?;
    let (_free, _) = scene.broker("broker-free", &["bob"], 0).await?;
    let (_direct, _) = scene.direct("cyd", 0).await?;
    for node in [&stuck, &own] {
        node.behave(|manner| manner.reads = false);
    }
    // Enough to fill every buffer on the way: socket, kernel, the gateway's queue.
    let large = "x".repeat(32 * 1024);
    let count = sized(200, 800);
    for n in 1..=count {
        for agent in ["ada", "dora"] {
            scene.dm(&sam, usize::try_from(n % 2)?, agent, &format!("{n} {large}")).await?;
        }
        scene.dm(&sam, usize::try_from(n % 2)?, "bob", &format!("bob {n}")).await?;
        scene.dm(&sam, usize::try_from(n % 2)?, "cyd", &format!("cyd {n}")).await?;
        if n % 10 == 0 {
            scene.reaches("bob", n, SOON).await;
            scene.reaches("cyd", n, SOON).await;
        }
    }
    let held = scene.ledger.position("ada");
    ensure!(held < count, "the socket was not stuck");
    for node in [&stuck, &own] {
        node.behave(|manner| manner.reads = true);
    }
    scene.reaches("ada", count, Duration::from_secs(60)).await;
    scene.reaches("dora", count, Duration::from_secs(60)).await;
    scene.acked("ada", count, SOON).await;
    scene.ledger.assert_clean();
    println!("stuck: {:?} {:?}", scene.ledger.links("broker-stuck"), scene.ledger.links(own.name()));
    for node in ["broker-free", "cyd"] {
        ensure!(scene.ledger.links(node).ended.is_empty(), "{node} lost its socket");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_will_never_be_delivered_become_tombstones_and_nothing_stalls() -> Result<()> {
    let scene = Scene::start().await?;
    let (sam_node, sam) = scene.direct("sam", 1).await?;
    let (ada_node, hosted) = scene.broker("broker-ada", &["ada"], 0).await?;
    let ada = hosted.first().context("ada")?;
    // Six rows wait for a node that is away.
    ada_node.behave(|manner| (manner.returns, manner.acks) = (false, false));
    scene.stack.gateway(0).kill9();
    scene.stack.gateway(0).restart().await?;
    wait::until("the node to be gone", SOON, || async { !scene.ledger.links("broker-ada").up }).await;
    for n in 1..=6 {
        scene.dm(&sam, n % 2, "ada", &format!("ada {n}")).await?;
    }
    // Of these, 2 expires, 4 is failed and 5 acknowledged over REST, out of order.
    ensure!(scene.database.expire("ada", &[2]).await? == 1);
    wait::until("the sender to be told of the expiry", SOON, || async {
        let told = scene.ledger.notices("delivery.failed");
        told.iter().any(|frame| frame["data"]["seq"] == 2 && frame["data"]["reason"] == "ttl_expired")
    })
    .await;
    let listed = scene.speaker(ada, 1).get("/v1/deliveries?limit=50").await?.success()?;
    let id_of = |seq: u64| {
        let row = listed.as_array().into_iter().flatten().find(|row| row["seq"] == seq);
        row.and_then(|row| row["id"].as_str()).map(str::to_owned).with_context(|| format!("no {seq} in {listed}"))
    };
    let (failed, acked) = (id_of(4)?, id_of(5)?);
    let body = json!({ "error": "cannot", "retryable": false });
    scene.speaker(ada, 0).post(&format!("/v1/deliveries/{failed}/fail"), body).await?.success()?;
    scene.speaker(ada, 1).post_empty(&format!("/v1/deliveries/{acked}/ack")).await?.success()?;

    ada_node.behave(|manner| (manner.returns, manner.acks) = (true, true));
    scene.reaches("ada", 6, Duration::from_secs(30)).await;
    let frames = scene.ledger.frames("ada");
    let texts: Vec<Option<&str>> = frames.values().map(|frame| frame.text.as_deref()).collect();
    ensure!(
        texts == [Some("ada 1"), None, Some("ada 3"), None, None, Some("ada 6")],
        "tombstones at the wrong places: {texts:?}"
    );
    scene.acked("ada", 6, SOON).await;

    // Live too: a row settled by REST while its frame was on the way does not hold up the next one.
    ada_node.behave(|manner| manner.acks = false);
    scene.dm(&sam, 0, "ada", "ada 7").await?;
    scene.reaches("ada", 7, SOON).await;
    scene.dm(&sam, 1, "ada", "ada 8").await?;
    scene.reaches("ada", 8, SOON).await;
    ada_node.behave(|manner| manner.acks = true);
    scene.dm(&sam, 1, "ada", "ada 9").await?;
    scene.reaches("ada", 9, SOON).await;
    scene.acked("ada", 9, SOON).await;
    drop(sam_node);
    scene.ledger.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_mailbox_takes_no_seq_and_its_sender_is_told() -> Result<()> {
    const DEPTH: u64 = 1000;
    let scene = Scene::start().await?;
    let (_sam_node, sam) = scene.direct("sam", 1).await?;
    let ada = scene.workspace.register_agent("ada").await?;
    let mut posts = tokio::task::JoinSet::new();
    for chunk in 0..8_u64 {
        let speaker = scene.speaker(&sam, usize::try_from(chunk % 2)?);
        posts.spawn(async move {
            for n in 0..DEPTH / 8 {
                speaker.dm("ada", &format!("{chunk}-{n}")).await?.success()?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = posts.join_next().await {
        done??;
    }
    ensure!(scene.database.stand("ada").await?.head == DEPTH);
    let over = scene.dm(&sam, 0, "ada", "one too many").await?;
    ensure!(over.status == 201, "the send itself succeeds");
    wait::until("the sender to be told", SOON, || async {
        let told = scene.ledger.notices("delivery.failed");
        told.iter().any(|frame| frame["data"]["reason"] == "depth_cap" && frame["data"]["target_agent_name"] == "ada")
    })
    .await;
    ensure!(scene.database.stand("ada").await?.head == DEPTH, "a refused row took a seq");

    // The mailbox drains and takes mail again, without a hole.
    let home = scene.from(0);
    let _ada_node = relay_acceptance::chaos::node::Node::direct(&scene.workspace, &ada, &home, &scene.ledger).await?;
    scene.reaches("ada", DEPTH, Duration::from_secs(30)).await;
    scene.acked("ada", DEPTH, SOON).await;
    scene.dm(&sam, 1, "ada", "room again").await?;
    scene.reaches("ada", DEPTH + 1, SOON).await;
    ensure!(scene.ledger.texts("ada").last().is_some_and(|text| text == "room again"));
    scene.ledger.assert_clean();
    Ok(())
}
