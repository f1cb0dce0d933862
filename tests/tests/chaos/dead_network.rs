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
use relay_acceptance::chaos::scene::Scene;
use relay_testkit::{
    proxy::{Direction, Verdict},
    stack::Stack,
    wait,
};

/// Limit for a loaded machine.
const SOON: Duration = Duration::from_secs(30);
/// The session of the lock is given up after 32 s, and the connections of the repair after 5 s more.
const SERVED_WITHIN: Duration = Duration::from_secs(60);

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
    println!("service after {took:?}");
    ensure!(took < SERVED_WITHIN, "service after {took:?}");
    let recoveries = scene.stack.gateway(0).metric("relay_recoveries_total").await?;
    ensure!((recoveries - 1.0).abs() < f64::EPSILON, "{recoveries} recoveries");
    scene.wait_settled(&[bob], SOON).await?;
    scene.verify(&[]).await
}
