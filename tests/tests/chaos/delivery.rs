//! Deliveries that must not stall: a lost live copy, a stuck socket, undeliverable rows.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::{
    by_run_size,
    ledger::ConnectionLedger,
    scene::Scene,
    sender::{send_accepted, send_accepted_request},
};
use relay_testkit::{client::NodeSocket, stack::Stack, wait};
use serde_json::json;

/// The silence check finds losses every 3 s by the change feed, and every 3 min by comparing all mailboxes; the rest is
/// for a loaded machine. A stuck socket is closed only after 30 s, so waiting for that would exceed this limit.
const SOON: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_live_copy_and_hint_of_the_last_message_delay_it_by_seconds_at_most() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().through_proxies(true)).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (_ada, _) = scene.broker("broker-ada", &["ada"], 0).await?;
    let (_bob, _) = scene.direct("bob", 1).await?;
    for round in 1..=by_run_size(2, 10) {
        scene.stack.nats_proxy().keep_nats_messages();
        for agent in ["ada", "bob"] {
            scene.dm(&sam, 0, agent, &format!("{agent} {round}, arrives live")).await?;
        }
        scene.wait_received("ada", 2 * round - 1, SOON).await;
        scene.wait_received("bob", 2 * round - 1, SOON).await;
        scene
            .stack
            .nats_proxy()
            .drop_nats_messages(|subject| subject.starts_with("relay.live.") || subject == "relay.hints");
        // An older transaction that stays open delays no reader of the change feed.
        let held = scene.database.lock("SELECT pg_current_xact_id()").await?;
        // Sent from the other gateway, so that nothing is cached in the process.
        for (gateway, agent) in [(1, "ada"), (0, "bob")] {
            scene.dm(&sam, gateway, agent, &format!("{agent} {round}, its live copy is lost")).await?;
        }
        let since = Instant::now();
        scene.wait_received("ada", 2 * round, SOON).await;
        scene.wait_received("bob", 2 * round, SOON).await;
        println!("repaired after {:?}", since.elapsed());
        held.rollback().await?;
    }
    scene.verify(&[]).await
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
        node.change_behaviour(|manner| manner.reads = false);
    }
    // Enough to fill every buffer: socket, kernel, the gateway's queue.
    let large = "x".repeat(32 * 1024);
    let count = by_run_size(200, 800);
    for n in 1..=count {
        for agent in ["ada", "dora"] {
            scene.dm(&sam, usize::try_from(n % 2)?, agent, &format!("{agent} {n} {large}")).await?;
        }
        scene.dm(&sam, usize::try_from(n % 2)?, "bob", &format!("bob {n}")).await?;
        scene.dm(&sam, usize::try_from(n % 2)?, "cyd", &format!("cyd {n}")).await?;
        if n % 10 == 0 {
            scene.wait_received("bob", n, SOON).await;
            scene.wait_received("cyd", n, SOON).await;
        }
    }
    let held = scene.ledger.position("ada");
    ensure!(held < count, "the socket was not stuck");
    for node in [&stuck, &own] {
        node.change_behaviour(|manner| manner.reads = true);
    }
    scene.wait_received("ada", count, Duration::from_secs(60)).await;
    scene.wait_received("dora", count, Duration::from_secs(60)).await;
    scene.wait_acked("ada", count, SOON).await;
    scene.verify(&[]).await?;
    println!("stuck: {:?} {:?}", scene.ledger.links("broker-stuck"), scene.ledger.links(own.name()));
    for node in ["broker-free", "cyd"] {
        ensure!(scene.ledger.links(node).ended.is_empty(), "{node} lost its socket");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undeliverable_rows_become_tombstones_and_nothing_stalls() -> Result<()> {
    let scene = Scene::start().await?;
    let (sam_node, sam) = scene.direct("sam", 1).await?;
    let (ada_node, hosted) = scene.broker("broker-ada", &["ada"], 0).await?;
    let ada = hosted.first().context("ada")?;
    // Six rows wait for an offline node.
    ada_node.change_behaviour(|manner| (manner.returns, manner.acks) = (false, false));
    scene.stack.gateway(0).kill9();
    scene.stack.gateway(0).restart().await?;
    wait::until("the node to be gone", SOON, || async { !scene.ledger.links("broker-ada").up }).await;
    for n in 1..=6 {
        scene.dm(&sam, n % 2, "ada", &format!("ada {n}")).await?;
    }
    // Of these, 2 expires, 4 fails and 5 is acknowledged over REST, out of order.
    ensure!(scene.database.expire("ada", &[2]).await? == 1);
    wait::until("the sender to be told of the expiry", SOON, || async {
        let reported = scene.ledger.notices("delivery.failed");
        reported.iter().any(|frame| frame["data"]["seq"] == 2 && frame["data"]["reason"] == "ttl_expired")
    })
    .await;
    let listed = scene.api_of(ada, 1).get("/v1/deliveries?limit=50").await?.success()?;
    let id_of = |seq: u64| {
        let row = listed.as_array().into_iter().flatten().find(|row| row["seq"] == seq);
        row.and_then(|row| row["id"].as_str()).map(str::to_owned).with_context(|| format!("no {seq} in {listed}"))
    };
    let (failed, acked) = (id_of(4)?, id_of(5)?);
    let body = json!({ "error": "cannot", "retryable": false });
    scene.api_of(ada, 0).post(&format!("/v1/deliveries/{failed}/fail"), body).await?.success()?;
    scene.api_of(ada, 1).post_empty(&format!("/v1/deliveries/{acked}/ack")).await?.success()?;

    ada_node.change_behaviour(|manner| (manner.returns, manner.acks) = (true, true));
    scene.wait_received("ada", 6, Duration::from_secs(30)).await;
    let frames = scene.ledger.frames("ada");
    let texts: Vec<Option<&str>> = frames.values().map(|frame| frame.text.as_deref()).collect();
    ensure!(
        texts == [Some("ada 1"), None, Some("ada 3"), None, None, Some("ada 6")],
        "tombstones at the wrong places: {texts:?}"
    );
    scene.wait_acked("ada", 6, SOON).await;

    // Live as well: a row settled over REST while its frame was in transit does not block the next one.
    ada_node.change_behaviour(|manner| manner.acks = false);
    scene.dm(&sam, 0, "ada", "ada 7").await?;
    scene.wait_received("ada", 7, SOON).await;
    scene.dm(&sam, 1, "ada", "ada 8").await?;
    scene.wait_received("ada", 8, SOON).await;
    ada_node.change_behaviour(|manner| manner.acks = true);
    scene.dm(&sam, 1, "ada", "ada 9").await?;
    scene.wait_received("ada", 9, SOON).await;
    scene.wait_acked("ada", 9, SOON).await;
    drop(sam_node);
    for settled in ["ada 2", "ada 4", "ada 5"] {
        scene.ledger.history().allow_loss("ada", settled);
    }
    scene.verify(&[]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_mailbox_assigns_no_seq_and_notifies_the_sender() -> Result<()> {
    const DEPTH: u64 = 1000;
    let scene = Scene::start().await?;
    let (_sam_node, sam) = scene.direct("sam", 1).await?;
    let ada = scene.workspace.register_agent("ada").await?;
    let mut posts = tokio::task::JoinSet::new();
    for chunk in 0..8_u64 {
        let speaker = scene.api_of(&sam, usize::try_from(chunk % 2)?);
        posts.spawn(async move {
            let mut sent = Vec::new();
            for n in 0..DEPTH / 8 {
                sent.push(send_accepted(&speaker, "ada", &format!("{chunk}-{n}")).await?.1);
            }
            anyhow::Ok(sent)
        });
    }
    while let Some(done) = posts.join_next().await {
        done??.into_iter().for_each(|post| scene.ledger.history().record_post(post));
    }
    ensure!(scene.database.mailbox_position("ada").await?.head == DEPTH);
    let over = scene.dm(&sam, 0, "ada", "one too many").await?;
    ensure!(over.status == 201, "the send itself succeeds");
    wait::until("the sender to be told", SOON, || async {
        let reported = scene.ledger.notices("delivery.failed");
        reported
            .iter()
            .any(|frame| frame["data"]["reason"] == "depth_cap" && frame["data"]["target_agent_name"] == "ada")
    })
    .await;
    ensure!(scene.database.mailbox_position("ada").await?.head == DEPTH, "a refused row took a seq");

    // The mailbox drains and accepts messages again, without a gap.
    let home = scene.gateways_from(0);
    let _ada_node = relay_acceptance::chaos::node::Node::direct(&scene.workspace, &ada, &home, &scene.ledger).await?;
    scene.wait_received("ada", DEPTH, Duration::from_secs(30)).await;
    scene.wait_acked("ada", DEPTH, SOON).await;
    scene.dm(&sam, 1, "ada", "room again").await?;
    scene.wait_received("ada", DEPTH + 1, SOON).await;
    ensure!(scene.ledger.texts("ada").last().is_some_and(|text| text == "room again"));
    scene.ledger.history().allow_loss("ada", "one too many");
    scene.verify(&[]).await
}

/// A broker that confirms nothing is sent a window of frames. The others are held in memory, and become dead letters
/// there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delivery_that_expires_while_its_frame_is_held_is_not_sent() -> Result<()> {
    // More than the window of unconfirmed frames.
    const KEPT: u64 = 140;
    const EXPIRED: u64 = 10;
    // Frames that are held for 2 s are compared with storage anyway.
    const TTL_MS: u64 = 1000;
    let scene = Scene::start().await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let node = scene.workspace.create_broker_node("node-held", "held").await?;
    let gateway = scene.gateways_from(0)[0].replacen("http", "ws", 1);
    let mut socket = NodeSocket::connect_with_header(&gateway, &node.token).await?;
    socket.register_broker(&node.node_id, "held", "instance").await?;
    socket.register_agent("ada").await?;
    for number in 1..=KEPT {
        scene.dm(&sam, 1, "ada", &format!("kept {number}")).await?;
    }
    for number in 1..=EXPIRED {
        let text = format!("expired {number}");
        let request = json!({ "to": "ada", "text": text, "ttl_ms": TTL_MS });
        let (_, post) = send_accepted_request(&scene.api_of(&sam, 1), "ada", &text, request).await?;
        scene.ledger.history().record_post(post);
        scene.ledger.history().allow_loss("ada", &text);
    }
    wait::until_ok("the last deliveries to expire", SOON, || async {
        let count = scene.database.expired_count().await?;
        ensure!(count == i64::try_from(EXPIRED)?, "{count} expired");
        anyhow::Ok(())
    })
    .await?;
    let (mut position, mut texts, mut line) = (0, Vec::new(), ConnectionLedger::default());
    while position < KEPT + EXPIRED {
        let frame = socket.expect("deliver").await?;
        let agent = frame["agent"].as_str().context("an agent")?;
        let seq = frame["seq"].as_u64().context("a seq")?;
        // Barriers and probes have no seq.
        if agent == "ada" && seq > 0 {
            position = seq;
            scene.ledger.record_delivery(agent, &frame, &mut line);
            scene.ledger.history().record_ack(agent, seq);
            texts.extend(frame["payload"]["data"]["text"].as_str().map(str::to_owned));
        }
        socket.ack(agent, if agent == "ada" { position } else { 0 }).await?;
    }
    let kept: Vec<String> = (1..=KEPT).map(|number| format!("kept {number}")).collect();
    ensure!(texts == kept, "{texts:?}");
    let letters = scene.workspace.get("/v1/dead-letters?reason=ttl_expired").await?.success()?;
    ensure!(letters.as_array().map(Vec::len) == Some(usize::try_from(EXPIRED)?), "{letters}");
    scene.verify(&[]).await
}
