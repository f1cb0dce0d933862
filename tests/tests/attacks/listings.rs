//! Lists and searches of messages as large as the limits admit: a gateway holds a few of the bodies at a time, sends
//! all of them, and serves other tenants meanwhile.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::{
    StreamExt as _, TryStreamExt as _,
    future::{join_all, try_join_all},
    stream,
};
use relay_acceptance::{
    chaos::by_run_size,
    memory::{peak, reset_peak},
    room::{rows, text},
};
use relay_testkit::{client::Api, stack::Stack};
use serde_json::json;

const MIB: u64 = 1024 * 1024;
const GROWTH: u64 = 64 * MIB;
/// Bytes of a text, which is all that some lists show of a message.
const TEXT_BYTES: usize = 250 * 1024;
/// Bytes of the blocks beside it; the frame of both fits into the limit.
const BLOCK_BYTES: usize = 620 * 1024;
const LISTS: [&str; 6] = [
    "/v1/channels/general/messages?limit=100",
    "/v1/search?q=needle&limit=100",
    "/v1/console/messages?limit=100",
    "/v1/activity?limit=100",
    "/v1/messages/{root}/replies?limit=100",
    "/v1/dm/conversations/{conversation}/messages?limit=100&page=1",
];
/// Requests for each list at the same time.
const AT_A_TIME: usize = 4;
/// Agents, and channels, with large metadata: more than the bound in one list, if all of it were parsed.
const LARGE_ROWS: usize = 16;
/// Requests for such a list at the same time.
const LARGE_LISTS: usize = 2;
/// Rows that are made at the same time.
const MADE_AT_A_TIME: usize = 4;
/// Requests of the other tenant during an attack.
const REQUESTS: usize = 10;
const SOON: Duration = Duration::from_secs(10);

/// Workspace whose channel, thread and conversation hold `messages` large messages each.
struct LargeLists {
    key: Api,
    paths: Vec<String>,
    messages: usize,
}

impl LargeLists {
    async fn fill(gateway: &str, messages: usize) -> Result<Self> {
        let key = Api::create_workspace(gateway, "large").await?.without_retries();
        let ann = key.as_agent(&key.register_agent("ann").await?);
        key.register_agent("bob").await?;
        let root = ann.post("/v1/channels/general/messages", json!({ "text": "root" })).await?.success()?;
        let first = ann.post("/v1/dm", json!({ "to": "bob", "text": "hi" })).await?.success()?;
        let fill = |template: &str| {
            template.replace("{root}", text(&root["id"])).replace("{conversation}", text(&first["conversation_id"]))
        };
        let text = format!("needle {}", "x".repeat(TEXT_BYTES));
        let large = json!({ "text": text, "blocks": [{ "type": "x", "value": "y".repeat(BLOCK_BYTES) }] });
        let thread = fill("/v1/messages/{root}/replies");
        let conversation = fill("/v1/dm/{conversation}/messages");
        let posts = ["/v1/channels/general/messages", &thread, &conversation].map(|path| async {
            for _ in 0..messages {
                ann.post(path, large.clone()).await?.success()?;
            }
            anyhow::Ok(())
        });
        try_join_all(posts).await?;
        Ok(Self { key, paths: LISTS.iter().map(|template| fill(template)).collect(), messages })
    }

    async fn request(&self, path: &str) -> Result<reqwest::Response> {
        let url = format!("{}{path}", self.key.base());
        Ok(reqwest::Client::new().get(url).bearer_auth(self.key.token()).send().await?)
    }

    /// Reads a list to its end without keeping it. Returns its bytes.
    async fn read(&self, path: &str) -> Result<usize> {
        let response = self.request(path).await?;
        ensure!(response.status() == 200, "{path}: {} {}", response.status(), response.text().await?);
        let mut last = 0;
        let bytes = response
            .bytes_stream()
            .try_fold(0, |bytes, chunk| {
                last = chunk.last().copied().unwrap_or(last);
                futures::future::ready(Ok(bytes + chunk.len()))
            })
            .await
            .with_context(|| format!("{path} broke off"))?;
        ensure!(last == b'}', "{path} ends with {last}");
        Ok(bytes)
    }
}

/// Requests of another tenant, each answered soon.
async fn serve_other(key: &Api) -> Result<()> {
    for nth in 0..REQUESTS {
        let served = async {
            let agent = key.as_agent(&key.register_agent(&format!("agent-{nth}")).await?);
            agent.post("/v1/channels/general/messages", json!({ "text": "hello" })).await?.success()?;
            agent.get("/v1/channels/general/messages").await?.success()
        };
        tokio::time::timeout(SOON, served).await.context("the other tenant waits")??;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_of_large_messages_are_whole_and_take_a_bounded_part_of_a_gateway() -> Result<()> {
    let messages = by_run_size(12, 100);
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let large = LargeLists::fill(gateway.url(), messages).await?;
    let other = Api::create_workspace(gateway.url(), "other").await?.without_retries();
    serve_other(&Api::create_workspace(gateway.url(), "warm").await?).await?;

    let before = reset_peak(gateway.pid())?;
    let lists = &large;
    let requests = lists.paths.iter().flat_map(|path| std::iter::repeat_n(path, AT_A_TIME));
    let attack = join_all(requests.map(|path| async move {
        // A workspace has one place for reads that scan, and its others are refused after some seconds, as are those
        // that no connection is free for.
        let is_shed = |text: &str| text.contains("workspace_busy") || text.contains("database_overloaded");
        match lists.read(path).await {
            Err(error) if is_shed(&error.to_string()) => Ok(None),
            read => read.map(|bytes| Some((path, bytes))),
        }
    }));
    let (read, others) = tokio::join!(attack, serve_other(&other));
    let grown = peak(gateway.pid())?.saturating_sub(before);
    println!("{} MiB, grown by {}", before / MIB, grown / MIB);
    others?;
    let read: Vec<_> = read.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    for path in &large.paths {
        let sizes: Vec<usize> = read.iter().filter(|(own, _)| *own == path).map(|(_, bytes)| *bytes).collect();
        ensure!(!sizes.is_empty(), "{path} was never answered");
        ensure!(sizes.iter().all(|bytes| *bytes >= large.messages * TEXT_BYTES), "{path} is incomplete: {sizes:?}");
    }
    ensure!(grown < GROWTH, "the gateway grew by {} MiB", grown / MIB);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_do_not_read_their_lists_hold_only_their_workspaces_share() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let large = LargeLists::fill(gateway.url(), by_run_size(4, 20)).await?;
    let other = Api::create_workspace(gateway.url(), "other").await?.without_retries();
    serve_other(&Api::create_workspace(gateway.url(), "warm").await?).await?;

    let before = reset_peak(gateway.pid())?;
    let path = &large.paths[0];
    let mut unread = stream::iter(0..96).map(|_| large.request(path)).buffer_unordered(96);
    let mut held = Vec::new();
    // The first answers have begun: their clients hold what the workspace may.
    while held.len() < 4 {
        // An idle connection that the gateway closes has no answer to the request that was just sent on it.
        held.extend(unread.next().await.context("no answer")?);
    }
    let attack = async {
        while let Some(response) = unread.next().await {
            held.extend(response);
        }
    };
    let others = serve_other(&other);
    tokio::pin!(attack, others);
    let others = tokio::select! {
        others = &mut others => others,
        () = &mut attack => others.await,
    };
    let grown = peak(gateway.pid())?.saturating_sub(before);
    println!("{} MiB, grown by {}", before / MIB, grown / MIB);
    others?;
    ensure!(grown < GROWTH, "the gateway grew by {} MiB", grown / MIB);
    Ok(())
}

#[tokio::test]
async fn observers_of_large_messages_read_all_of_them() -> Result<()> {
    let messages = 6;
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let large = LargeLists::fill(gateway.url(), messages).await?;
    let before = reset_peak(gateway.pid())?;
    let logs = join_all((0..AT_A_TIME).map(|_| async {
        let (mut since, mut found) = (0, 0);
        loop {
            let page = large.key.get(&format!("/v1/workspace/events?since={since}&limit=500")).await?.success()?;
            let events = page["events"].as_array().context("events")?;
            found += events.iter().filter(|event| event.to_string().len() > TEXT_BYTES).count();
            let next = page["next_since"].as_i64().context("next_since")?;
            if next == since {
                return anyhow::Ok(found);
            }
            since = next;
        }
    }))
    .await;
    for found in logs {
        ensure!(found? == 3 * messages, "an event was skipped");
    }
    let grown = peak(gateway.pid())?.saturating_sub(before);
    ensure!(grown < GROWTH, "the gateway grew by {} MiB", grown / MIB);
    Ok(())
}

/// Metadata of almost 64 KiB, which takes 80 times as much once it is parsed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_with_large_metadata_are_whole_and_take_a_bounded_part_of_a_gateway() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let key = Api::create_workspace(gateway.url(), "metadata").await?;
    let metadata = json!({ "a": vec![json!({ "": 0 }); 7_800] });
    let names: Vec<String> = (0..LARGE_ROWS).map(|nth| format!("large-{nth:02}")).collect();
    for path in ["/v1/agents", "/v1/channels"] {
        let make = |name: &String| {
            let made = key.post(path, json!({ "name": name, "metadata": metadata }));
            async move { made.await?.success() }
        };
        stream::iter(&names).map(make).buffered(MADE_AT_A_TIME).try_collect::<Vec<_>>().await?;
    }
    for path in ["/v1/agents", "/v1/channels"] {
        let before = reset_peak(gateway.pid())?;
        let lists = join_all((0..LARGE_LISTS).map(|_| key.get(path))).await;
        let grown = peak(gateway.pid())?.saturating_sub(before);
        for list in lists {
            let list = list?.success()?;
            let mut rows: Vec<_> = rows(&list).iter().filter(|row| row["name"] != "general").collect();
            rows.sort_by_key(|row| text(&row["name"]));
            ensure!(rows.iter().map(|row| text(&row["name"])).eq(names.iter().map(String::as_str)), "{path}");
            ensure!(rows.iter().all(|row| row["metadata"] == metadata), "whole metadata in {path}");
        }
        println!("grown by {} MiB by {path}", grown / MIB);
        ensure!(grown < GROWTH, "{path} grew the gateway by {} MiB", grown / MIB);
    }
    Ok(())
}
