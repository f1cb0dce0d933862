//! A network that dies during the recovery of a database: connections stay open, and nothing arrives over them.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use relay_acceptance::chaos::{
    scene::Scene,
    sender::{Target, send_keyed},
};
use relay_testkit::{
    proxy::{Direction, Verdict},
    stack::Stack,
    wait,
};

/// Limit for a loaded machine.
const SOON: Duration = Duration::from_secs(30);
/// The session of the lock is given up after 32 s, and the connections of the repair after 5 s more.
const SERVED_WITHIN: Duration = Duration::from_secs(60);
/// The gateway renews its lease each second, gives up a connection that does not answer a test after 2 s, and compares
/// the new one. The batch itself would be given up after 15 s.
const NOTICED_WITHIN: Duration = Duration::from_secs(14);

/// Statement of a repair that changes something first.
const REPAIR: &[u8] = b"UPDATE event_heads SET next_seq = next_seq +";

/// Swallows this statement, and from then on everything on the connections before, like a host that is lost behind a
/// virtual address. New connections are served. The flag says when.
fn lose_connections_at(scene: &Scene, statement: &'static [u8]) -> Arc<AtomicBool> {
    let lost = Arc::new(AtomicBool::new(false));
    let proxy = scene.stack.postgres_proxy();
    let (fired, mut before) = (Arc::clone(&lost), HashSet::new());
    proxy.set_filter(Direction::ToServer, move |connection, chunk| {
        if !fired.load(Ordering::Relaxed) {
            before.insert(connection);
            let carries = chunk.windows(statement.len()).any(|part| part == statement);
            fired.store(carries, Ordering::Relaxed);
        }
        if fired.load(Ordering::Relaxed) && before.contains(&connection) {
            chunk.clear();
        }
        Verdict::Forward
    });
    // Postgres ends sessions without signs of life, and the process does not learn it.
    let (fired, mut before) = (Arc::clone(&lost), HashSet::new());
    proxy.set_filter(Direction::ToClient, move |connection, _| {
        if !fired.load(Ordering::Relaxed) {
            before.insert(connection);
        } else if before.contains(&connection) {
            return Verdict::DropThenStall;
        }
        Verdict::Forward
    });
    lost
}

/// The statements of a repair have no deadline, so only the end of its lock ends it. No other process repairs here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_on_a_dead_network_ends_with_its_lock() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().gateways(1).workers(0).through_proxies(true)).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (_node, bob) = scene.direct("bob", 0).await?;
    scene.dm(&sam, 0, "bob", "before").await?;
    scene.wait_acked("bob", 1, SOON).await;
    let lost = lose_connections_at(&scene, REPAIR);
    // As if it had been restored.
    scene.database.execute("UPDATE recovery_state SET identity = 'of another cluster'").await?;
    wait::until("the network to die during the repair", SOON, || async { lost.load(Ordering::Relaxed) }).await;
    let died = Instant::now();
    scene.wait_service(&sam, "bob", "after").await?;
    let took = died.elapsed();
    ensure!(took < SERVED_WITHIN, "service after {took:?}");
    let recoveries = scene.stack.gateway(0).metric("relay_recoveries_total").await?;
    ensure!((recoveries - 1.0).abs() < f64::EPSILON, "{recoveries} recoveries");
    scene.wait_settled(&[bob], SOON).await?;
    scene.verify(&[]).await?;
    scene.print_row("network of the repairing process lost during the repair", took, &[]);
    Ok(())
}

/// The host of the primary is lost, and does not close its connections. A process commits one batch at a time, and the
/// next ones are written to the new primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_a_lost_host_does_not_answer_delays_no_other() -> Result<()> {
    const UNANSWERED: &str = "sent to the lost host";
    let scene = Scene::start_with(Stack::builder().gateways(1).workers(0).through_proxies(true)).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (_node, bob) = scene.direct("bob", 0).await?;
    scene.dm(&sam, 0, "bob", "before").await?;
    scene.wait_acked("bob", 1, SOON).await;
    let lost = lose_connections_at(&scene, UNANSWERED.as_bytes());
    let (api, target) = (scene.api_of(&sam, 0), Target::Dm("bob".to_owned()));
    let unanswered = tokio::spawn(async move { send_keyed(&[api], &target, UNANSWERED).await });
    wait::until("the host to be lost", SOON, || async { lost.load(Ordering::Relaxed) }).await;
    let died = Instant::now();
    // As if it had been restored, by another process.
    let other = "UPDATE recovery_state SET identity = 'of another cluster', epoch = epoch + 1";
    scene.database.execute(other).await?;
    scene.wait_service(&sam, "bob", "after").await?;
    let took = died.elapsed();
    ensure!(took < NOTICED_WITHIN, "service after {took:?}");
    let sent = [unanswered.await??];
    scene.wait_settled(&[bob], SOON).await?;
    scene.verify(&sent).await?;
    scene.print_row("host of the primary lost, connections stay open", took, &sent);
    Ok(())
}
