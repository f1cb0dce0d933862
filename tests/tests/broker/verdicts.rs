//! Verdicts about messages that were made to mislead, with every kind of fake agent. In full with
//! `cargo xtask chaos --test broker -E 'test(/^verdicts::/)'`: 1000 messages for each kind.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use relay_acceptance::chaos;
use relay_testkit::wait;

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

#[tokio::test]
async fn only_what_shows_is_verified_and_nothing_is_typed_twice() -> Result<()> {
    let count = if chaos::is_full() { 1000 } else { 14 };
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
    for ((name, _, shows), agent) in KINDS.into_iter().zip(&agents) {
        let verdicts = wait::until_ok("all verdicts", patience, || async {
            let verdicts = log.events(name, "delivery_verified");
            ensure!(verdicts.len() == count, "{name} has {} verdicts", verdicts.len());
            anyhow::Ok(verdicts)
        })
        .await?;
        let mut methods: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        let mut times = Vec::new();
        for verdict in &verdicts {
            let word = |key: &str| verdict[key].as_str().unwrap_or("?");
            *methods.entry((word("level"), word("verification"))).or_default() += 1;
            times.push(verdict["latency_ms"].as_u64().unwrap_or(0));
            ensure!(shows || verdict["verified"] == false, "{name} shows no message: {verdict}");
        }
        times.sort_unstable();
        println!("{name}: {methods:?}, p50 {} ms, p95 {} ms", times[count / 2], times[count * 95 / 100]);
        let verified = verdicts.iter().filter(|verdict| verdict["verified"] == true).count();
        ensure!(!shows || verified == count, "{name}: {verified} of {count} are verified");
        // A line feed in a message ends a line of a program that reads lines, so only headers are counted.
        let headers = agent.messages().iter().filter(|(_, text)| text.contains("Relay message from sender [")).count();
        assert_eq!(headers, count, "{name} has copies");
    }
    Ok(())
}
