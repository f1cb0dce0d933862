//! Agents that flood their output, beside calm ones and slow readers. In full with
//! `cargo xtask chaos --test broker -E 'test(/^flood::/)'`: 50 agents with 200 KB/s each, for 10 minutes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use relay_acceptance::chaos;
use relay_testkit::wait;

use crate::event_log::EventLog;
use crate::scene::{SOON, Scene, numbered};

/// Resident memory of the broker that no run may exceed.
const MEMORY_LIMIT_MB: u64 = 400;

struct Size {
    flooding: usize,
    /// Output of one agent.
    bytes_per_second: u32,
    lasts: Duration,
    /// Limits on a quiet machine; none on one that runs other tests too.
    p99: Option<Limits>,
}

/// Limits of the 99th percentile.
struct Limits {
    api: Duration,
    typed: Duration,
}

fn size() -> Size {
    if chaos::is_full() {
        Size {
            flooding: 50,
            bytes_per_second: 200_000,
            lasts: Duration::from_secs(600),
            p99: Some(Limits { api: Duration::from_millis(200), typed: Duration::from_millis(500) }),
        }
    } else {
        // So slow that readers of a debug build keep up on a busy machine.
        Size { flooding: 6, bytes_per_second: 20_000, lasts: Duration::from_secs(8), p99: None }
    }
}

#[tokio::test]
async fn floods_cost_readers_calls_and_calm_agents_nothing() -> Result<()> {
    let size = size();
    let scene = Scene::new("floods").await?;
    let readers = [
        EventLog::subscribe(&scene.broker, Duration::ZERO).await?,
        EventLog::subscribe(&scene.broker, Duration::ZERO).await?,
    ];
    let stuck = EventLog::subscribe(&scene.broker, Duration::from_secs(3600)).await?;
    let mut flooding = Vec::new();
    for number in 0..size.flooding {
        let name = format!("flood-{number}");
        let agent = scene.spawn(&name, "cooked", &["--flood", &size.bytes_per_second.to_string()]).await?;
        scene.sender.dm(&name, "message-1").await?.success()?;
        flooding.push((name, agent));
    }
    let calm = scene.spawn("calm", "cooked", &[]).await?;

    let began = Instant::now();
    let (mut api, mut typed, mut count, mut memory) = (Vec::new(), Vec::new(), 0, 0);
    while began.elapsed() < size.lasts {
        let called = Instant::now();
        let health = scene.broker.call_with("GET", "/health", &[]).await?.body;
        scene.broker.call("GET", "/api/status", None).await?;
        api.push(called.elapsed() / 2);
        memory = memory.max(health["memoryMb"].as_u64().context("memoryMb")?);
        count += 1;
        let posted = Instant::now();
        scene.sender.dm("calm", &format!("message-{count}")).await?.success()?;
        wait::until_ok("the message", SOON, || async {
            ensure!(calm.messages().len() == count as usize, "not yet");
            anyhow::Ok(())
        })
        .await?;
        typed.push(posted.elapsed());
    }
    for (name, agent) in &flooding {
        scene.wait_for(name, agent, &numbered(1, 1), 1).await?;
    }
    assert_eq!(calm.bodies(), numbered(1, count));
    let output = readers[0].output_bytes();
    let (api, typed) = (p99(&mut api), p99(&mut typed));
    println!(
        "{} flooding agents for {:?}: output {} MB, memory {memory} MB, API p99 {api:?}, REST to typed p99 {typed:?}",
        size.flooding,
        size.lasts,
        output >> 20,
    );
    for reader in &readers {
        reader.check_complete().context("a reader that keeps up")?;
    }
    if chaos::is_full() {
        // It has taken nothing for a minute.
        let health = scene.broker.call_with("GET", "/health", &[]).await?.body;
        assert_eq!(health["wsConnections"], 2, "the stuck reader keeps its place: {health}");
    }
    drop(stuck);
    assert!(output > 0 && memory < MEMORY_LIMIT_MB, "{output} bytes, {memory} MB");
    if let Some(limits) = size.p99 {
        assert!(api < limits.api && typed < limits.typed);
    }
    Ok(())
}

fn p99(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get((times.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default()
}
