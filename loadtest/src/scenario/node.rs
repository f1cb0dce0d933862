//! `node`: our broker beside the published one, in interleaved rounds with the same agents, messages and calls.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use relay_testkit::client::{Api, Reply};
use relay_testkit::node::{BrokerSpec, FakeAgent, NodeBroker};
use relay_testkit::wait;
use serde_json::{Value, json};
use tokio::time::sleep;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;

use crate::cli::Common;
use crate::report::{Better, Ratio, Report, Row};
use crate::target::Target;

/// Spawns and posts in flight.
const IN_FLIGHT: usize = 8;
/// Time after the last spawn or injection before the next measurement.
const SETTLE: Duration = Duration::from_secs(10);
/// Time without another typed message after which the rest counts as lost. A published broker waits 25 s for the
/// readiness of some programs.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time between two counts of typed messages.
const POLL: Duration = Duration::from_millis(25);
/// Channel of all agents.
const CHANNEL: &str = "all";
/// Messages to one agent for each post to all of them, since a post is a message to every agent.
const MESSAGES_PER_FAN_OUT: usize = 10;
/// Bytes per second of the agent whose output is streamed.
const FLOOD: &str = "2000000";
/// Unit of /proc times on every supported Linux architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// Size of the scenario.
pub(crate) struct Size<'a> {
    /// The published broker; without it only ours is measured.
    pub(crate) published: Option<&'a Path>,
    pub(crate) agents: usize,
    pub(crate) messages: usize,
    pub(crate) rounds: usize,
}

/// Figures of one broker by name; each round adds a value.
type Figures = BTreeMap<&'static str, Vec<f64>>;

/// Comparisons: figure, goal of ours ÷ published, and direction.
const RATIOS: [(&str, f64, Better); 7] = [
    ("spawns_per_second", 2.0, Better::Higher),
    ("injections_per_second_one", 5.0, Better::Higher),
    ("injections_per_second_all", 3.0, Better::Higher),
    ("idle_kb_per_agent", 0.1, Better::Lower),
    ("cpu_ms_per_mb", 0.7, Better::Lower),
    ("typed_p50_ms", 0.5, Better::Lower),
    ("typed_p99_ms", 0.5, Better::Lower),
];

/// Measures both brokers in turns and reports medians and their ratios.
pub(crate) async fn run(common: &Common, size: &Size<'_>, report: &mut Report) -> Result<()> {
    let target = Target::start(common, common.gateways.into()).await?;
    let engine = target.urls().first().cloned().context("no gateway")?;
    let mut sides: Vec<(&str, Option<&Path>, Figures)> = vec![("ours", None, Figures::new())];
    if let Some(published) = size.published {
        sides.push(("published", Some(published), Figures::new()));
    }
    for round in 0..size.rounds {
        let count = sides.len();
        for turn in 0..count {
            // The order alternates, so that neither is always the one after the other.
            let (name, program, figures) = &mut sides[(turn + round) % count];
            let folder = tempfile::tempdir()?;
            let measured = measure(&engine, *program, folder.path(), size).await;
            measured.with_context(|| format!("{name}, round {}", round + 1))?.into_iter().for_each(|(key, value)| {
                figures.entry(key).or_default().push(value);
            });
        }
    }
    let medians: Vec<BTreeMap<String, f64>> = sides.iter().map(|(_, _, figures)| medians(figures)).collect();
    for ((name, _, figures), medians) in sides.iter().zip(&medians) {
        let mut row = Row { run: format!("node {name}"), figures: medians.clone(), ..Row::default() };
        row.notes.extend(figures.iter().map(|(key, values)| format!("{key}: {values:.2?}")));
        report.add(row);
    }
    if let [ours, published] = &medians[..] {
        for (figure, goal, better) in RATIOS {
            let (Some(ours), Some(published)) = (ours.get(figure), published.get(figure)) else { continue };
            let what = format!("{figure}, ours ÷ published");
            let value = ours / published;
            report.ratios.push(Ratio { target: "node", what, value, ship: goal, goal, better });
        }
    }
    Ok(())
}

fn medians(figures: &Figures) -> BTreeMap<String, f64> {
    let median = |values: &Vec<f64>| {
        let mut sorted = values.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    figures.iter().map(|(key, values)| ((*key).to_owned(), median(values))).collect()
}

async fn measure(
    engine: &str,
    program: Option<&Path>,
    folder: &Path,
    size: &Size<'_>,
) -> Result<Vec<(&'static str, f64)>> {
    let workspace = Api::create_workspace(engine, "node").await?;
    let sender = workspace.as_agent(&workspace.register_agent("sender").await?);
    let mut spec = BrokerSpec::new(engine, workspace.token(), "node", folder)?;
    if let Some(program) = program {
        spec.program = program.to_owned();
    }
    let broker = NodeBroker::start(&spec).await?;
    let side = Side { broker, sender, program: fs::canonicalize(&spec.program)?, folder: folder.to_owned() };
    // Without one, memory and CPU would be none.
    ensure!(!side.processes().is_empty(), "no process runs {}", side.program.display());
    let mut figures = Vec::new();

    let before = side.memory_kb();
    let began = Instant::now();
    let agents: Vec<FakeAgent> =
        stream::iter(0..size.agents).map(|number| side.spawn(number)).buffered(IN_FLIGHT).try_collect().await?;
    figures.push(("spawns_per_second", size.agents as f64 / began.elapsed().as_secs_f64()));
    sleep(SETTLE).await;
    figures.push(("idle_kb_per_agent", (side.memory_kb() - before) / size.agents as f64));

    let typed = side.typed_latencies(size.messages.min(100)).await?;
    figures.push(("typed_p50_ms", percentile(&typed, 50)));
    figures.push(("typed_p99_ms", percentile(&typed, 99)));
    let to_one = async |number| side.sender.dm("agent-0", &format!("message {number}")).await;
    let (per_second, lost) = side.injections(&agents[..1], size.messages, to_one).await?;
    figures.extend([("injections_per_second_one", per_second), ("injections_lost_one", lost)]);
    side.invite_all(size.agents).await?;
    let to_all = async |number| side.sender.post_message(CHANNEL, &format!("to all {number}")).await;
    let posts = size.messages.div_ceil(MESSAGES_PER_FAN_OUT);
    let (per_second, lost) = side.injections(&agents, posts, to_all).await?;
    figures.extend([("injections_per_second_all", per_second), ("injections_lost_all", lost)]);
    // What the injections still cost, such as the wait for acks, would count as streaming.
    sleep(SETTLE).await;
    figures.push(("cpu_ms_per_mb", side.cpu_per_mb().await?));
    // A published broker may not end in time; it is killed then, and that is no figure.
    let _ = side.broker.terminate().await;
    Ok(figures)
}

struct Side {
    broker: NodeBroker,
    sender: Api,
    program: PathBuf,
    folder: PathBuf,
}

impl Side {
    async fn spawn(&self, number: usize) -> Result<FakeAgent> {
        let name = format!("agent-{number}");
        let agent = FakeAgent::new("cooked", self.folder.join(format!("{name}.log")), &[]);
        let spawned = self.broker.spawn(&agent, &name, json!({ "skipRelayPrompt": true })).await?;
        ensure!(spawned.is_success(), "{} {}", spawned.status, spawned.body);
        Ok(agent)
    }

    /// Posts `posts` messages to all of `agents`. Returns how many were typed in a second, and how many never: a
    /// published broker drops some, and types others twice, which makes it negative.
    async fn injections(
        &self,
        agents: &[FakeAgent],
        posts: usize,
        post: impl AsyncFn(usize) -> Result<Reply>,
    ) -> Result<(f64, f64)> {
        let typed = || agents.iter().map(|agent| agent.messages().len()).sum::<usize>();
        let (before, count) = (typed(), posts * agents.len());
        let began = Instant::now();
        let posting = stream::iter(0..posts).map(async |number| post(number).await?.success());
        let posting = posting.buffer_unordered(IN_FLIGHT).try_for_each(|_| async { Ok(()) });
        let typing = async {
            let (mut seen, mut last) = (0, began);
            while seen < count && last.elapsed() < PATIENCE {
                sleep(POLL).await;
                let now = typed() - before;
                if now > seen {
                    (seen, last) = (now, Instant::now());
                }
            }
            anyhow::Ok((seen, last.duration_since(began)))
        };
        let ((), (seen, took)) = tokio::try_join!(posting, typing)?;
        Ok((seen as f64 / took.as_secs_f64(), count as f64 - seen as f64))
    }

    /// Creates a channel of all agents: one post is a message to each, so that the broker is what limits injections
    /// and not the engine.
    async fn invite_all(&self, agents: usize) -> Result<()> {
        self.sender.create_channel(CHANNEL).await?;
        for number in 0..agents {
            let invitation = json!({ "agent_name": format!("agent-{number}") });
            self.sender.post(&format!("/v1/channels/{CHANNEL}/invite"), invitation).await?.success()?;
        }
        Ok(())
    }

    /// Times from the frame to the typed text, by the broker's events, one message after the other.
    async fn typed_latencies(&self, count: usize) -> Result<Vec<f64>> {
        let mut times = Vec::new();
        for number in 0..count {
            let posted = self.sender.dm("agent-0", &format!("single {number}")).await?.success()?;
            let id = posted["message"]["id"].as_str().context("no message id")?.to_owned();
            let injected = wait::until_ok("the injection", PATIENCE, || async {
                let events = self.broker.call("GET", "/api/events/replay?sinceSeq=0", None).await?.body;
                let events = events["events"].as_array().cloned().unwrap_or_default();
                let of_message: Vec<Value> =
                    events.into_iter().filter(|event| event["event_id"] == id.as_str()).collect();
                let is_typed = of_message.iter().any(|event| event["kind"] == "delivery_injected");
                ensure!(is_typed, "not typed");
                anyhow::Ok(of_message)
            });
            let events = injected.await?;
            let at = |kinds: &[&str]| {
                let is_wanted = |event: &&Value| event["kind"].as_str().is_some_and(|kind| kinds.contains(&kind));
                let mut stamps = events.iter().filter(is_wanted).filter_map(|event| event["timestamp"].as_f64());
                stamps.next().with_context(|| format!("no time of {kinds:?} in {events:?}"))
            };
            let (inbound, injected) = (at(&["relay_inbound", "delivery_queued"])?, at(&["delivery_injected"])?);
            times.push(injected - inbound);
        }
        times.sort_by(f64::total_cmp);
        Ok(times)
    }

    /// CPU time of all broker processes for each MB that a reader gets of a flooding agent.
    async fn cpu_per_mb(&self) -> Result<f64> {
        let agent = FakeAgent::new("cooked", self.folder.join("flood.log"), &["--flood", FLOOD]);
        let mut request = self.broker.socket_url("/ws").into_client_request()?;
        request.headers_mut().insert("x-api-key", self.broker.key().parse()?);
        let (mut socket, _) = connect_async(request).await?;
        let spawned = self.broker.spawn(&agent, "flood", json!({ "skipRelayPrompt": true })).await?;
        ensure!(spawned.is_success(), "{} {}", spawned.status, spawned.body);
        let (before, until) = (self.cpu_seconds(), Instant::now() + SETTLE);
        let mut bytes = 0;
        while Instant::now() < until {
            let Ok(Some(frame)) = tokio::time::timeout(SETTLE, socket.next()).await else { break };
            let event: Value = serde_json::from_str(frame?.to_text()?).unwrap_or(Value::Null);
            bytes += event["chunk"].as_str().map_or(0, str::len);
        }
        let seconds = self.cpu_seconds() - before;
        self.broker.call("DELETE", "/api/spawned/flood", None).await?;
        ensure!(bytes > 0, "no output was streamed");
        Ok(seconds * 1000.0 / (bytes as f64 / 1e6))
    }

    /// Process ids of the broker and of its own helpers, without the agents.
    fn processes(&self) -> Vec<u32> {
        let entries = fs::read_dir("/proc").into_iter().flatten();
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == self.program)).collect()
    }

    /// Memory of all broker processes; pages that they share count once.
    fn memory_kb(&self) -> f64 {
        let of = |pid: u32| {
            let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
            let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
            line.split_ascii_whitespace().next()?.parse::<f64>().ok()
        };
        self.processes().into_iter().filter_map(of).sum::<f64>() * 1.024
    }

    fn cpu_seconds(&self) -> f64 {
        let of = |pid: u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
            Some(fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?)
        };
        self.processes().into_iter().filter_map(of).sum::<f64>() / TICKS_PER_SECOND
    }
}

fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied().unwrap_or(f64::NAN)
}
