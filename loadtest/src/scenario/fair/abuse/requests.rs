//! Requests that cost much: schemas, searches, and downloads that are not read.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::json;

use super::{Attack, CONCURRENT_SETUP, Request, Scene, repeated};

const FILE_BYTES: usize = 20 << 20;

pub(super) async fn schemas(scene: &Scene) -> Result<Attack> {
    let costly = json!({ "properties": { "list": { "items": { "enum": (0..2000).collect::<Vec<_>>() } } } });
    let action = json!({ "name": "costly", "handler_agent": scene.eve.name, "input_schema": costly });
    scene.post("/v1/actions", &action).await?;
    let token = || scene.eve.token.clone();
    let input = json!({ "input": { "list": (0..400).collect::<Vec<_>>() } });
    let invoke = Request::Post { path: "/v1/actions/costly/invoke".into(), token: token(), body: input.to_string() };
    let mut attack = repeated(64, scene, invoke);
    let patterns: serde_json::Map<_, _> =
        (0..64).map(|n| (format!("p{n}"), json!({ "pattern": format!("^[a-z]{{1,{n}}}{n}+$") }))).collect();
    let many = json!({ "name": "many", "handler_agent": scene.eve.name, "input_schema": { "properties": patterns } });
    attack.repeat(8, scene, Request::Post { path: "/v1/actions".into(), token: token(), body: many.to_string() });
    Ok(attack)
}

pub(super) async fn searches(scene: &Scene) -> Result<Attack> {
    let channel = "words";
    scene.workspace.channel(channel, &scene.eve, &[]).await?;
    let text = "many words to be searched ".repeat(1200);
    let path = format!("/v1/channels/{channel}/messages");
    let bodies = (0..500).map(|number| json!({ "text": format!("{number} {text}") }));
    let posts = bodies.map(|body| {
        let path = &path;
        async move { scene.post(path, &body).await.map(drop) }
    });
    stream::iter(posts).buffer_unordered(CONCURRENT_SETUP).try_collect::<()>().await?;
    let (path, token) = ("/v1/search?q=words%20searched".to_owned(), scene.eve.token.clone());
    Ok(repeated(64, scene, Request::Get { path, token }))
}

pub(super) async fn transfers(scene: &Scene) -> Result<Attack> {
    let file = json!({ "filename": "a", "content_type": "text/plain", "size_bytes": FILE_BYTES });
    let declared = scene.post("/v1/files/upload", &file).await?;
    let client = reqwest::Client::new();
    let upload = declared["upload_url"].as_str().context("an upload URL")?;
    client.put(upload).body(vec![b'x'; FILE_BYTES]).send().await?.error_for_status()?;
    let id = declared["id"].as_str().context("an id")?;
    let complete = scene.post(&format!("/v1/files/{id}/complete"), &json!({})).await?;
    let url: Arc<str> = complete["download_url"].as_str().context("a download URL")?.into();
    let mut attack = Attack::new();
    attack.spawn(64, scene, |_, _, counts| {
        let (client, url) = (client.clone(), Arc::clone(&url));
        async move {
            loop {
                let response = client.get(&*url).send().await.and_then(reqwest::Response::error_for_status);
                counts.count(response.is_ok()).await;
                if response.is_ok() {
                    // Not read: the slot is held until the server gives up.
                    tokio::time::sleep(Duration::from_secs(60)).await;
                }
            }
        }
    });
    Ok(attack)
}
