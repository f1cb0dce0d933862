//! Recoveries of a database by two gateways: one of them repairs it, and ends or freezes in the middle; and the worker
//! numbers of processes that have recovered.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::{
    by_run_size,
    node::Node,
    scene::Scene,
    sender::{Outcome, SentMessage},
};
use relay_testkit::{
    stack::{Service, Stack},
    wait,
};

/// Limit for a loaded machine.
const SOON: Duration = Duration::from_secs(30);
/// Postgres ends the session of the lock this long after the last sign of life of its process.
const LOCK_ENDS_WITHIN: Duration = Duration::from_secs(10);
/// The other gateway's own repair, on a loaded machine.
const REPAIRED_WITHIN: Duration = Duration::from_secs(10);

/// First change of a repair after its begin.
const REPAIR: &str = "UPDATE event_heads SET next_seq = next_seq +";
/// As if the database had been restored.
const RESTORED: &str = "UPDATE recovery_state SET identity = 'of another cluster'";
const REPAIRS: &str = "database was restored to an older state, recovering";
const WAITS: &str = "another process is recovering the database";

/// End of the process that repairs.
#[derive(Clone, Copy)]
enum End {
    Killed,
    Stopped,
}

impl End {
    const fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::Stopped => "frozen",
        }
    }

    /// Longest wait of another process for the lock.
    const fn lock_ends_within(self) -> Duration {
        match self {
            // Its sessions end with it.
            Self::Killed => Duration::ZERO,
            Self::Stopped => LOCK_ENDS_WITHIN,
        }
    }
}

/// Returns the gateway that is in the middle of a repair, once the other one waits for its end.
async fn find_repairer(scene: &Scene) -> Result<usize> {
    wait::until_ok("a gateway to repair, and the other to wait for it", SOON, || async {
        ensure!(scene.database.waits_for_lock(REPAIR).await?, "no repair");
        let logs = |message| {
            scene.stack.gateways().iter().position(|gateway: &Service| gateway.log_tail(30).contains(message))
        };
        let (repairs, waits) = (logs(REPAIRS).context("none repairs")?, logs(WAITS).context("none waits")?);
        ensure!(repairs != waits, "{} repairs and waits", scene.stack.gateway(repairs).name());
        anyhow::Ok(repairs)
    })
    .await
    .with_context(|| scene.stack.logs(20))
}

/// The lock of a repair ends with its process, or 10 s after its last sign of life. Nothing else keeps another process
/// from serving.
async fn end_repairer(end: End) -> Result<()> {
    let scene = Scene::start_with(Stack::builder().gateways(2).workers(0)).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (mut nodes, mut agents) = (Vec::new(), Vec::new());
    for (nth, name) in ["ada", "bob"].into_iter().enumerate() {
        let agent = scene.workspace.register_agent(name).await?;
        // No other gateway: the one that freezes would accept a connection, and not serve it.
        let home = [scene.stack.gateway(nth).url()];
        nodes.push(Node::direct(&scene.workspace, &agent, &home, &scene.ledger).await?);
        scene.dm(&sam, nth, name, &format!("before {name}")).await?;
        scene.wait_acked(name, 1, SOON).await;
        agents.push(agent);
    }
    let held = scene.database.lock("LOCK TABLE event_heads IN EXCLUSIVE MODE").await?;
    scene.database.execute(RESTORED).await?;
    let repairer = find_repairer(&scene).await?;
    let (ended, other) = (scene.stack.gateway(repairer), 1 - repairer);
    match end {
        End::Killed => ended.kill9(),
        End::Stopped => ended.sigstop(),
    }
    let since = Instant::now();
    held.rollback().await?;

    let agent = &agents[other].name;
    scene.wait_service_at(other, &sam, agent, "meanwhile").await?;
    let took = since.elapsed();
    ensure!(took < end.lock_ends_within() + REPAIRED_WITHIN, "service after {took:?}");
    let head = scene.database.mailbox_position(agent).await?.head;
    scene.wait_received(agent, head, SOON).await;

    // It finds the database repaired.
    match end {
        End::Killed => ended.restart().await?,
        End::Stopped => ended.sigcont(),
    }
    for agent in &agents {
        scene.wait_service(&sam, &agent.name, &format!("after for {}", agent.name)).await?;
    }
    scene.wait_settled(&agents, SOON).await?;
    for (gateway, expected) in [(ended, 0.0), (scene.stack.gateway(other), 1.0)] {
        let recoveries = gateway.metric("relay_recoveries_total").await?;
        ensure!((recoveries - expected).abs() < f64::EPSILON, "{} recovered {recoveries} times", gateway.name());
    }
    scene.verify(&[]).await?;
    scene.print_row(&format!("repairing process {}, until the other one serves", end.name()), took, &[]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_is_repeated_by_another_process_when_its_process_is_killed() -> Result<()> {
    end_repairer(End::Killed).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_is_repeated_by_another_process_when_its_process_freezes() -> Result<()> {
    end_repairer(End::Stopped).await
}

/// Worker number in the id of an accepted message.
fn worker_number(sent: &SentMessage) -> Result<i64> {
    let Outcome::Accepted(id) = &sent.outcome else { anyhow::bail!("{sent:?}") };
    Ok((id.parse::<i64>()? >> 12) & 0x3ff)
}

/// A restored database lacks the newest leases, and those of a state that is older than a minute have expired in it.
/// Renewals come every 10 s only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recovered_process_uses_no_worker_number_that_another_process_has() -> Result<()> {
    const LEASED_BY_ANOTHER: &str = "UPDATE worker_ids SET owner = 'another', lease_until = now() + interval '1 hour'
                                      WHERE owner IS NOT NULL AND owner <> 'another'";
    let scene = Scene::start_with(Stack::builder().gateways(1).workers(0)).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (_node, bob) = scene.direct("bob", 0).await?;
    let mut taken = vec![worker_number(&scene.wait_service_at(0, &sam, "bob", "before").await?)?];
    for round in 1..=by_run_size(3, 10) {
        scene.database.execute(LEASED_BY_ANOTHER).await?;
        scene.database.execute(RESTORED).await?;
        wait::until("the gateway to have recovered", SOON, || async {
            let recoveries = scene.stack.gateway(0).metric("relay_recoveries_total").await;
            recoveries.is_ok_and(|count| (count - f64::from(round)).abs() < f64::EPSILON)
        })
        .await;
        let sent = scene.wait_service_at(0, &sam, "bob", &format!("round {round}")).await?;
        let number = worker_number(&sent)?;
        ensure!(!taken.contains(&number), "another process has {number} of {taken:?}");
        taken.push(number);
    }
    scene.wait_settled(&[bob], SOON).await?;
    scene.verify(&[]).await
}
