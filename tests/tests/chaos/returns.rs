//! Thousands of agents of one workspace, each with its own socket, that return at once.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use relay_acceptance::chaos::{by_run_size, is_full, posts::Posts, scene::Scene};
use relay_testkit::{stack::Stack, wait};

/// At full size, in a release build.
const RETURNED_WITHIN: Duration = Duration::from_secs(15);
const LOADED_MACHINE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn direct_agents_of_one_workspace_return_while_its_sends_continue() -> Result<()> {
    // By default, a gateway takes fewer sockets of one workspace than the full size has.
    let builder = Stack::builder().env("RELAY_MAX_CONNECTIONS_PER_WORKSPACE", "16384");
    let scene = Scene::start_with(builder).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (_broker, _) = scene.broker("broker-eve", &["eve"], 1).await?;
    let count = by_run_size(200, 10_000);
    let connect = |number: usize| {
        let scene = &scene;
        async move { scene.direct(&format!("d{number}"), 0).await }
    };
    // In its own time: only the return is a burst.
    let at_a_time = by_run_size(4, 16);
    let nodes: Vec<_> = stream::iter(0..count).map(connect).buffer_unordered(at_a_time).try_collect().await?;
    let posts = Posts::start(vec![scene.api_of(&sam, 1)], &["eve"]);
    wait::until("posts", LOADED_MACHINE, || async { posts.count() > 20 }).await;

    let first = posts.count();
    scene.stack.gateway(0).kill9();
    let since = Instant::now();
    wait::until("all agents to be back", LOADED_MACHINE, || async {
        nodes.iter().all(|(node, _)| {
            let links = scene.ledger.links(node.name());
            links.up && links.registered >= 2
        })
    })
    .await;
    let took = since.elapsed();
    println!("{}", posts.report("while they returned", first)?);
    ensure!(!is_full() || took < RETURNED_WITHIN, "back after {took:?}");
    let sent = posts.stop().await?;
    wait::until("the messages", LOADED_MACHINE, || async { scene.ledger.texts("eve").len() == sent.len() }).await;
    // Those that returned receive.
    scene.dm(&sam, 1, "d0", "back").await?;
    scene.wait_received("d0", 1, LOADED_MACHINE).await;
    scene.verify(&sent).await?;
    scene.print_row(&format!("gateway with {count} agents' own sockets killed, until all are back"), took, &sent);
    Ok(())
}
