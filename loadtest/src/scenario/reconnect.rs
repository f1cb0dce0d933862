//! `reconnect`: the gateway with every socket is killed; all agents resume at another one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::{Instant, sleep};

use crate::api::Workspace;
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::{Load, drive};
use crate::fleet::{Fleet, nodes};
use crate::inbox::Acks;
use crate::posts::channel_posts;
use crate::report::{Better, Ratio, Report};
use crate::target::Target;
use crate::window::Window;

/// Delay before a refused socket retries.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Maximum number of refusals stored for the report.
const REMEMBERED_REFUSALS: usize = 10_000;
/// Time after which agents that have not caught up are reported as missing.
const GIVE_UP: Duration = Duration::from_secs(90);

/// Connects `agents` on broker sockets with `unacked` deliveries each; measures from the kill until the last agent has
/// received all again.
pub(crate) async fn run(
    common: &Common,
    agents: usize,
    on_each: usize,
    unacked: usize,
    report: &mut Report,
) -> Result<()> {
    ensure!(on_each >= 2 && unacked >= 1, "needs broker sockets and something to replay");
    let target = Target::start(common, usize::from(common.gateways).max(2)).await?;
    let workspace = Workspace::create(&target.urls()).await?;
    let all = workspace.agents("a", agents).await?;
    let mut specs = nodes(&workspace, &all, on_each, "lt").await?;
    for spec in &mut specs {
        spec.acks = Acks::Withheld;
        spec.goal = Some(unacked as u64);
    }
    // A channel for each socket, so that few posts make many deliveries.
    let owner = workspace.agents("owner", 1).await?.swap_remove(0);
    let mut channels = Vec::new();
    for (number, spec) in specs.iter().enumerate() {
        let name = format!("c{number}");
        workspace.channel(&name, &owner, &spec.agents).await?;
        channels.push((name, owner.clone()));
    }

    let collector = Arc::new(Collector::default());
    let fleet = Fleet::connect(&workspace.through_gateway(0), &specs, &collector).await?;
    let send = channel_posts(&workspace.through_gateway(1), &channels, common.bytes as usize);
    let sent = drive(&Load::counted(16, channels.len() * unacked), &collector, send).await;
    let expected = (agents * unacked) as u64;
    let missing = collector.drain(expected).await;
    ensure!(missing == 0 && sent.failed == 0, "set-up: {missing} deliveries missing, {:?}", sent.first_failure);
    // All writes of the setup are finished before the gateway is killed.
    sleep(Duration::from_secs(2)).await;

    for spec in &mut specs {
        spec.acks = Acks::Cumulative;
    }
    // A separate collector, so that the end of the old sockets is not counted as a problem.
    let collector = Arc::new(Collector::default());
    let roots = target.roots();
    let window = Window::open_for_old(&roots, &collector);
    target.stack().gateway(0).kill9();
    drop(fleet);
    let (refusals, mut refused) = tokio::sync::mpsc::channel(REMEMBERED_REFUSALS);
    let deadline = Instant::now() + GIVE_UP;
    let other = Arc::clone(workspace.pool(1));
    let _fleet = Fleet::reconnect(other.address(), &specs, &collector, RETRY_PAUSE, deadline, refusals);
    while collector.caught_up_count() < agents as u64 && Instant::now() < deadline {
        sleep(Duration::from_millis(2)).await;
    }
    let mut row = window.close(format!("reconnect {agents}"));
    row.accepted = sent.accepted;
    row.latency = None;
    let back = collector.caught_up_count();
    if back < agents as u64 {
        row.problems.push(format!("{} agents did not catch up within {GIVE_UP:?}", agents as u64 - back));
    }
    row.notes
        .push(format!("{} sockets, {unacked} unacked each, from kill -9 to the last agent caught up", specs.len()));
    let mut reasons: BTreeMap<String, u64> = BTreeMap::new();
    while let Ok(reason) = refused.try_recv() {
        // Apart from names of nodes and addresses, there are few kinds of refusals.
        *reasons.entry(reason.chars().take(160).collect()).or_default() += 1;
    }
    row.figures.insert("refused_attempts".into(), reasons.values().sum::<u64>() as f64);
    if let Some((reason, count)) = reasons.iter().max_by_key(|(_, count)| **count) {
        row.notes.push(format!("{count} refused attempts: {reason}"));
    }
    let seconds = row.seconds;
    report.add(row);
    if (agents, on_each, unacked) == (10_000, 100, 10) && back == 10_000 {
        report.ratios.push(Ratio {
            target: "S9",
            what: "seconds until 10000 agents on 100 sockets, 10 unacked each, had resumed and caught up".into(),
            value: seconds,
            ship: 15.0,
            goal: 5.0,
            better: Better::Lower,
        });
    }
    Ok(())
}
