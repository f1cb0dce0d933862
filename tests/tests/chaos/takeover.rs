//! Gateways that crash, freeze or drain, and the takeover by others.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::{
    by_run_size,
    ledger::{ConnectionLedger, Ledger},
    node::Node,
    scene::Scene,
    sender::{Outcome, SentMessage, Target, send_accepted, send_keyed, send_once},
};
use relay_testkit::{client::NodeSocket, proxy::Verdict, stack::Stack, wait};

/// Takeovers and repairs take up to 5 s (a probe, a lease, the silence check); the rest is for a loaded machine.
const SOON: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_accepted_by_a_killed_gateway_reach_agents_on_others() -> Result<()> {
    let scene = Scene::start().await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (_ada, _) = scene.broker("broker-ada", &["ada"], 1).await?;
    let mut sent = 0;
    for round in 0..by_run_size(3, 10) {
        // The gateway dies after the last answer of a burst: some messages are committed and not published.
        let mut posts = tokio::task::JoinSet::new();
        for n in 0..20 {
            let speaker = scene.api_of(&sam, 0);
            posts.spawn(async move { send_accepted(&speaker, "ada", &format!("{round}-{n}")).await });
        }
        while let Some(done) = posts.join_next().await {
            scene.ledger.history().record_post(done??.1);
        }
        scene.stack.gateway(0).kill9();
        let since = Instant::now();
        sent += 20;
        scene.wait_received("ada", sent, SOON).await;
        println!("all there {:?} after the kill", since.elapsed());
        wait::until("the outbox to be empty", SOON, || async {
            scene.database.unpublished().await.is_ok_and(|count| count == 0)
        })
        .await;
        scene.stack.gateway(0).restart().await?;
    }
    scene.verify(&[]).await
}

/// The commit arrives, its answer is lost, and the gateway dies before it can check the outcome.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_arrives_when_its_gateway_dies_between_commit_and_publish() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().through_proxies(true)).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (_ada, _) = scene.broker("broker-ada", &["ada"], 1).await?;
    let mut sent = Vec::new();
    for round in 0..by_run_size(2, 10) {
        let text = format!("round {round}");
        let speaker = scene.api_of(&sam, 0);
        scene.dm(&sam, 0, "ada", &format!("warm {round}")).await?;
        let head = scene.database.mailbox_position("ada").await?.head;
        scene.wait_received("ada", head, SOON).await;

        let fired = scene.cut_statement_of(&text, Verdict::ForwardThenCut);
        let post = tokio::spawn({
            let (speaker, text) = (speaker.clone(), text.clone());
            async move { send_once(&speaker, &Target::Dm("ada".into()), &text).await }
        });
        wait::until("the commit to be cut", SOON, || async { fired.load(Ordering::Relaxed) }).await;
        scene.stack.gateway(0).kill9();
        let one = post.await??;
        ensure!(one.outcome == Outcome::Unknown, "{one:?}");
        // The proxy lets the statement pass before it cuts.
        let proxy = scene.stack.postgres_proxy();
        wait::until("the cut", SOON, || async { proxy.connection_count() == 0 }).await;
        proxy.restore();
        wait::until("the commit to have arrived", SOON, || async {
            scene.database.messages().await.is_ok_and(|messages| messages.contains_key(&text))
        })
        .await;
        sent.push(one);
        let since = Instant::now();
        scene.wait_received("ada", head + 1, SOON).await;
        println!("there {:?} after the gateway's death", since.elapsed());
        wait::until("the outbox to be empty", SOON, || async {
            scene.database.unpublished().await.is_ok_and(|count| count == 0)
        })
        .await;
        println!("published {:?} after the gateway's death", since.elapsed());
        scene.stack.gateway(0).restart().await?;
    }
    scene.verify(&sent).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_of_a_killed_gateway_reconnect_elsewhere_within_seconds() -> Result<()> {
    let scene = Scene::start().await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let mut nodes = Vec::new();
    for n in 0..10 {
        nodes.push(scene.broker(&format!("broker-{n}"), &[&format!("a{n}"), &format!("b{n}")], 0).await?.0);
        nodes.push(scene.direct(&format!("d{n}"), 0).await?.0);
    }
    let mut victim = 0;
    for round in 1..=by_run_size(2, 6) {
        scene.stack.gateway(victim).kill9();
        let since = Instant::now();
        wait::until("all nodes to be registered elsewhere", SOON, || async {
            scene.ledger.nodes_down().is_empty()
                && nodes.iter().all(|node| scene.ledger.links(node.name()).registered > round)
        })
        .await;
        println!("all registered {:?} after the kill", since.elapsed());
        for n in 0..10 {
            for name in [format!("a{n}"), format!("b{n}"), format!("d{n}")] {
                scene.dm(&sam, 1 - victim, &name, &format!("{name} {round}")).await?;
            }
        }
        for n in 0..10 {
            for name in [format!("a{n}"), format!("b{n}"), format!("d{n}")] {
                scene.wait_received(&name, u64::from(round), SOON).await;
            }
        }
        scene.stack.gateway(victim).restart().await?;
        victim = 1 - victim;
    }
    scene.verify(&[]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_rebound_while_its_gateway_is_suspended_belongs_to_its_new_node() -> Result<()> {
    let scene = Scene::start().await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (old, hosted) = scene.broker("broker-old", &["ada"], 0).await?;
    let ada = hosted.first().context("ada")?;
    for n in 1..=5 {
        scene.dm(&sam, 1, "ada", &format!("ada {n}")).await?;
    }
    scene.wait_received("ada", 5, SOON).await;
    scene.wait_acked("ada", 5, SOON).await;
    // The old node receives these two and does not acknowledge them.
    old.change_behaviour(|manner| (manner.acks, manner.returns) = (false, false));
    for n in 6..=7 {
        scene.dm(&sam, 1, "ada", &format!("ada {n}")).await?;
    }
    scene.wait_received("ada", 7, SOON).await;

    scene.stack.gateway(0).sigstop();
    let slept = Instant::now();
    // The new node has its own ledger: it is another process and has no state of the agent.
    let there = Arc::new(Ledger::with_history_of(&scene.ledger));
    let workspace = scene.workspace.at(scene.stack.gateway(1).url());
    let at_second = [scene.stack.gateway(1).url()];
    let _new =
        Node::broker_for_existing(&workspace, "broker-new", std::slice::from_ref(ada), &at_second, &there).await?;
    for n in 8..=10 {
        scene.dm(&sam, 1, "ada", &format!("ada {n}")).await?;
    }
    let arrived = wait::until_ok("the new node to have everything", SOON, || async {
        let has = there.position("ada");
        ensure!(has == 10, "it has {has}; links {:?}", there.links("broker-new"));
        Ok(())
    });
    arrived.await.with_context(|| scene.stack.logs(20))?;
    scene.wait_acked("ada", 10, SOON).await;
    // The engine drops the frozen gateway's connections like those of a dead one.
    wait::until("the old node to be given up", Duration::from_secs(60), || async {
        scene.database.is_connected("node-broker-old").await.is_ok_and(|connected| !connected)
    })
    .await;
    println!("given up {:?} after it fell asleep", slept.elapsed());
    wait::until("the gateway to have slept for more than 10 s", Duration::from_secs(20), || async {
        slept.elapsed() > Duration::from_secs(11)
    })
    .await;
    let before = scene.database.mailbox_position("ada").await?;
    scene.stack.gateway(0).sigcont();
    // The old connection acknowledges its frames before it is closed.
    old.change_behaviour(|manner| manner.acks = true);
    wait::until("the old socket to be closed", SOON, || async { !scene.ledger.links("broker-old").up }).await;
    println!("old socket: {:?}", scene.ledger.links("broker-old").ended);
    for n in 11..=15 {
        scene.dm(&sam, n % 2, "ada", &format!("ada {n}")).await?;
    }
    wait::until("the new node to have the rest", SOON, || async { there.position("ada") == 15 }).await;
    let after = scene.database.mailbox_position("ada").await?;
    ensure!(before.ack_floor == 10 && after.head == 15, "{before:?} {after:?}");
    ensure!(scene.ledger.position("ada") <= 10, "the old node went on receiving: {}", scene.ledger.position("ada"));
    let texts = there.texts("ada");
    let wanted: Vec<String> = (6..=15).map(|n| format!("ada {n}")).collect();
    ensure!(texts == wanted, "the new node got {texts:?}");
    there.assert_clean();
    scene.verify(&[]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_closes_sockets_gracefully_and_loses_nothing() -> Result<()> {
    let scene = Arc::new(Scene::start().await?);
    let sam = scene.workspace.register_agent("sam").await?;
    let mut nodes = Vec::new();
    for n in 0..20 {
        nodes.push(scene.direct(&format!("d{n}"), 0).await?.0);
    }
    // Traffic during the drain, also at the draining gateway.
    let senders: Vec<_> = (0..2)
        .map(|number| {
            let (scene, sam) = (Arc::clone(&scene), sam.clone());
            tokio::spawn(async move {
                let mut sent: Vec<SentMessage> = Vec::new();
                for n in 0..by_run_size(150, 1000) {
                    let apis = [scene.api_of(&sam, number), scene.api_of(&sam, number + 1)];
                    let to = Target::Dm(format!("d{}", n % 20));
                    sent.push(send_keyed(&apis, &to, &format!("{number}-{n}")).await?);
                    tokio::time::sleep(Duration::from_millis(15)).await;
                }
                anyhow::Ok(sent)
            })
        })
        .collect();
    wait::until("traffic to flow", SOON, || async { scene.ledger.position("d9") > 1 }).await;

    let since = Instant::now();
    let terminated = tokio::spawn({
        let scene = Arc::clone(&scene);
        async move { scene.stack.gateway(0).terminate().await }
    });
    let mut ends: Vec<Instant> = Vec::new();
    let mut seen = vec![false; nodes.len()];
    while !terminated.is_finished() || seen.contains(&false) {
        for (node, seen) in nodes.iter().zip(&mut seen) {
            if !*seen && !scene.ledger.links(node.name()).ended.is_empty() {
                *seen = true;
                ends.push(Instant::now());
            }
        }
        ensure!(since.elapsed() < Duration::from_secs(40), "not drained");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    terminated.await??;
    let took = since.elapsed();
    let spread = ends.last().zip(ends.first()).map(|(last, first)| *last - *first).unwrap_or_default();
    println!("drained in {took:?}, sockets closed over {spread:?}");
    ensure!(took < Duration::from_secs(30), "it took {took:?}");
    ensure!(spread > Duration::from_secs(1), "all sockets closed within {spread:?}");
    for node in &nodes {
        let links = scene.ledger.links(node.name());
        ensure!(links.ended == [Some(1012)], "{}: {links:?}", node.name());
    }
    let mut sent = Vec::new();
    for sender in senders {
        sent.extend(sender.await??);
    }
    for n in 0..20 {
        let name = format!("d{n}");
        let head = scene.database.mailbox_position(&name).await?.head;
        scene.wait_received(&name, head, SOON).await;
        scene.wait_acked(&name, head, SOON).await;
    }
    scene.verify(&sent).await
}

/// The COMMIT of a registration arrives, its answer is lost, and Postgres stays unavailable until the connection has
/// given up. Its client does not return.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_cut_in_its_commit_does_not_hold_its_provider() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().through_proxies(true)).await?;
    let node = scene.workspace.create_broker_node("node-cut", "cut").await?;
    let gateway = scene.gateways_from(0)[0].replacen("http", "ws", 1);
    let mut socket = NodeSocket::connect_with_header(&gateway, &node.token).await?;
    let fired = scene.cut_commit_of("instance-cut", Verdict::ForwardThenCut);
    let reply = socket.register_broker(&node.node_id, "cut", "instance-cut").await;
    ensure!(reply.is_err() && fired.load(Ordering::Relaxed), "the registration was not cut: {reply:?}");
    wait_freed(&scene, socket, &node.node_id).await
}

/// The same for a direct node, which one statement registers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_registration_of_a_direct_node_does_not_hold_its_provider() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().through_proxies(true)).await?;
    let ada = scene.workspace.register_agent("ada").await?;
    let node = scene.workspace.as_agent(&ada).direct_node_token().await?;
    let gateway = scene.gateways_from(0)[0].replacen("http", "ws", 1);
    let mut socket = NodeSocket::connect(&gateway, &node.token).await?;
    // A tag of the registration, which no other statement carries.
    let fired = scene.cut_statement_of("implicit", Verdict::ForwardThenCut);
    let reply = socket.register_direct(&node.node_id, &node.name).await;
    ensure!(reply.is_err() && fired.load(Ordering::Relaxed), "the registration was not cut: {reply:?}");
    wait_freed(&scene, socket, &node.node_id).await
}

/// Lets Postgres return once a socket whose registration was cut is closed, and waits until the provider is free.
async fn wait_freed(scene: &Scene, mut socket: NodeSocket, node_id: &str) -> Result<()> {
    // Missed heartbeats free a provider only after 45 s.
    const FREED_WITHIN: Duration = Duration::from_secs(10);
    ensure!(scene.database.is_connected(node_id).await?, "the registration did not arrive");
    let _ = socket.closed(SOON).await;
    scene.stack.postgres_proxy().restore();
    let since = Instant::now();
    wait::until("the provider to be free", FREED_WITHIN, || async {
        scene.database.is_connected(node_id).await.is_ok_and(|connected| !connected)
    })
    .await;
    let fault = "connection cut in the COMMIT of a registration, until its provider is free";
    scene.print_row(fault, since.elapsed(), &[]);
    Ok(())
}

/// Two sockets of a direct node register while Postgres is unavailable. Whichever registration is written first, the
/// newer socket holds the node afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_socket_that_waited_for_storage_does_not_displace_a_newer_one() -> Result<()> {
    // Requests at nearly the same time take over from each other, since clocks of gateways differ.
    const CLOCK_TOLERANCE: Duration = Duration::from_millis(1100);
    let scene = Scene::start_with(Stack::builder().through_proxies(true)).await?;
    let (sam, ada) = (scene.workspace.register_agent("sam").await?, scene.workspace.register_agent("ada").await?);
    let node = scene.workspace.as_agent(&ada).direct_node_token().await?;
    for round in 0..by_run_size(2, 10) {
        let [first, second] = [0, 1].map(|at| scene.gateways_from(round + at)[0].replacen("http", "ws", 1));
        let older = NodeSocket::connect(&first, &node.token).await?;
        let newer = NodeSocket::connect(&second, &node.token).await?;
        scene.stack.postgres_proxy().cut();
        let register = |mut socket: NodeSocket| {
            let (node_id, name) = (node.node_id.clone(), node.name.clone());
            tokio::spawn(async move {
                let reply = socket.register_direct(&node_id, &name).await;
                (socket, reply)
            })
        };
        let older = register(older);
        tokio::time::sleep(CLOCK_TOLERANCE).await;
        let newer = register(newer);
        // Both wait between two attempts when storage returns.
        tokio::time::sleep(CLOCK_TOLERANCE).await;
        scene.stack.postgres_proxy().restore();
        let ((mut newer, reply), (mut older, displaced)) = (newer.await?, older.await?);
        reply.context("the newer socket registers")?;
        newer.auto_ack(true);
        // Its gateway learns of the newer registration a moment later.
        if displaced.is_ok() {
            older.closed(SOON).await.context("the older socket is displaced")?;
        }
        let text = format!("round {round}");
        wait::until_ok("a post", SOON, || async { scene.dm(&sam, round % 2, "ada", &text).await }).await?;
        let got = newer.expect("deliver").await?;
        ensure!(got["payload"]["data"]["text"] == text.as_str(), "{got}");
        scene.ledger.record_delivery("ada", &got, &mut ConnectionLedger::default());
        let taken = older.expect_where("a delivery", Duration::ZERO, |frame| frame["type"] == "deliver").await;
        ensure!(taken.is_err(), "the older socket received {taken:?}, its registration: {displaced:?}");
        older.abort();
        newer.close().await?;
    }
    scene.verify(&[]).await
}
