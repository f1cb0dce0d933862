//! Downloads whose client does not read: they take the slots of their own family of workspaces only.

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::raw::Raw;
use relay_testkit::{client::Api, http, stack::Stack};
use serde_json::json;

/// More than the buffers of a connection hold, so that a download goes on until it is read.
const FILE_BYTES: usize = 20 << 20;
/// As many as a gateway allows in all.
const DOWNLOADS: usize = 64;
/// Share of a workspace with its children.
const SHARE: usize = 16;

/// Uploads a file and returns its download URL.
async fn upload(key: &Api, size: usize) -> Result<String> {
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let file = json!({ "filename": "a", "content_type": "text/plain", "size_bytes": size });
    let declared = ann.post("/v1/files/upload", file).await?.success()?;
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
