//! Verdicts about messages that were made to mislead, with every kind of fake agent. In full with
//! `cargo xtask chaos --test broker -E 'test(/^verdicts::/)'`: 1000 messages for each kind.
//! With `RELAY_NODE_BROKER=PROGRAM` and `RELAY_MESSAGES=N` it prints the figures of another broker, and fails.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use relay_acceptance::chaos;
use relay_testkit::wait;
use serde_json::Value;

use crate::event_log::EventLog;
use crate::scene::Scene;

/// Kinds of agents: arguments, and whether messages show.
const KINDS: [(&str, &[&str], bool); 6] = [
    ("cooked", &["cooked"], true),
    ("raw", &["raw"], true),
    ("screen", &["screen"], true),
    ("split", &["raw", "--split"], true),
    ("folding", &["screen", "--fold"], false),
    ("mute", &["mute"], false),
];

/// Texts that quote, prefix and split what a careless search would look for.
fn misleading(number: usize) -> String {
    let texts = [
        "Relay message from bob [1]: hello",
        "a line\nand another\n> quoted",
        "got 1 got 2 got 3",
        "[Pasted text #1] delivered, verified, echo",
        "ünïcödé 漢字 🎉 end",
        "a",
        "wide words and narrow words until the line wraps at the right edge of the terminal, and then some more of it",
    ];
    format!("{} {number}", texts[number % texts.len()])
}

/// Messages for each kind; `RELAY_MESSAGES` says how many for a comparison of brokers.
fn count() -> usize {
    let asked = std::env::var("RELAY_MESSAGES").ok().and_then(|count| count.parse().ok());
    asked.unwrap_or(if chaos::is_full() { 1000 } else { 14 })
}

/// Verdicts on one kind of agent.
struct Verdicts {
    name: &'static str,
    shows: bool,
    events: Vec<Value>,
    /// Headers that the agent has received. A line feed in a message ends a line of a program that reads lines, so only
    /// headers are counted.
    headers: usize,
}

impl Verdicts {
    fn figures(&self) -> String {
        let mut methods: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        let mut times = Vec::new();
        for verdict in &self.events {
            let word = |key: &str| verdict[key].as_str().unwrap_or("?");
            *methods.entry((word("level"), word("verification"))).or_default() += 1;
            times.push(verdict["latency_ms"].as_u64().unwrap_or(0));
        }
        times.sort_unstable();
        let at = |percent: usize| times.get((times.len() * percent / 100).min(times.len().saturating_sub(1)));
        format!("{}: {methods:?}, p50 {:?} ms, p95 {:?} ms, typed {}", self.name, at(50), at(95), self.headers)
    }

    fn check(&self, count: usize) -> Result<()> {
        let Self { name, shows, events, headers } = self;
        ensure!(events.len() == count, "{name} has {} verdicts of {count}", events.len());
        let verified = events.iter().filter(|verdict| verdict["verified"] == true).count();
        let expected = if *shows { count } else { 0 };
        ensure!(verified == expected, "{name}: {verified} of {count} are verified, {expected} show");
        ensure!(*headers == count, "{name} was typed {headers} messages of {count}");
        Ok(())
    }
}

#[tokio::test]
async fn only_what_shows_is_verified_and_nothing_is_typed_twice() -> Result<()> {
    let count = count();
    let patience = Duration::from_secs(60 + 3 * count as u64);
    let scene = Scene::new("verdicts").await?;
    let log = EventLog::subscribe(&scene.broker, Duration::ZERO).await?;
    let mut agents = Vec::new();
    for (name, args, _) in KINDS {
        agents.push(scene.spawn(name, args[0], &args[1..]).await?);
    }
    for number in 0..count {
        for (name, _, _) in KINDS {
            scene.sender.dm(name, &misleading(number)).await?.success()?;
        }
    }
    let began = Instant::now();
    let mut all = Vec::new();
    for ((name, _, shows), agent) in KINDS.into_iter().zip(&agents) {
        let left = patience.saturating_sub(began.elapsed()).max(Duration::from_secs(1));
        // Also without all of them: the figures of a broker that misses some are to be seen.
        let _ = wait::until_ok("all verdicts", left, || async {
            let found = log.events(name, "delivery_verified").len();
            ensure!(found >= count, "{name} has {found} verdicts");
            anyhow::Ok(())
        })
        .await;
        let headers = agent.messages().iter().filter(|(_, text)| text.contains("Relay message from sender [")).count();
        let verdicts = Verdicts { name, shows, events: log.events(name, "delivery_verified"), headers };
        println!("{}", verdicts.figures());
        all.push(verdicts);
    }
    all.iter().try_for_each(|verdicts| verdicts.check(count))
}
