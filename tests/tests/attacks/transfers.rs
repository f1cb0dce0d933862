//! Transfers that hold their slots: downloads whose client does not read, and uploads that hardly send. They take the
//! slots of their own family of workspaces only, and slow ones end.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use relay_acceptance::{raw::Raw, tcp_client::TcpClient};
use relay_testkit::{client::Api, http, shared, stack::Stack, wait};
use serde_json::json;

/// More than the buffers of a connection hold, so that a download goes on until it is read.
const FILE_BYTES: usize = 20 << 20;
/// As many as a gateway allows in all.
const DOWNLOADS: usize = 64;
/// Share of a workspace with its children.
const SHARE: usize = 16;

/// Longest time of something that happens at once, on a loaded machine.
const SOON: Duration = Duration::from_secs(60);
/// Minimum speed of a client, which is judged after so much waiting for it.
const MIN_BYTES_PER_SECOND: usize = 8 * 1024;
const SPEED_WINDOW: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);

fn declaration(size: usize) -> serde_json::Value {
    json!({ "filename": "a", "content_type": "text/plain", "size_bytes": size })
}

/// Uploads a file and returns its download URL.
async fn upload(key: &Api, size: usize) -> Result<String> {
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let declared = ann.post("/v1/files/upload", declaration(size)).await?.success()?;
    let url = declared["upload_url"].as_str().context("a URL")?;
    ensure!(Raw::new("PUT", url).body(vec![b'x'; size]).send().await?.status == 200);
    let id = declared["id"].as_str().context("an id")?;
    let complete = ann.post_empty(&format!("/v1/files/{id}/complete")).await?.success()?;
    Ok(complete["download_url"].as_str().context("a URL")?.to_owned())
}

#[tokio::test]
async fn unread_downloads_leave_slots_to_other_tenants() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0).url();
    let attacker = Api::create_workspace(gateway, "attacker").await?;
    let child = attacker.post("/v1/workspaces", json!({ "name": "child" })).await?.success()?;
    let child = attacker.with_token(child["api_key"].as_str().context("a key")?);
    let large = [upload(&attacker, FILE_BYTES).await?, upload(&child, FILE_BYTES).await?];
    let small = upload(&Api::create_workspace(gateway, "other").await?, 1000).await?;
    let client = http::client().build()?;
    // Each holds its slot as long as the response lives.
    let mut unread = Vec::new();
    for url in large.iter().cycle().take(DOWNLOADS) {
        let response = client.get(url).send().await?;
        if response.status() == 200 {
            unread.push(response);
            continue;
        }
        ensure!(response.status() == 503 && response.headers().contains_key("retry-after"), "{response:?}");
    }
    ensure!(unread.len() == SHARE, "{} downloads of one family", unread.len());
    let others = client.get(&small).send().await?;
    ensure!(others.status() == 200 && others.bytes().await?.len() == 1000, "the other tenant downloads");
    Ok(())
}

/// Begins an upload of a file of this size, which takes a slot.
async fn begin_upload(agent: &Api, size: usize) -> Result<TcpClient> {
    let declared = agent.post("/v1/files/upload", declaration(size)).await?.success()?;
    let url = declared["upload_url"].as_str().context("a URL")?;
    let path = url.strip_prefix(agent.base()).context("a URL of the gateway")?;
    let mut client = TcpClient::connect(url).await?;
    let head = format!("PUT {path} HTTP/1.1\r\nhost: relay\r\ncontent-length: {size}\r\nexpect: 100-continue");
    client.send(format!("{head}\r\n\r\n").as_bytes()).await?;
    // The gateway asks for the body once the upload has its slot.
    let head = client.head().await?;
    ensure!(head.status == 100, "{head:?}");
    Ok(client)
}

/// Takes as long as the gateway waits before it judges the speed of a client.
#[tokio::test]
async fn uploads_that_hardly_send_end_and_leave_their_slots() -> Result<()> {
    let gateway = &shared().await.gateways[0];
    let attacker = Api::create_workspace(gateway, "attacker").await?;
    let small = upload(&attacker, 1000).await?;
    let others = upload(&Api::create_workspace(gateway, "other").await?, 1000).await?;
    let eve = attacker.as_agent(&attacker.register_agent("eve").await?);
    let piece = vec![b'x'; 8 * MIN_BYTES_PER_SECOND];
    let pieces = usize::try_from(SPEED_WINDOW.as_secs())? + 3;
    let mut fair = begin_upload(&eve, pieces * piece.len()).await?;
    let slow = try_join_all((1..SHARE).map(|_| begin_upload(&eve, FILE_BYTES))).await?;

    let client = http::client().build()?;
    let status = async |url: &str| anyhow::Ok(client.get(url).send().await?.status().as_u16());
    ensure!(status(&small).await? == 503, "the family has no slot left");
    ensure!(status(&others).await? == 200, "the other tenant downloads");
    // They never pause, so only their speed can end them.
    let slow = try_join_all(slow.into_iter().map(|client| async {
        let answer = client.dribble(SECOND / 2, SPEED_WINDOW + SOON).await?;
        let answer = String::from_utf8_lossy(&answer);
        ensure!(answer.starts_with("HTTP/1.1 400") && answer.contains("too slow"), "answered {answer}");
        Ok(())
    }));
    let fair = async {
        for _ in 0..pieces {
            fair.send(&piece).await?;
            tokio::time::sleep(SECOND).await;
        }
        let head = fair.head().await?;
        ensure!(head.status == 200, "{head:?}");
        Ok(())
    };
    tokio::try_join!(slow, fair)?;
    wait::until("a free slot", SOON, || async { status(&small).await.is_ok_and(|status| status == 200) }).await;
    Ok(())
}
