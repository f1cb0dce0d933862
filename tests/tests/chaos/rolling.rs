//! Rolling restarts while messages flow: nothing is lost and every client reconnects. `relay-loadtest rolling` measures
//! the latency meanwhile.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::{
    chaos::{
        by_run_size,
        load::{Front, SendReport, Senders},
        node::Node,
        scene::Scene,
    },
    relayctl::relayctl_with,
};
use relay_testkit::{
    binaries,
    client::Agent,
    ports::Port,
    servers::{Nats, Postgres},
    stack::{Backends, Service, ServiceSpec, Stack, migrate},
    wait,
};
use sqlx::{Connection as _, PgConnection, migrate::Migrator};

/// Folder with the binaries of the previous version (`cargo xtask upgrade` builds them).
const PREVIOUS: &str = "RELAY_PREVIOUS_BIN_DIR";
const SENDERS: usize = 4;
/// Last migration of the first version.
const FIRST_SCHEMA: i64 = 2;
const MIGRATIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_loses_nothing_and_every_client_reconnects() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().gateways(3).workers(2)).await?;
    let urls: Vec<&str> = scene.stack.gateways().iter().map(Service::url).collect();
    let (_nodes, agents) = nodes(&scene, &urls, 3).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let front = Front::new(&urls);
    let senders = Senders::start(SENDERS, &scene.workspace.as_agent(&sam), &agents, &front);
    for round in 0..by_run_size(1, 3) {
        for process in scene.stack.gateways().iter().chain(scene.stack.workers()) {
            senders.send(50).await?;
            let since = Instant::now();
            // As in a cluster: first no new connections, then SIGTERM.
            front.remove(process.url());
            process.terminate().await?;
            process.restart().await?;
            if process.name().starts_with("gateway") {
                front.add(process.url());
            }
            println!("round {round}: {} replaced in {:.1?}", process.name(), since.elapsed());
        }
    }
    senders.send(50).await?;
    verify_settled(&scene, &agents, senders.stop().await?).await
}

/// Gateways exit while clients still call them: clients get no answer or a retryable one, and retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_keep_calling_a_draining_gateway_lose_nothing() -> Result<()> {
    let scene = Scene::start_with(Stack::builder().gateways(3)).await?;
    let urls: Vec<&str> = scene.stack.gateways().iter().map(Service::url).collect();
    let (_nodes, agents) = nodes(&scene, &urls, 3).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let senders = Senders::start(SENDERS, &scene.workspace.as_agent(&sam), &agents, &Front::new(&urls));
    for gateway in &scene.stack.gateways()[..by_run_size(2, 3)] {
        senders.send(50).await?;
        gateway.terminate().await?;
        gateway.restart().await?;
    }
    senders.send(50).await?;
    verify_settled(&scene, &agents, senders.stop().await?).await
}

/// The schema of the first version without its binaries, which the test below covers.
#[tokio::test]
async fn processes_wait_for_the_migration_of_an_old_schema_without_touching_it() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (database_dir, stream_dir) = (dir.path().join("postgres"), dir.path().join("nats"));
    let (postgres, nats) = tokio::try_join!(Postgres::start(&database_dir), Nats::start(&stream_dir))?;
    let backends = Backends { database_url: postgres.create_database("relay").await?, nats_url: nats.url() };
    let mut database = PgConnection::connect(&backends.database_url).await?;
    let known = Migrator::new(Path::new(MIGRATIONS)).await?;
    let old: Vec<_> = known.iter().filter(|migration| migration.version <= FIRST_SCHEMA).cloned().collect();
    Migrator::with_migrations(old).run(&mut database).await?;

    let variables = [("DATABASE_URL", backends.database_url.as_str()), ("NATS_URL", backends.nats_url.as_str())];
    let doctor = relayctl_with(&["doctor"], &variables, "").await?;
    ensure!(!doctor.success && doctor.stdout.contains("-> run relayctl migrate"), "{}", doctor.stdout);

    let bin_dir = binaries::directory()?;
    let files = [("RELAY_FILES_DIR".to_owned(), dir.path().join("files").to_string_lossy().into_owned())];
    let ports = [Port::free()?, Port::free()?, Port::free()?];
    let [main, metrics, of_worker] = ports.each_ref().map(Port::address);
    let specify = |name, program| {
        let program = binaries::find(&bin_dir, program)?;
        let log = dir.path().join(format!("{name}.log"));
        anyhow::Ok(ServiceSpec { name, program, backends: &backends, env: &files, log })
    };
    let gateway = Service::gateway(&specify("gateway", "relay-gateway")?, &main, &metrics)?;
    let worker = Service::worker(&specify("worker", "relay-worker")?, &of_worker)?;
    for waiting in [&gateway, &worker] {
        wait::until("a program to see that the schema is old", Duration::from_secs(30), || async {
            waiting.log_tail(20).contains("waiting for a newer schema")
        })
        .await;
        ensure!(!waiting.is_ready().await, "{} is ready on the old schema", waiting.name());
    }
    let leases = "SELECT (SELECT count(*) FROM gateways) + (SELECT count(*) FROM worker_ids WHERE owner IS NOT NULL)";
    ensure!(sqlx::query_scalar::<_, i64>(leases).fetch_one(&mut database).await? == 0, "somebody took a lease");

    // A signal ends the wait. The hard stop would end it too, with another status.
    for waiting in [&gateway, &worker] {
        waiting.terminate().await?;
        waiting.start_again()?;
    }
    migrate(&binaries::find(&bin_dir, "relayctl")?, &backends.database_url, &backends.nats_url).await?;
    for served in [&gateway, &worker] {
        served.wait_ready().await?;
        served.terminate().await?;
    }
    drop(ports);
    Ok(())
}

/// Old processes on the new schema, new processes before the migration, both at once, and the rollback.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_from_the_previous_version_loses_nothing() -> Result<()> {
    let Some(previous) = std::env::var_os(PREVIOUS) else {
        println!("not run: {PREVIOUS} is not set; `cargo xtask upgrade` builds the previous version and runs this");
        return Ok(());
    };
    let scene = Scene::start_with(Stack::builder().gateways(2).bin_dir(previous)).await?;
    let bin_dir = binaries::directory()?;
    let backends = Backends { database_url: scene.stack.database_url().to_owned(), nats_url: scene.stack.nats_url() };
    // Reserved before the nodes get their URLs.
    let ports = [(Port::free()?, Port::free()?), (Port::free()?, Port::free()?)];
    let new_urls = ports.each_ref().map(|(main, _)| format!("http://{}", main.address()));
    let old_urls = scene.gateways_from(0);
    let all_urls: Vec<&str> = old_urls.iter().copied().chain(new_urls.iter().map(String::as_str)).collect();
    let (_nodes, agents) = nodes(&scene, &all_urls, 2).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let front = Front::new(&old_urls);
    let senders = Senders::start(SENDERS, &scene.workspace.as_agent(&sam), &agents, &front);
    senders.send(100).await?;

    // New processes on an old schema wait and do no harm.
    let is_schema_old = has_pending_migrations(&backends.database_url).await?;
    let mut new_gateways = Vec::new();
    for (number, (main, metrics)) in ports.into_iter().enumerate() {
        new_gateways.push(start_gateway(&scene, &bin_dir, &backends, number + 3, main, metrics)?);
    }
    let new_worker = start_worker(&scene, &bin_dir, &backends)?;
    for waiting in new_gateways.iter().chain([&new_worker]).filter(|_| is_schema_old) {
        wait::until("a new program to see that the schema is old", Duration::from_secs(30), || async {
            waiting.log_tail(20).contains("waiting for a newer schema")
        })
        .await;
        ensure!(!waiting.is_ready().await, "{} is ready on the old schema", waiting.name());
    }
    senders.send(100).await?;

    // The migration under load. From here on old processes use the new schema.
    let since = Instant::now();
    migrate(&binaries::find(&bin_dir, "relayctl")?, &backends.database_url, &backends.nats_url).await?;
    println!("migrated under load in {:.1?}", since.elapsed());
    senders.send(100).await?;
    for waiting in new_gateways.iter().chain([&new_worker]) {
        waiting.wait_ready().await?;
    }
    for url in &new_urls {
        front.add(url);
    }
    senders.send(200).await?;
    println!("both versions took messages");

    // The rollback: an old gateway and an old worker start on the new schema.
    for old in [scene.stack.gateway(0), scene.stack.worker()] {
        front.remove(old.url());
        old.terminate().await?;
        old.restart().await?;
        if old.url() == old_urls[0] {
            front.add(old.url());
        }
    }
    senders.send(100).await?;
    let failures = scene.stack.worker().metric("relay_loop_failures_total").await?;
    ensure!(failures == 0.0, "loops of the old worker failed:\n{}", scene.stack.worker().log_tail(20));

    // The upgrade ends: the old processes stop.
    for old in scene.stack.gateways().iter().chain([scene.stack.worker()]) {
        front.remove(old.url());
        old.terminate().await?;
        senders.send(100).await?;
    }
    let failures = new_worker.metric("relay_loop_failures_total").await?;
    ensure!(failures == 0.0, "loops of the new worker failed:\n{}", new_worker.log_tail(20));
    let report = senders.stop().await?;
    wait_settled(&scene, &agents, &report).await?;
    scene.verify_at(&new_urls[0], &report.sent).await
}

/// True if this version has migrations that the database has not had.
async fn has_pending_migrations(database_url: &str) -> Result<bool> {
    let mut database = PgConnection::connect(database_url).await?;
    let applied: i64 = sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations").fetch_one(&mut database).await?;
    let known = Migrator::new(Path::new(MIGRATIONS)).await?;
    Ok(known.iter().any(|migration| migration.version > applied))
}

/// Creates brokers with two agents each, and agents with direct nodes, each with one of the first gateways as its home.
async fn nodes(scene: &Scene, urls: &[&str], up: usize) -> Result<(Vec<Node>, Vec<Agent>)> {
    let (mut nodes, mut agents) = (Vec::new(), Vec::new());
    let at_first = scene.workspace.at(urls[0]);
    for number in 0..4 {
        let mut order = urls.to_vec();
        order.swap(0, number % up);
        let hosted = [format!("b{number}"), format!("c{number}")];
        let (node, on_it) =
            Node::broker(&at_first, &format!("broker-{number}"), &hosted, &order, &scene.ledger).await?;
        nodes.push(node);
        agents.extend(on_it);
        for name in [format!("d{number}"), format!("e{number}")] {
            let agent = at_first.register_agent(&name).await?;
            nodes.push(Node::direct(&at_first, &agent, &order, &scene.ledger).await?);
            agents.push(agent);
        }
    }
    Ok((nodes, agents))
}

/// Waits for all deliveries and verifies the ledgers of senders and nodes.
async fn verify_settled(scene: &Scene, agents: &[Agent], report: SendReport) -> Result<()> {
    wait_settled(scene, agents, &report).await?;
    scene.verify(&report.sent).await
}

async fn wait_settled(scene: &Scene, agents: &[Agent], report: &SendReport) -> Result<()> {
    println!(
        "{} messages, {} answers of 5xx and {} lost connections on the way, {} frames came again",
        report.sent.len(),
        report.server_errors,
        report.no_answers,
        scene.ledger.repeats()
    );
    for agent in agents {
        let head = scene.database.mailbox_position(&agent.name).await?.head;
        scene.wait_received(&agent.name, head, Duration::from_secs(30)).await;
        scene.wait_acked(&agent.name, head, Duration::from_secs(15)).await;
    }
    Ok(())
}

fn start_gateway(
    scene: &Scene,
    bin_dir: &Path,
    backends: &Backends,
    number: usize,
    main: Port,
    metrics: Port,
) -> Result<Service> {
    let name = format!("gateway-{number}");
    let log = scene.stack.state_dir().join("logs").join(format!("{name}.log"));
    let program = binaries::find(bin_dir, "relay-gateway")?;
    let spec = ServiceSpec { name: &name, program, backends, env: &files(scene), log };
    let service = Service::gateway(&spec, &main.address(), &metrics.address());
    Ok(service.context("start a new gateway")?.with_reserved_ports([main, metrics]))
}

fn start_worker(scene: &Scene, bin_dir: &Path, backends: &Backends) -> Result<Service> {
    let metrics = Port::free()?;
    let log = scene.stack.state_dir().join("logs").join("worker-new.log");
    let program = binaries::find(bin_dir, "relay-worker")?;
    let spec = ServiceSpec { name: "worker-new", program, backends, env: &files(scene), log };
    let service = Service::worker(&spec, &metrics.address());
    Ok(service.context("start a new worker")?.with_reserved_ports([metrics]))
}

/// Files of all processes are in one folder.
fn files(scene: &Scene) -> Vec<(String, String)> {
    let dir = scene.stack.state_dir().join("files").to_string_lossy().into_owned();
    vec![("RELAY_FILES_DIR".to_owned(), dir)]
}
