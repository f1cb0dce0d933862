//! `idle`: gateway memory per connected idle agent, and the CPU of gateway, Postgres and worker for all of them.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::sleep;

use crate::api::Workspace;
use crate::cli::Common;
use crate::collector::Collector;
use crate::fleet::{Fleet, nodes};
use crate::report::{Better, Ratio, Report};
use crate::target::Target;
use crate::usage::{Cpu, Sample, resident_kib};
use crate::window::Window;

const ON_A_BROKER: usize = 100;
/// Agents that connect and disconnect before the first measurement, so that it includes allocations of any traffic.
const WARMING: usize = 50;
/// Time between the last connect and the measurement: a heartbeat of each socket and a round of the silence check.
const SETTLE: Duration = Duration::from_secs(20);
/// Length of the window over which the CPU of idle agents is measured: two heartbeats of each socket.
const IDLE: Duration = Duration::from_secs(60);

/// Connects `brokered` agents, 100 on each socket, then `direct` agents with a socket each.
pub(crate) async fn run(common: &Common, brokered: usize, direct: usize, report: &mut Report) -> Result<()> {
    // One gateway, which serves all sockets.
    let target = Target::start(common, 1).await?;
    layout(common, &target, brokered, ON_A_BROKER, (6.0, 3.0), report).await?;
    layout(common, &target, direct, 1, (20.0, 10.0), report).await
}

async fn layout(
    common: &Common,
    target: &Target,
    agents: usize,
    per_socket: usize,
    (ship, goal): (f64, f64),
    report: &mut Report,
) -> Result<()> {
    let workspace = Workspace::create(&target.urls()).await?;
    let all = workspace.agents("a", agents).await?;
    let specs = nodes(&workspace, &all, per_socket, "lt").await?;
    let extra = workspace.agents("w", WARMING).await?;
    let extra = nodes(&workspace, &extra, per_socket, "warm").await?;

    // A fresh process: registering thousands of agents leaves freed memory that the sockets would reuse.
    target.stack().gateway(0).restart().await?;
    let collector = Arc::new(Collector::default());
    drop(Fleet::connect(&workspace, &extra, &collector).await?);
    sleep(Duration::from_secs(3)).await;
    let roots = target.roots();
    let gateway = || {
        let resident = resident_kib(&roots);
        let of_gateways = resident.iter().filter(|(name, _)| name.starts_with("gateway"));
        of_gateways.map(|(_, kib)| *kib).sum::<u64>()
    };
    let before = gateway();
    let window = Window::open(&roots, &collector);
    let began = tokio::time::Instant::now();
    let _fleet = Fleet::connect(&workspace, &specs, &collector).await.context("connect the idle agents")?;
    let connecting = began.elapsed();
    sleep(if common.small { SETTLE / 10 } else { SETTLE }).await;
    let after = gateway();
    let idle = Sample::now(&roots);
    sleep(if common.small { IDLE / 10 } else { IDLE }).await;
    let idle = Sample::now(&roots).since(&idle);
    let of_core = 100.0 * idle.stack_total() / idle.wall_seconds;

    let name = format!("idle {agents}, {per_socket} a socket");
    let mut row = window.close(&name);
    row.seconds = began.elapsed().as_secs_f64();
    let kilobytes = after.saturating_sub(before) as f64 * 1.024 / agents as f64;
    row.figures.insert("gateway_kb_per_agent".into(), kilobytes);
    row.figures.insert("connect_seconds".into(), connecting.as_secs_f64());
    row.figures.insert("idle_cpu_percent".into(), of_core);
    row.notes.push(format!("idle: {of_core:.1} % of a core, of it {}", shares(&idle)));
    row.notes.push(format!(
        "gateway {} -> {} MiB = {kilobytes:.1} kB an agent; connected in {:.1} s",
        before / 1024,
        after / 1024,
        connecting.as_secs_f64()
    ));
    report.add(row);
    if agents >= 10_000 {
        report.ratios.push(Ratio {
            target: "idle CPU",
            what: format!("% of a core for {agents} idle agents, {per_socket} a socket"),
            value: of_core,
            ship: 2.0,
            goal: 0.5,
            better: Better::Lower,
        });
    }
    // With too few agents the allocator dominates.
    if agents >= 1000 {
        report.ratios.push(Ratio {
            target: "S15",
            what: format!("gateway kB for each idle agent, {per_socket} a socket"),
            value: kilobytes,
            ship,
            goal,
            better: Better::Lower,
        });
    }
    Ok(())
}

/// Formats the CPU of each process in % of a core.
fn shares(cpu: &Cpu) -> String {
    let each = cpu.stack.iter().map(|(name, seconds)| format!("{name} {:.1}", 100.0 * seconds / cpu.wall_seconds));
    each.collect::<Vec<_>>().join(", ")
}
