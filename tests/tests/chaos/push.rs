//! http_push during crashes: three workers are killed at random while they deliver to many endpoints, some of them
//! dead; every healthy endpoint gets all deliveries in order, never two at a time.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::{
    by_run_size,
    database::Database,
    end_state::{judge, record_calls},
    is_full, random_below,
    sender::send_accepted,
};
use relay_testkit::binaries;
use relay_testkit::client::Api;
use relay_testkit::history::{History, Losses};
use relay_testkit::ports::Port;
use relay_testkit::receiver::{Receiver, Reply};
use relay_testkit::stack::{Backends, Service, ServiceSpec, Stack};
use relay_testkit::wait;
use serde_json::json;
use tokio::task::JoinSet;

const WORKERS: usize = 3;
const SENDERS: usize = 8;
/// Time from the last kill to the last delivery: the lease of a dead worker, and the backlog.
const SETTLED_WITHIN: Duration = Duration::from_secs(240);

struct PushField {
    stack: Stack,
    workers: Vec<Service>,
}

impl PushField {
    async fn new() -> Result<Self> {
        let stack = Stack::builder().worker(false).start().await?;
        let program = binaries::find(&binaries::directory()?, "relay-worker")?;
        let backends = Backends { database_url: stack.database_url().to_owned(), nats_url: stack.nats_url() };
        // All endpoints are one host of one workspace; this is about their own speed.
        let env = [("RELAY_DESTINATION_CALL_RATE".to_owned(), "1000000".to_owned())];
        let mut workers = Vec::new();
        for number in 0..WORKERS {
            let port = Port::free()?;
            let name = format!("worker-{number}");
            let log = stack.state_dir().join(format!("{name}.log"));
            let spec = ServiceSpec { name: &name, program: program.clone(), backends: &backends, env: &env, log };
            workers.push(Service::worker(&spec, &port.address())?.with_reserved_ports([port]));
        }
        for worker in &workers {
            worker.wait_ready().await?;
        }
        Ok(Self { stack, workers })
    }

    fn logs(&self) -> String {
        self.workers.iter().map(|worker| format!("== {} ==\n{}\n", worker.name(), worker.log_tail(15))).collect()
    }
}

/// Result of one round.
struct RoundResult {
    p99: Duration,
    repeats: usize,
    kills: usize,
}

/// Sends `each` deliveries to each of `endpoints`; every tenth is dead if `some_dead`. Names and texts contain that of
/// the round: all rounds share a database.
async fn run_round(
    field: &Arc<PushField>,
    name: &str,
    endpoints: usize,
    each: usize,
    some_dead: bool,
    kill: bool,
) -> Result<RoundResult> {
    let key = Api::create_workspace(field.stack.gateway(0).url(), name).await?;
    let receiver = Receiver::start(|_, _| Reply::Status(200)).await?;
    let is_dead = move |number: usize| some_dead && number % 10 == 9;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    for number in 0..endpoints {
        let (path, agent) = (format!("/e{number}"), format!("{name}-{number}"));
        if is_dead(number) {
            receiver.script(&path, [if number % 20 == 9 { Reply::Hang(Vec::new()) } else { Reply::Reset }]);
        }
        key.register_agent(&agent).await?;
        let delivery = json!({ "url": receiver.url(&path), "ack_mode": "on_2xx" });
        let node = json!({ "name": format!("n{number}"), "kind": "http_push", "delivery": delivery });
        key.post("/v1/nodes", node).await?.success()?;
        key.bind(&format!("n{number}"), &agent).await?;
    }

    let (over, history) = (Arc::new(AtomicBool::new(false)), Arc::<History>::default());
    let killer = tokio::spawn(kill_workers(Arc::clone(field), Arc::clone(&over), kill));
    let mut senders = JoinSet::new();
    for sender in 0..SENDERS {
        let (ann, history, name) = (ann.clone(), Arc::clone(&history), name.to_owned());
        let mine: Vec<usize> = (0..endpoints).filter(|number| number % SENDERS == sender).collect();
        senders.spawn(async move {
            let mut sent: Vec<(usize, Vec<Instant>)> = mine.iter().map(|number| (*number, Vec::new())).collect();
            for nth in 0..each {
                for (number, at) in &mut sent {
                    at.push(Instant::now());
                    let (agent, text) = (format!("{name}-{number}"), format!("{name}: {nth} to {number}"));
                    let (_, post) = send_accepted(&ann, &agent, &text).await?;
                    history.record_post(post);
                    if is_dead(*number) {
                        history.allow_loss(&agent, &text);
                    }
                }
            }
            anyhow::Ok(sent)
        });
    }
    let mut sent = Vec::new();
    while let Some(some) = senders.join_next().await {
        sent.extend(some??);
    }
    over.store(true, Ordering::Relaxed);
    let kills = killer.await??;

    let healthy: Vec<&(usize, Vec<Instant>)> = sent.iter().filter(|(number, _)| !is_dead(*number)).collect();
    let mut waiting = healthy.clone();
    let settled = wait::until_ok("all endpoints to have everything", SETTLED_WITHIN, || {
        waiting.retain(|(number, at)| {
            let calls = receiver.calls(&format!("/e{number}"));
            calls.len() < at.len() || calls.iter().map(|call| call.seq()).collect::<HashSet<_>>().len() < at.len()
        });
        let missing = waiting.len();
        async move {
            ensure!(missing == 0, "{missing} endpoints still miss deliveries");
            Ok(())
        }
    });
    settled.await.with_context(|| field.logs())?;

    let (mut latencies, mut repeats) = (Vec::new(), 0);
    for (number, at) in &healthy {
        let calls = receiver.calls(&format!("/e{number}"));
        record_calls(&history, &format!("{name}-{number}"), &calls)?;
        let mut highest = 0;
        let mut ids = HashSet::new();
        for call in &calls {
            let id = call.json()["delivery_id"].as_str().context("no delivery id")?.to_owned();
            if !ids.insert(id) {
                repeats += 1;
                continue;
            }
            ensure!(call.seq() == highest + 1, "endpoint {number}: {} came after {highest}", call.seq());
            highest = call.seq();
            let position = usize::try_from(highest - 1)?;
            latencies.push(call.at.saturating_duration_since(at[position]));
        }
        ensure!(highest == i64::try_from(at.len())?, "endpoint {number}: {highest} of {}", at.len());
    }
    judge(&history, &Database::connect(field.stack.database_url())?, &key, Losses::None).await?;
    ensure!(receiver.max_concurrency() <= 1, "{} attempts of one delivery at once", receiver.max_concurrency());
    latencies.sort_unstable();
    let p99 = latencies.get(latencies.len() * 99 / 100).copied().unwrap_or_default();
    println!("{name}: {} deliveries, p99 {p99:?}, {repeats} came again, {kills} kills", latencies.len());
    Ok(RoundResult { p99, repeats, kills })
}

/// Kills and restarts random workers until `over`.
async fn kill_workers(field: Arc<PushField>, over: Arc<AtomicBool>, kill: bool) -> Result<usize> {
    let mut kills = 0;
    while kill && !over.load(Ordering::Relaxed) {
        // Random, so that kills hit every step of a dispatch.
        tokio::time::sleep(Duration::from_millis(500 + random_below(2500) as u64)).await;
        let victim = &field.workers[random_below(WORKERS)];
        victim.kill9();
        tokio::time::sleep(Duration::from_millis(random_below(1500) as u64)).await;
        victim.start_again()?;
        kills += 1;
    }
    Ok(kills)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_healthy_endpoint_gets_everything_in_order_while_workers_are_killed() -> Result<()> {
    let field = Arc::new(PushField::new().await?);
    let (endpoints, each) = by_run_size((20, 40), (500, 100));
    if is_full() {
        let without = run_round(&field, "calm", endpoints, each, false, false).await?;
        let with = run_round(&field, "some-dead", endpoints, each, true, false).await?;
        ensure!(without.repeats + with.repeats == 0, "nothing was killed, yet something came again");
        let bar = without.p99.mul_f64(1.2);
        ensure!(with.p99 <= bar, "p99 {:?} with dead endpoints, {:?} without", with.p99, without.p99);
    }
    let stormy = run_round(&field, "storm", endpoints, each, true, true).await?;
    ensure!(stormy.kills > 0, "nobody was killed");
    Ok(())
}
