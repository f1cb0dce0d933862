//! Messages and output that quote the headers of other messages.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_acceptance::chaos;
use relay_testkit::wait;
use serde_json::json;

use crate::event_log::EventLog;
use crate::harness::Harnesses;
use crate::scene::{SOON, Scene};

const HEADER: &str = "Relay message from sender [";

/// Texts of [`quoting`].
pub(super) const VARIANTS: usize = 7;

/// A text with the id or the header of an earlier message, whole or cut off. It begins with no word of its own, so that
/// the quotation is the beginning of the message's line.
pub(super) fn quoting(variant: usize, earlier: &[&str], number: usize) -> String {
    let (own, other) = (earlier[0], earlier[earlier.len() - 1]);
    let cut = |id: &str| id[..id.len() - id.len().min(3)].to_owned();
    match variant {
        0 => format!("{HEADER}{own}]: never written by anybody {number}"),
        1 => format!("{HEADER}{other}]: never written by anybody {number}"),
        2 => format!("{HEADER}{}]: never written by anybody {number}", cut(own)),
        3 => format!("[{own}] delivered, [{other}] delivered, sender {number}"),
        4 => format!("{own} {other} sender {} {number}", cut(own)),
        5 => format!("see\n{HEADER}{own}]: quoted {number}"),
        _ => format!("{}0 {own}-2 0{own} x{own} sender {number}", own),
    }
}

/// Counts the messages in what an agent has noted. A header behind another one, or behind the mark of a quotation, is a
/// part of a text.
pub(super) fn count_headers(log: &str) -> usize {
    let all = log.matches(HEADER).count();
    let quoted = ["]: ", "> "].map(|before| log.matches(&format!("{before}{HEADER}")).count());
    all - quoted.iter().sum::<usize>()
}

/// Posts a message and returns its id.
pub(super) async fn send(scene: &Scene, to: &str, text: &str) -> Result<String> {
    let posted = scene.sender.dm(to, text).await?.success()?;
    let id = posted["message"]["id"].as_str().or(posted["id"].as_str());
    id.map(str::to_owned).with_context(|| format!("no id in {posted}"))
}

/// A text that is in no quotation: its words are no part of any other.
fn hidden(number: usize) -> String {
    let words = ["unquoted", "alpha", "beta", "gamma", "delta", "omega"];
    words.map(|word| format!("{word}{number:05}")).join(" ")
}

/// An agent shows one message of two, and that one quotes the header of the hidden one, which has no verdict yet.
#[tokio::test]
async fn a_quoted_header_proves_nothing_about_the_message_that_it_belongs_to() -> Result<()> {
    // An entry of the table waits 15 s for an echo before it gives a message up.
    let (pairs, known_pairs) = chaos::by_run_size((VARIANTS, 2), (200, 2 * VARIANTS));
    let count = |name: &str| if name == "known" { known_pairs } else { pairs };
    let harnesses = Harnesses::new("quotes").await?;
    let scene = &harnesses.scene;
    let show = ["--show-every", "2"];
    scene.spawn("unknown", "raw", &show).await?;
    harnesses.spawn("strict", "known", "raw", &show, json!({})).await?;
    scene.spawn("headers", "mute", &["--quote-earlier"]).await?;
    let log = EventLog::subscribe(&scene.broker, Duration::ZERO).await?;
    let (mut hidden_ids, mut shown_ids) = (Vec::new(), Vec::new());
    for number in 0..pairs {
        for name in ["unknown", "known"].into_iter().filter(|name| number < count(name)) {
            let hidden_id = send(scene, name, &hidden(number)).await?;
            let text = quoting(number % VARIANTS, &[&hidden_id], number);
            shown_ids.push((name, send(scene, name, &text).await?));
            hidden_ids.push((name, hidden_id));
        }
        for number in [2 * number, 2 * number + 1] {
            hidden_ids.push(("headers", send(scene, "headers", &hidden(number)).await?));
        }
    }
    let names = ["unknown", "known", "headers"];
    wait::until_ok("all outcomes", SOON + Duration::from_secs(10) * u32::try_from(pairs)?, || async {
        for name in names {
            let outcomes = ["delivery_verified", "delivery_failed"].map(|kind| log.events(name, kind).len());
            let sent = 2 * count(name);
            ensure!(outcomes.iter().sum::<usize>() == sent, "{name} has {outcomes:?} of {sent}");
        }
        anyhow::Ok(())
    })
    .await
    .with_context(|| scene.broker.log_tail(20))?;
    let has = |name: &str, kind: &str, id: &str, level: Option<&str>| {
        let events = log.events(name, kind);
        let is_it = |level: &str, found: &serde_json::Value| found.as_str() == Some(level);
        events.iter().any(|event| event["event_id"] == id && level.is_none_or(|level| is_it(level, &event["level"])))
    };
    for (name, id) in &hidden_ids {
        ensure!(!has(name, "delivery_verified", id, Some("L1")), "{name}: {id} was not shown, and is verified");
        ensure!(!has(name, "delivery_upgraded", id, None), "{name}: {id} was not shown, and its level has risen");
        let failed = has(name, "delivery_failed", id, None);
        ensure!(failed == (*name == "known"), "{name}: {id} has failed: {failed}");
    }
    for (name, id) in &shown_ids {
        ensure!(has(name, "delivery_verified", id, Some("L1")), "{name}: {id} was shown, and is not verified");
    }
    for name in names {
        let (typed, sent) = (count_headers(&scene.agent_log(name)), 2 * count(name));
        ensure!(typed == sent, "{name} was typed {typed} messages of {sent}");
    }
    println!("figures quotes: {} hidden and {} shown messages, no false verdict", hidden_ids.len(), shown_ids.len());
    Ok(())
}
