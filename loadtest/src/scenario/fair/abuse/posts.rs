//! Posts that cost much: their size, their recipients, or what they set off.

use std::slice;
use std::sync::Arc;

use anyhow::{Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};

use super::{Attack, CONCURRENT_SETUP, Request, Scene, repeated};
use crate::collector::Collector;
use crate::endpoint::Endpoints;
use crate::fleet::{Fleet, nodes};

/// Large content of a message, in bytes.
const LARGE: usize = 800 * 1024;
/// Unsettled deliveries that a mailbox holds on every plan.
const MAILBOX_DEPTH: usize = 1000;
/// Posts of a batch at most.
const BATCH: usize = 100;
/// More than a worker matches with one message in the time that it may take.
const PATTERNS: usize = 50;
/// States of the shortest pattern. Patterns of more states are matched against a shorter text than one that matches.
const STATES: usize = 900;

pub(super) async fn large_posts(scene: &Scene) -> Result<Attack> {
    let agents = scene.workspace.agents("m", 50).await?;
    scene.workspace.channel("large", &scene.eve, &agents).await?;
    let specs = nodes(&scene.workspace, &agents, agents.len(), "large").await?;
    let fleet = Fleet::connect(&scene.workspace, &specs, &Arc::new(Collector::default())).await?;
    let mut attack = repeated(8, scene, channel_post(scene, "large", LARGE));
    attack._held.push(fleet);
    Ok(attack)
}

pub(super) async fn subscriptions(scene: &Scene) -> Result<Attack> {
    let endpoints = Endpoints::start(1).await?;
    let created = (0..100).map(|number| {
        let url = format!("{}/{number}", endpoints.base());
        async move {
            let body = json!({ "events": ["message.created"], "url": url });
            scene.post("/v1/subscriptions", &body).await.map(drop)
        }
    });
    stream::iter(created).buffer_unordered(CONCURRENT_SETUP).try_collect::<()>().await?;
    scene.workspace.channel("events", &scene.eve, &[]).await?;
    Ok(repeated(4, scene, channel_post(scene, "events", LARGE)))
}

pub(super) async fn names(scene: &Scene) -> Result<Attack> {
    let agents = scene.workspace.agents("m", 140).await?;
    scene.workspace.channel("names", &scene.eve, &agents).await?;
    let bound = agents.iter().enumerate().map(|(number, agent)| async move {
        let node = format!("silent-{number}");
        let delivery = json!({ "url": format!("http://silent.host-{number}.example/"), "ack_mode": "on_2xx" });
        scene.workspace.push_node(&node, delivery).await?;
        scene.workspace.bind(&node, slice::from_ref(agent)).await
    });
    stream::iter(bound).buffer_unordered(CONCURRENT_SETUP).try_collect::<()>().await?;
    Ok(repeated(1, scene, channel_post(scene, "names", 0)))
}

pub(super) fn one_key(scene: &Scene) -> Attack {
    let request = Request::Keyed {
        path: "/v1/channels/general/messages".into(),
        token: scene.eve.token.clone(),
        key: "storm".into(),
        body: json!({ "text": "once" }).to_string(),
    };
    repeated(512, scene, request)
}

pub(super) async fn recipients(scene: &Scene) -> Result<Attack> {
    let agents = scene.workspace.agents("m", scene.recipients).await?;
    scene.workspace.channel("crowd", &scene.eve, &agents).await?;
    Ok(repeated(64, scene, channel_post(scene, "crowd", 0)))
}

pub(super) async fn mailboxes(scene: &Scene) -> Result<Attack> {
    let workspace = &scene.workspace;
    let agents = workspace.agents("m", scene.full_mailboxes).await?;
    workspace.channel("full", &scene.eve, &agents).await?;
    let collector = Arc::new(Collector::default());
    let broker = nodes(workspace, &agents, agents.len(), "full").await?;
    drop(Fleet::connect(workspace, &broker, &collector).await?);
    let batch = json!({ "messages": vec![json!({ "channel": "full", "text": "one of many" }); BATCH] });
    for _ in 0..MAILBOX_DEPTH / BATCH {
        let posted = scene.post("/v1/messages/batch", &batch).await?;
        let accepted = |outcome: &Value| outcome["status"] == 201;
        ensure!(posted["outcomes"].as_array().is_some_and(|outcomes| outcomes.iter().all(accepted)), "{posted}");
    }
    // Its socket receives a notice of each delivery that finds no room.
    let author = nodes(workspace, slice::from_ref(&scene.eve), 1, "author").await?;
    let fleet = Fleet::connect(workspace, &author, &collector).await?;
    let mut attack = repeated(32, scene, channel_post(scene, "full", 0));
    attack._held.push(fleet);
    Ok(attack)
}

pub(super) async fn triggers(scene: &Scene) -> Result<Attack> {
    let action = json!({ "name": "run", "handler_agent": scene.eve.name });
    scene.post("/v1/actions", &action).await?;
    let created = (0..PATTERNS).map(|number| async move {
        let pattern = format!("[ab]*a[ab]{{{}}}c", STATES + number);
        // Its invocations are never completed. Without the interval the action would soon be full, and end the scans.
        let body = json!({ "action_name": "run", "pattern": pattern, "min_interval_seconds": 1 });
        scene.post("/v1/triggers", &body).await.map(drop)
    });
    stream::iter(created).buffer_unordered(CONCURRENT_SETUP).try_collect::<()>().await?;
    let request = Request::Post {
        path: "/v1/channels/general/messages".into(),
        token: scene.eve.token.clone(),
        body: json!({ "text": matching_text() }).to_string(),
    };
    Ok(repeated(4, scene, request))
}

/// Text that every pattern matches at its end. Its letters are in no order, so that an automaton meets ever new states.
fn matching_text() -> String {
    let mut state: u64 = 1;
    let mut letters = |count: usize| {
        let letter = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if state >> 63 == 0 { 'a' } else { 'b' }
        };
        (0..count).map(letter).collect::<String>()
    };
    // One of these is the `a` of each pattern.
    let starts = "a".repeat(PATTERNS);
    format!("{}{starts}{}c", letters(STATES), letters(STATES))
}

/// Post of the abusive agent into a channel.
fn channel_post(scene: &Scene, channel: &str, bytes: usize) -> Request {
    let blocks = if bytes > 0 { json!([{ "type": "section", "text": "x".repeat(bytes) }]) } else { json!([]) };
    Request::Post {
        path: format!("/v1/channels/{channel}/messages"),
        token: scene.eve.token.clone(),
        body: json!({ "text": "many words to be searched", "blocks": blocks }).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_the_a_of_every_pattern() {
        let text = matching_text();
        assert!(text.ends_with('c') && text[..text.len() - 1].bytes().all(|letter| matches!(letter, b'a' | b'b')));
        for number in 0..PATTERNS {
            let start = text.len() - 1 - (STATES + number) - 1;
            assert_eq!(text.as_bytes()[start], b'a', "{number}");
        }
    }
}
