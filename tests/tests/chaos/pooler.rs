//! Engine behind a pooler in transaction mode, which has fewer connections to Postgres than the processes to it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use relay_acceptance::chaos::{
    by_run_size,
    load::{Front, Senders},
    scene::Scene,
};
use relay_testkit::{stack::Stack, wait};

const SOON: Duration = Duration::from_secs(60);
const SENDERS: usize = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engine_works_behind_a_pooler_and_outlives_its_restart() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().pooler(true)).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (broker, mut agents) = scene.broker("broker-ada", &["ada", "eve"], 0).await?;
    let (_direct, bob) = scene.direct("bob", 1).await?;
    agents.push(bob);
    let front = Front::new(&scene.gateways_from(0));
    let senders = Senders::start_persistent(SENDERS, &scene.workspace.as_agent(&sam), &agents, &front);
    senders.send(by_run_size(200, 2000)).await?;

    scene.stack.pooler().restart().await?;
    let restarted = Instant::now();
    scene.wait_service(&sam, "ada", "after the restart").await?;
    let took = restarted.elapsed();
    senders.send(by_run_size(100, 1000)).await?;
    // The transaction with a statement per step, which some batches need.
    scene.commit_in_steps().await?;
    senders.send(by_run_size(100, 1000)).await?;
    let sent = senders.stop().await?.sent;

    wait::until_ok("all mailboxes to be settled", SOON, || async {
        let positions = scene.database.mailbox_positions().await?;
        let open: Vec<_> = positions.iter().filter(|(_, at)| at.settled_floor != at.head).collect();
        ensure!(open.is_empty(), "{open:?}");
        anyhow::Ok(())
    })
    .await?;
    ensure!(scene.ledger.links(broker.name()).registered == 1, "no socket depends on the pooler");
    scene.verify(&sent).await?;
    scene.print_row("PgBouncer restarted", took, &sent);
    Ok(())
}
