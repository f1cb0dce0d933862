//! Agents that flood their output, beside calm ones and slow readers. In full with
//! `cargo xtask chaos --test broker -E 'test(/^flood::/)' --no-capture`: 50 agents with 200 KB/s each for 10 minutes,
//! and 50 that print as fast as they can for one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use futures::{SinkExt as _, StreamExt as _};
use relay_acceptance::chaos;
use relay_testkit::node::FakeAgent;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest as _};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::event_log::EventLog;
use crate::scene::{SOON, Scene, numbered};

/// Resident memory of the broker that no run may exceed.
const MEMORY_LIMIT_MB: u64 = 400;
/// Growth between the early and the late part of a run: a tenth, and what an allocator keeps now and then.
const GROWTH_MB: u64 = 16;
/// Calls of drivers that are timed.
const CALLS: [&str; 4] = ["/health", "/api/status", "/api/spawned", "/api/metrics"];

struct Size {
    flooding: usize,
    /// Output of one agent in bytes per second.
    rate: &'static str,
    lasts: Duration,
    /// Pause between two messages to the same flooding agent. Each waits up to 10 s for a pause in the output.
    message_every: Duration,
    /// Limits on a quiet machine; none on one that runs other tests too.
    limits: Option<Limits>,
}

/// Limits of the 99th percentile, and of the 95th for keys.
struct Limits {
    api: Duration,
    typed: Duration,
    echoed: Duration,
}

fn size() -> Size {
    if chaos::is_full() {
        let limits = Limits {
            api: Duration::from_millis(200),
            typed: Duration::from_millis(500),
            echoed: Duration::from_millis(100),
        };
        Size {
            flooding: 50,
            rate: "200000",
            lasts: Duration::from_secs(600),
            message_every: Duration::from_secs(20),
            limits: Some(limits),
        }
    } else {
        Size {
            flooding: 6,
            // So slow that readers of a debug build keep up on a busy machine.
            rate: "20000",
            lasts: Duration::from_secs(8),
            message_every: Duration::from_secs(3),
            limits: None,
        }
    }
}

/// Agents that flood, by name, and the number of messages that each was sent.
struct Floods {
    agents: Vec<(String, FakeAgent)>,
    sent: u32,
}

impl Floods {
    async fn spawn(scene: &Scene, count: usize, rate: &str) -> Result<Self> {
        let mut agents = Vec::new();
        for number in 0..count {
            let name = format!("flood-{number}");
            let agent = scene.spawn(&name, "cooked", &["--flood", rate]).await?;
            agents.push((name, agent));
        }
        Ok(Self { agents, sent: 0 })
    }

    async fn send_to_each(&mut self, scene: &Scene) -> Result<()> {
        self.sent += 1;
        for (name, _) in &self.agents {
            scene.sender.dm(name, &format!("message-{}", self.sent)).await?.success()?;
        }
        Ok(())
    }

    /// Waits until each agent has each message once and in order.
    async fn have_all(&self, scene: &Scene) -> Result<()> {
        for (name, agent) in &self.agents {
            scene.wait_for(name, agent, &numbered(1, self.sent), self.sent.into()).await?;
        }
        Ok(())
    }
}

/// Agents with nothing but messages, and the instants at which those are typed.
struct CalmAgents {
    agents: Vec<(String, FakeAgent, Receiver<Instant>)>,
    sent: u32,
}

impl CalmAgents {
    const COUNT: usize = 5;

    async fn spawn(scene: &Scene, reader: &EventLog) -> Result<Self> {
        let mut agents = Vec::new();
        for number in 0..Self::COUNT {
            let name = format!("calm-{number}");
            let agent = scene.spawn(&name, "cooked", &[]).await?;
            let injections = reader.arrivals(&name, "delivery_injected");
            agents.push((name, agent, injections));
        }
        Ok(Self { agents, sent: 0 })
    }

    /// Posts a message to each at the same time, and returns the times until they are typed.
    async fn send_to_each(&mut self, scene: &Scene) -> Result<Vec<Duration>> {
        self.sent += 1;
        let body = format!("message-{}", self.sent);
        let sends = self.agents.iter_mut().map(async |(name, _, injections)| {
            let posted = Instant::now();
            scene.sender.dm(name, &body).await?.success()?;
            let typed = timeout(SOON, injections.recv()).await.context("it is not typed")?.context("no reader")?;
            anyhow::Ok(typed - posted)
        });
        try_join_all(sends).await
    }

    /// Waits until each agent has each message once and in order.
    async fn have_all(&self, scene: &Scene) -> Result<()> {
        for (name, agent, _) in &self.agents {
            scene.wait_for(name, agent, &numbered(1, self.sent), self.sent.into()).await?;
        }
        Ok(())
    }
}

/// A person's keyboard at a terminal whose kernel echoes each key.
struct Keyboard {
    keys: WebSocketStream<MaybeTlsStream<TcpStream>>,
    echoes: Receiver<Instant>,
}

impl Keyboard {
    const AGENT: &'static str = "keys";

    async fn open(scene: &Scene, reader: &EventLog) -> Result<Self> {
        // Without lines, so that no key waits for an Enter and the line's length has no bound.
        let args = ["-c", "stty -icanon; exec cat > /dev/null"];
        let body = json!({ "name": Self::AGENT, "cli": "sh", "args": args });
        let spawned = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
        ensure!(spawned.is_success(), "{} {}", spawned.status, spawned.body);
        let path = format!("/api/input/{}/stream", Self::AGENT);
        let mut request = scene.broker.socket_url(&path).into_client_request()?;
        request.headers_mut().insert("x-api-key", scene.broker.key().parse()?);
        let (keys, _) = connect_async(request).await?;
        Ok(Self { keys, echoes: reader.arrivals(Self::AGENT, "worker_stream") })
    }

    /// Presses a key and returns the time until a reader of the broker's events has its echo.
    async fn press(&mut self) -> Result<Duration> {
        while self.echoes.try_recv().is_ok() {}
        let pressed = Instant::now();
        self.keys.send(Message::text("k")).await?;
        let echoed = timeout(SOON, self.echoes.recv()).await.context("no echo")?.context("no reader")?;
        // Acks of keys and pings; read, so that the broker goes on.
        while let Ok(Some(frame)) = timeout(Duration::ZERO, self.keys.next()).await {
            frame?;
        }
        Ok(echoed - pressed)
    }
}

/// Times and memory over a run.
#[derive(Default)]
struct Measured {
    api: Vec<Duration>,
    typed: Vec<Duration>,
    echoed: Vec<Duration>,
    /// Memory in MB with the part of the run that was over by then.
    memory: Vec<(f64, u64)>,
}

impl Measured {
    /// Most memory between two parts of the run.
    fn memory_between(&self, from: f64, to: f64) -> u64 {
        let within = self.memory.iter().filter(|(part, _)| (from..=to).contains(part));
        within.map(|(_, megabytes)| *megabytes).max().unwrap_or_default()
    }
}

async fn timed_call(scene: &Scene, path: &str) -> Result<(Duration, Value)> {
    let called = Instant::now();
    let answer = scene.broker.call("GET", path, None).await?;
    ensure!(answer.is_success(), "{path}: {} {}", answer.status, answer.body);
    Ok((called.elapsed(), answer.body))
}

async fn memory_mb(scene: &Scene) -> Result<u64> {
    timed_call(scene, "/health").await?.1["memoryMb"].as_u64().context("memoryMb")
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
    let mut floods = Floods::spawn(&scene, size.flooding, size.rate).await?;
    let mut calm = CalmAgents::spawn(&scene, &readers[1]).await?;
    let mut keyboard = Keyboard::open(&scene, &readers[0]).await?;

    let mut measured = Measured::default();
    let began = Instant::now();
    while began.elapsed() < size.lasts {
        if began.elapsed() >= size.message_every * floods.sent {
            floods.send_to_each(&scene).await?;
        }
        for path in CALLS {
            measured.api.push(timed_call(&scene, path).await?.0);
        }
        let part = began.elapsed().as_secs_f64() / size.lasts.as_secs_f64();
        measured.memory.push((part, memory_mb(&scene).await?));
        measured.echoed.push(keyboard.press().await?);
        measured.typed.extend(calm.send_to_each(&scene).await?);
    }
    floods.have_all(&scene).await?;
    calm.have_all(&scene).await?;

    let output = readers[0].output_bytes();
    let (early, late) = (measured.memory_between(0.2, 0.4), measured.memory_between(0.8, 1.0));
    let most = measured.memory_between(0.0, 2.0);
    let (api, typed) = (percentile(&mut measured.api, 99), percentile(&mut measured.typed, 99));
    let echoed = percentile(&mut measured.echoed, 95);
    println!(
        "figures flood: {} agents at {} B/s for {:?}, output {} MB, memory early {early} MB, late {late} MB, most {most} \
         MB, {} calls p99 {api:?}, {} keys echoed p95 {echoed:?}, {} messages REST to typed p99 {typed:?}, {} messages \
         to each flooding agent",
        size.flooding,
        size.rate,
        size.lasts,
        output >> 20,
        measured.api.len(),
        measured.echoed.len(),
        measured.typed.len(),
        floods.sent,
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
    assert!(output > 0 && most < MEMORY_LIMIT_MB, "{output} bytes, {most} MB");
    assert!(late <= early + early / 10 + GROWTH_MB, "{early} MB have grown to {late} MB");
    if let Some(limits) = size.limits {
        assert!(api < limits.api && typed < limits.typed && echoed < limits.echoed);
    }
    Ok(())
}

#[tokio::test]
async fn unthrottled_floods_stay_within_the_bounds() -> Result<()> {
    let (flooding, lasts) = chaos::by_run_size((3, Duration::from_secs(4)), (50, Duration::from_secs(60)));
    let scene = Scene::new("unthrottled").await?;
    let reader = EventLog::subscribe(&scene.broker, Duration::ZERO).await?;
    let stuck = EventLog::subscribe(&scene.broker, Duration::from_secs(3600)).await?;
    let mut floods = Floods::spawn(&scene, flooding, "max").await?;
    floods.send_to_each(&scene).await?;
    let mut memory = Vec::new();
    let mut answers = Vec::new();
    let began = Instant::now();
    while began.elapsed() < lasts {
        for path in CALLS {
            answers.push(timed_call(&scene, path).await?.0);
        }
        memory.push(memory_mb(&scene).await?);
    }
    floods.have_all(&scene).await?;
    memory.push(memory_mb(&scene).await?);
    let (most, output) = (memory.iter().max().copied().unwrap_or_default(), reader.output_bytes());
    println!(
        "figures flood unthrottled: {flooding} agents for {lasts:?}, output {} MB to one reader, memory most {most} MB, \
         {} calls p99 {:?}",
        output >> 20,
        answers.len(),
        percentile(&mut answers, 99),
    );
    assert!(output > 0 && most < MEMORY_LIMIT_MB, "{output} bytes, {most} MB");
    // A reader may miss output, with a notice of it, and no durable event.
    let is_output = |problem: &String| problem.contains("worker_stream_dropped");
    let problems = reader.problems();
    assert!(problems.iter().all(is_output), "{problems:?}");
    drop(stuck);
    for (name, _) in &floods.agents {
        let released = scene.broker.call("DELETE", &format!("/api/spawned/{name}"), None).await?;
        assert_eq!(released.status, 200, "{}", released.body);
    }
    Ok(())
}

fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    times.get((times.len() * percent).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default()
}
