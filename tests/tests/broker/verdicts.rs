//! Verdicts about messages that were made to mislead, with every kind of fake agent. In full with
//! `cargo xtask chaos --test broker -E 'test(/^verdicts::/)'`: 1000 messages for each kind.
//! With `RELAY_NODE_BROKER=PROGRAM` and `RELAY_MESSAGES=N` it prints the figures of another broker, and fails. Such a
//! broker knows no table of ours, so kinds with an entry are left out.

mod quotes;

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use relay_acceptance::chaos;
use relay_testkit::wait;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::event_log::EventLog;
use crate::harness::Harnesses;
use crate::scene::Scene;

/// Fake agents that are sent the messages.
#[derive(Debug, Clone, Copy)]
struct Kind {
    name: &'static str,
    args: &'static [&'static str],
    /// Program of the harness table as which it runs.
    entry: Option<&'static str>,
    proof: Proof,
    /// Messages are divided among so many agents of the kind. Without the full form only the first one runs.
    agents: usize,
    /// It ends from time to time and is started again. A message may be typed once more into its next program.
    ends: bool,
}

/// Evidence that an agent gives of each message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proof {
    None,
    Echo,
    /// An echo after the verdict, which raises the level.
    LateEcho,
    /// A confirmation by this channel.
    Confirmation(&'static str),
}

impl Kind {
    const fn new(name: &'static str, args: &'static [&'static str], proof: Proof) -> Self {
        Self { name, args, entry: None, proof, agents: 1, ends: false }
    }

    const fn known_as(self, program: &'static str) -> Self {
        Self { entry: Some(program), ..self }
    }

    const fn divided_among(self, agents: usize) -> Self {
        Self { agents, ..self }
    }

    const fn that_ends(self) -> Self {
        Self { ends: true, ..self }
    }

    /// Names of its agents.
    fn names(self) -> impl Iterator<Item = String> {
        let running = if chaos::is_full() { self.agents } else { 1 };
        (0..running).map(move |index| self.name_of(index))
    }

    /// Name of the agent that gets a message, if it runs.
    fn addressee(self, number: usize) -> Option<String> {
        let index = number % self.agents;
        (index == 0 || chaos::is_full()).then(|| self.name_of(index))
    }

    /// Fields of its spawn.
    fn policy(self) -> Value {
        let policy = json!({ "maxRestarts": 1000, "cooldownMs": 10, "maxConsecutiveFailures": 1000 });
        if self.ends { json!({ "restartPolicy": policy }) } else { json!({}) }
    }

    fn name_of(self, index: usize) -> String {
        if index == 0 { self.name.to_owned() } else { format!("{}-{index}", self.name) }
    }
}

const KINDS: [Kind; 18] = [
    Kind::new("cooked", &["cooked"], Proof::Echo),
    Kind::new("raw", &["raw"], Proof::Echo),
    Kind::new("screen", &["screen"], Proof::Echo),
    Kind::new("split", &["raw", "--split"], Proof::Echo),
    Kind::new("folding", &["screen", "--fold"], Proof::None),
    Kind::new("mute", &["mute"], Proof::None),
    Kind::new("slow-start", &["raw", "--start-ms", "3000"], Proof::Echo),
    Kind::new("late", &["raw", "--echo-ms", "6000"], Proof::LateEcho),
    // The next message waits 2 s for the verdict on the last one.
    Kind::new("late-known", &["raw", "--echo-ms", "6000"], Proof::Echo).known_as("strict").divided_among(20),
    Kind::new("file", &["mute", "--confirm", "file"], Proof::Confirmation("file")).known_as("claude"),
    Kind::new("mcp", &["mute", "--confirm", "mcp"], Proof::Confirmation("mcp")).known_as("claude"),
    Kind::new("flooding", &["raw", "--flood", "20000"], Proof::Echo),
    // So much output that each message waits 10 s for a pause that does not come.
    Kind::new("held", &["raw", "--flood", "200000"], Proof::Echo).divided_among(20),
    Kind::new("querying", &["raw", "--query"], Proof::Echo),
    Kind::new("parent", &["raw", "--ignore-signals", "--child", "--grandchild"], Proof::Echo),
    Kind::new("ending", &["raw", "--exit-after", "10", "--exit-code", "3"], Proof::Echo).that_ends(),
    Kind::new("quoting", &["raw", "--quote"], Proof::Echo),
    Kind::new("quoting-mute", &["mute", "--quote"], Proof::None),
];

/// Texts that quote, prefix and split what a careless search would look for, also of earlier messages with these ids.
fn misleading(number: usize, earlier: &[&str]) -> String {
    let texts = [
        "Relay message from bob [1]: hello",
        "a line\nand another\n> quoted",
        "got 1 got 2 got 3",
        "[Pasted text #1] delivered, verified, echo",
        "ünïcödé 漢字 🎉 end",
        "a",
        "wide words and narrow words until the line wraps at the right edge of the terminal, and then some more of it",
    ];
    let round = number % (texts.len() + quotes::VARIANTS);
    match texts.get(round) {
        Some(text) => format!("{text} {number}"),
        None => quotes::quoting(round - texts.len(), earlier, number),
    }
}

/// Messages for each kind; `RELAY_MESSAGES` says how many for a comparison of brokers.
fn count() -> usize {
    let asked = std::env::var("RELAY_MESSAGES").ok().and_then(|count| count.parse().ok());
    asked.unwrap_or(if chaos::is_full() { 1000 } else { 14 })
}

/// Verdicts on one kind of agent.
struct Verdicts {
    kind: Kind,
    sent: usize,
    /// Messages that the next one quotes. A later echo does not raise their level.
    quoted: usize,
    events: Vec<Value>,
    /// Rises of the level after the verdict.
    upgrades: Vec<Value>,
    /// Headers that the agent has received. A line feed in a message ends a line of a program that reads lines, so only
    /// headers are counted.
    headers: usize,
}

impl Verdicts {
    fn collect(kind: Kind, sent: usize, quoted: usize, log: &EventLog, scene: &Scene) -> Self {
        let [events, upgrades] = ["delivery_verified", "delivery_upgraded"]
            .map(|event| kind.names().flat_map(|name| log.events(&name, event)).collect());
        let headers = kind.names().map(|name| quotes::count_headers(&scene.agent_log(&name))).sum();
        Self { kind, sent, quoted, events, upgrades, headers }
    }

    /// Share by level and method, and the times to the verdict: one line.
    fn figures(&self) -> String {
        let mut shares: BTreeMap<String, usize> = BTreeMap::new();
        let mut times = Vec::new();
        for verdict in &self.events {
            let word = |key: &str| verdict[key].as_str().unwrap_or("?");
            *shares.entry(format!("{} {}", word("level"), word("verification"))).or_default() += 1;
            times.push(verdict["latency_ms"].as_u64().unwrap_or(0));
        }
        times.sort_unstable();
        let at = |percent: usize| times.get((times.len() * percent).div_ceil(100).saturating_sub(1)).unwrap_or(&0);
        let Self { kind: Kind { name, .. }, sent, upgrades, headers, .. } = self;
        let (p50, p95, later) = (at(50), at(95), upgrades.len());
        let times = format!("p50 {p50} ms, p95 {p95} ms");
        format!("figures verdicts {name}: sent {sent}, typed {headers}, {shares:?}, {times}, raised later {later}")
    }

    fn is_complete(&self) -> bool {
        let is_raised = self.kind.proof != Proof::LateEcho || self.upgrades.len() >= self.sent - self.quoted;
        self.events.len() >= self.sent && is_raised
    }

    fn check(&self) -> Result<()> {
        let Self { kind: Kind { name, proof, ends, .. }, sent, quoted, events, upgrades, headers } = self;
        ensure!(events.len() == *sent, "{name} has {} verdicts of {sent}", events.len());
        ensure!(headers == sent || (*ends && headers > sent), "{name} was typed {headers} messages of {sent}");
        let (verification, level, is_verified) = match proof {
            Proof::None | Proof::LateEcho => ("timeout_fallback", "L0", false),
            Proof::Echo => ("echo", "L1", true),
            Proof::Confirmation(channel) => (*channel, "L2", true),
        };
        for verdict in events {
            let found = (&verdict["verification"], &verdict["level"], &verdict["verified"]);
            let expected = (&json!(verification), &json!(level), &json!(is_verified));
            ensure!(found == expected, "{name}: {verdict}");
        }
        let raised = if *proof == Proof::LateEcho { sent - quoted } else { 0 };
        ensure!(upgrades.len() == raised, "{name}: {} levels have risen of {raised}", upgrades.len());
        Ok(())
    }
}

/// The agents in a scene, and the folder of the programs with an entry.
async fn spawn_kinds() -> Result<(Scene, Option<TempDir>, Vec<Kind>)> {
    if std::env::var_os("RELAY_NODE_BROKER").is_some() {
        let scene = Scene::new("verdicts").await?;
        let kinds: Vec<Kind> = KINDS.into_iter().filter(|kind| kind.entry.is_none()).collect();
        for kind in &kinds {
            for name in kind.names() {
                scene.spawn_with(&name, kind.args[0], &kind.args[1..], kind.policy()).await?;
            }
        }
        return Ok((scene, None, kinds));
    }
    let harnesses = Harnesses::new("verdicts").await?;
    for kind in &KINDS {
        let (show, more) = (kind.args[0], &kind.args[1..]);
        for name in kind.names() {
            match kind.entry {
                Some(entry) => harnesses.spawn(entry, &name, show, more, kind.policy()).await?,
                None => harnesses.scene.spawn_with(&name, show, more, kind.policy()).await?,
            };
        }
    }
    let (scene, programs) = harnesses.into_parts();
    Ok((scene, Some(programs), KINDS.to_vec()))
}

#[tokio::test]
async fn only_shown_messages_are_verified_and_nothing_is_typed_twice() -> Result<()> {
    let count = count();
    let patience = Duration::from_secs(60 + 3 * count as u64);
    let (scene, _programs, kinds) = spawn_kinds().await?;
    let log = EventLog::subscribe(&scene.broker, Duration::ZERO).await?;
    let mut last: HashMap<String, String> = HashMap::new();
    let (mut sent, mut quoted) = (HashMap::<&str, usize>::new(), HashMap::<&str, usize>::new());
    for number in 0..count {
        let mut earlier_name = kinds[kinds.len() - 1].name.to_owned();
        for kind in &kinds {
            let Some(name) = kind.addressee(number) else { continue };
            // The last messages of this agent and of another one, of which many have no verdict yet.
            let earlier = [&name, &earlier_name].map(|name| last.get(name).map_or("-", String::as_str));
            let text = misleading(number, &earlier);
            *quoted.entry(kind.name).or_default() += usize::from(text.contains(earlier[0]));
            *sent.entry(kind.name).or_default() += 1;
            let id = quotes::send(&scene, &name, &text).await?;
            last.insert(name.clone(), id);
            earlier_name = name;
        }
    }
    let began = Instant::now();
    let mut all = Vec::new();
    for kind in kinds {
        let [sent, quoted] = [&sent, &quoted].map(|counts| counts.get(kind.name).copied().unwrap_or_default());
        let left = patience.saturating_sub(began.elapsed());
        // Also without all of them: the figures of a broker that misses some are to be seen.
        let _ = wait::until_ok("all verdicts", left.max(Duration::from_secs(1)), || async {
            let found = Verdicts::collect(kind, sent, quoted, &log, &scene);
            ensure!(found.is_complete(), "{} has {} verdicts", kind.name, found.events.len());
            anyhow::Ok(())
        })
        .await;
        let verdicts = Verdicts::collect(kind, sent, quoted, &log, &scene);
        println!("{}", verdicts.figures());
        all.push(verdicts);
    }
    all.iter().try_for_each(Verdicts::check)
}
