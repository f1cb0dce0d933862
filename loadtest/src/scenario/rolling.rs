//! `rolling`: restarts every gateway and worker, one after the other, while messages flow.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, sleep};

use crate::api::Workspace;
use crate::cli::Common;
use crate::collector::Collector;
use crate::drive::{Load, drive};
use crate::fleet::{Fleet, nodes};
use crate::posts::{Front, direct_messages_as_client};
use crate::report::{Better, Ratio, Report, Row};
use crate::target::Target;
use crate::window::{Window, measure};

/// Delay before a refused socket retries.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Delay between two replacements, as `minReadySeconds` of the chart (10 s there).
const BETWEEN: Duration = Duration::from_secs(2);
/// Upper bound of the duration of all replacements.
const LONGEST: Duration = Duration::from_secs(600);

/// Runs the same load twice with `agents` reconnecting receivers: undisturbed, and during the restarts.
pub(crate) async fn run(common: &Common, rate: f64, agents: usize, report: &mut Report) -> Result<()> {
    let target = Target::start(common, usize::from(common.gateways).max(2)).await?;
    let workspace = Workspace::create(&target.urls()).await?;
    let senders = workspace.agents("s", agents.min(common.senders.into())).await?;
    let receivers = workspace.agents("r", agents).await?;
    let specs = nodes(&workspace, &receivers, common.per_socket.into(), "lt").await?;
    let (collector, ends) = (Arc::new(Collector::default()), Arc::new(AtomicU64::new(0)));
    let _fleet = Fleet::returning(&workspace, &specs, &collector, RETRY_PAUSE, &ends).await?;
    let front = Front::new(&workspace);
    let send = direct_messages_as_client(&front, &senders, &receivers, common.bytes as usize);

    let (label, load) = match rate > 0.0 {
        true => (format!("{agents} at {rate}/s"), Load::paced(rate, common.window())),
        false => (format!("saturate {agents}"), Load::closed(common.in_flight.into(), common.window())),
    };
    let load = Load { backlog: load.backlog.min(500 * agents as u64), ..load };
    let roots = target.roots();
    let first = measure("", &roots, &collector, &Load::counted(64, agents), send.clone()).await;
    let warm = Load { duration: common.warming(), ..load.clone() };
    let warmed = measure("", &roots, &collector, &warm, send.clone()).await;
    let mut steady = measure(&format!("steady {label}"), &roots, &collector, &load, send.clone()).await;
    steady.problems.extend(first.problems.into_iter().chain(warmed.problems));
    let steady = report.add(steady);

    let load = Load { duration: LONGEST, ..load };
    let window = Window::open(&roots, &collector);
    let replacing = async {
        let took = replace_all(&target, &front).await;
        load.stop.store(true, Ordering::Relaxed);
        took
    };
    let (sent, took) = tokio::join!(drive(&load, &collector, send), replacing);
    let missing = collector.drain(sent.accepted).await;
    let repeated = collector.repeated_count();
    let mut row = window.close(format!("rolling {label}"));
    row.add_sent(sent);
    if missing > 0 {
        row.problems.push(format!("{missing} deliveries never came"));
    }
    let replaced = took?;
    add_columns(&mut row, &front, &ends, repeated, replaced);
    let rolling = report.add(row);
    compare(report, steady, rolling);
    Ok(())
}

/// Restarts one process after the other: clients are directed elsewhere, it stops, and it starts again.
async fn replace_all(target: &Target, front: &Front) -> Result<Vec<Duration>> {
    let mut took = Vec::new();
    let gateways = target.stack().gateways().iter().enumerate().map(|(index, gateway)| (Some(index), gateway));
    let workers = target.stack().workers().iter().map(|worker| (None, worker));
    for (index, process) in gateways.chain(workers) {
        sleep(BETWEEN).await;
        let since = Instant::now();
        front.leave_out(index);
        process.terminate().await?;
        process.restart().await?;
        front.leave_out(None);
        took.push(since.elapsed());
    }
    sleep(BETWEEN).await;
    Ok(took)
}

fn add_columns(row: &mut Row, front: &Front, ends: &AtomicU64, repeated: u64, replaced: Vec<Duration>) {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (server_errors, no_answers) = (count(&front.server_errors), count(&front.no_answers));
    row.notes.push(format!(
        "{} processes replaced, {:.1?} each at most; {} sockets closed, all came back; {repeated} frames came again; \
         before a retry {server_errors} answers of 5xx and {no_answers} requests without one",
        replaced.len(),
        replaced.iter().max().copied().unwrap_or_default(),
        count(ends)
    ));
    for (name, value) in [("server_errors", server_errors), ("no_answers", no_answers), ("repeated", repeated)] {
        row.figures.insert(name.into(), value as f64);
    }
}

fn compare(report: &mut Report, steady: usize, rolling: usize) {
    let p99 = |index: usize| report.rows[index].latency.map(|latency| latency.p99_ms);
    let (Some(before), Some(during)) = (p99(steady), p99(rolling)) else { return };
    report.ratios.push(Ratio {
        target: "rolling",
        what: format!("p99 {during:.2} ms while everything is replaced / {before:.2} ms undisturbed"),
        value: during / before,
        ship: 2.0,
        goal: 1.5,
        better: Better::Lower,
    });
}
