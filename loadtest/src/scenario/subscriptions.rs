//! `subscriptions`: live tails of many agents over one and several connections to a bare NATS server, as a gateway has them.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use async_nats::{Client, ConnectOptions};
use futures::{StreamExt as _, stream::select_all};
use relay_testkit::servers::Nats;
use tokio::task::JoinSet;

use crate::cli::Common;
use crate::report::{Report, Row};

/// Messages that a gateway buffers per subscription.
const CAPACITY: usize = 1024;
/// Agents that one task serves, as a broker's connection does.
const AGENTS_PER_TASK: usize = 100;
/// Messages on their way at most, so that no buffer overflows.
const IN_FLIGHT: u64 = 20_000;
const BATCH: u64 = 500;

/// Measures messages per second and memory of `subjects` subscriptions for each number of connections.
pub(super) async fn run(common: &Common, subjects: usize, connections: &[usize], report: &mut Report) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let nats = Nats::start(&dir.path().join("nats")).await?;
    for count in connections {
        report.add(measure(common, &nats.url(), subjects, *count).await?);
    }
    Ok(())
}

async fn measure(common: &Common, url: &str, subjects: usize, connections: usize) -> Result<Row> {
    let before = resident_kib()?;
    let mut clients = Vec::new();
    for _ in 0..connections.max(1) {
        clients.push(ConnectOptions::new().subscription_capacity(CAPACITY).connect(url).await?);
    }
    let received = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for first in (0..subjects).step_by(AGENTS_PER_TASK) {
        let mut tails = Vec::new();
        for subject in first..subjects.min(first + AGENTS_PER_TASK) {
            tails.push(clients[subject % clients.len()].subscribe(name(subject)).await?);
        }
        let received = Arc::clone(&received);
        tasks.spawn(async move {
            let mut tails = select_all(tails);
            while tails.next().await.is_some() {
                received.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    for client in &clients {
        client.flush().await?;
    }
    let memory = resident_kib()?.saturating_sub(before);
    let publisher = async_nats::connect(url).await?;
    let began = Instant::now();
    let sent = publish(&publisher, subjects, common, &received).await?;
    let seconds = began.elapsed().as_secs_f64();
    let delivered = received.load(Ordering::Relaxed);
    tasks.shutdown().await;
    let mut row = Row {
        run: format!("subscriptions {subjects} over {connections}"),
        accepted: sent,
        delivered,
        seconds,
        per_second: Some(delivered as f64 / seconds),
        ..Row::default()
    };
    row.figures.insert("kib_per_subscription".to_owned(), memory as f64 / subjects as f64);
    row.notes
        .push(format!("{:.1} KiB per subscription, publisher in the same process", memory as f64 / subjects as f64));
    if delivered < sent {
        row.problems.push(format!("{} messages were dropped", sent - delivered));
    }
    Ok(row)
}

fn name(subject: usize) -> String {
    format!("live.d.0.1.{subject}")
}

/// Publishes for the window, and waits until everything is received. Returns the number of messages.
async fn publish(client: &Client, subjects: usize, common: &Common, received: &AtomicU64) -> Result<u64> {
    let body = vec![b'x'; common.bytes as usize];
    let until = Instant::now() + common.window();
    let mut sent: u64 = 0;
    let mut subject = 0;
    while Instant::now() < until {
        for _ in 0..BATCH {
            client.publish(name(subject), body.clone().into()).await?;
            subject = (subject + 1) % subjects;
        }
        sent += BATCH;
        client.flush().await?;
        while sent.saturating_sub(received.load(Ordering::Relaxed)) > IN_FLIGHT && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    let patience = Instant::now() + Duration::from_secs(5);
    while received.load(Ordering::Relaxed) < sent && Instant::now() < patience {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(sent)
}

fn resident_kib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
