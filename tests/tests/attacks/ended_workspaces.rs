//! The end of a workspace closes everything that its tokens have opened.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_acceptance::{raw::Raw, relayctl::relayctl};
use relay_testkit::{
    client::{Api, EventSource, NodeSocket, ObserverSocket, Reply},
    shared, wait,
};
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};

const SOON: Duration = Duration::from_secs(30);

/// Workspace with an open socket of a node and open streams of observers, all at the second gateway.
struct WatchedScene {
    key: Api,
    id: String,
    /// Address to which a file may be uploaded.
    upload: String,
    node: NodeSocket,
    sockets: Vec<ObserverSocket>,
    streams: Vec<EventSource>,
}

impl WatchedScene {
    async fn new(name: &str) -> Result<Self> {
        let gateways = &shared().await.gateways;
        let key = Api::create_workspace(&gateways[0], name).await?;
        let id = text(&key.get("/v1/workspace").await?.success()?["id"])?;
        let ann = key.as_agent(&key.register_agent("ann").await?);
        let file = json!({ "filename": "f", "content_type": "text/plain", "size_bytes": 1 });
        let upload = text(&ann.post("/v1/files/upload", file).await?.success()?["upload_url"])?;
        let node = key.create_broker_node("node_box", "box").await?;
        let there = key.at(&gateways[1]);
        let mut socket = NodeSocket::connect(&there.ws_base(), &node.token).await?;
        socket.register_broker("node_box", "box", "run-1").await?;
        let observer = json!({ "name": "all", "scopes": ["stream:read"] });
        let observer = there.with_token(&text(&key.post("/v1/observer-tokens", observer).await?.success()?["token"])?);
        let (mut sockets, mut streams) = (Vec::new(), Vec::new());
        for watcher in [&there, &observer] {
            sockets.push(ObserverSocket::open(watcher.base(), watcher.token()).await?);
            streams.push(EventSource::open(watcher, None).await?);
        }
        Ok(Self { key, id, upload, node: socket, sockets, streams })
    }

    /// Uploads to the address that was given out before.
    async fn upload(&self) -> Result<Reply> {
        Raw::new("PUT", &self.upload).body("x").send().await
    }

    /// Waits until everything is closed. Observers are closed with 1008.
    async fn closes_with(mut self, node_code: u16) -> Result<()> {
        assert_eq!(self.node.closed(SOON).await?, Some(node_code));
        for socket in &mut self.sockets {
            let (code, reason) = socket.closed(SOON).await?;
            assert_eq!(code, 1008, "{reason}");
        }
        for stream in &mut self.streams {
            while stream.next(SOON).await?.event != "close" {}
        }
        Ok(())
    }
}

fn text(value: &Value) -> Result<String> {
    Ok(value.as_str().with_context(|| format!("{value} is no text"))?.to_owned())
}

#[tokio::test]
async fn a_deleted_workspace_closes_its_sockets_and_streams() -> Result<()> {
    let scene = WatchedScene::new("deleted").await?;
    scene.key.delete("/v1/workspace").await?.success()?;
    scene.key.get("/v1/channels").await?.refused(401, "unauthorized")?;
    scene.upload().await?.refused(404, "file_not_found")?;
    scene.closes_with(1008).await
}

#[tokio::test]
async fn a_suspended_workspace_closes_its_sockets_and_streams() -> Result<()> {
    let mut scene = WatchedScene::new("suspended").await?;
    relayctl(&["workspace", "suspend", scene.id.trim_start_matches("ws_")]).await?.expect_success()?;
    wait::until_ok("the workspace to be refused", SOON, || async {
        scene
            .key
            .at(&shared().await.gateways[1])
            .get("/v1/channels")
            .await?
            .refused(423, "workspace_suspended")
            .map(drop)
    })
    .await?;
    wait::until_ok("file addresses to be refused", SOON, || async {
        scene.upload().await?.refused(423, "workspace_suspended").map(drop)
    })
    .await?;
    assert!(scene.node.register_agent("late").await.is_err(), "a suspended workspace hosts no agent");
    scene.closes_with(1013).await
}

/// No hint announces that a workspace expires.
#[tokio::test]
async fn an_expired_workspace_closes_its_sockets_and_says_so() -> Result<()> {
    let mut scene = WatchedScene::new("expired").await?;
    let key = scene.key.clone();
    let bob = key.as_agent(&key.register_agent("bob").await?);
    let hook = key.post("/v1/webhooks", json!({ "channel": "general" })).await?.success()?;
    let (hook, url) = (key.with_token(&text(&hook["token"])?), text(&hook["url"])?);
    let mut database = PgConnection::connect(&shared().await.database_url).await?;
    sqlx::query("UPDATE workspaces SET expires_at = now() WHERE workspace_id = $1::bigint")
        .bind(scene.id.trim_start_matches(|c: char| !c.is_ascii_digit()).parse::<i64>()?)
        .execute(&mut database)
        .await?;
    for api in [&key, &bob] {
        wait::until_ok("the expiry", SOON, || async {
            let reply = api.get("/v1/channels").await?.refused(401, "workspace_expired")?;
            anyhow::ensure!(reply.body["error"]["message"] != "Invalid agent token", "clients would register again");
            anyhow::Ok(())
        })
        .await?;
    }
    scene.upload().await?.refused(401, "workspace_expired")?;
    hook.post(&url, json!({ "text": "late" })).await?.refused(401, "workspace_expired")?;
    assert!(scene.node.register_agent("late").await.is_err(), "an expired workspace hosts no agent");
    let node = key.with_token("nt_live_00000000000000000000000000000000");
    node.post("/v1/channels/general/messages", json!({ "text": "x" })).await?.refused(401, "node_token_invalid")?;
    // An observer token that was signed before says nothing of the expiry; its end is that of the workspace's key.
    scene.streams.pop();
    scene.sockets.pop();
    scene.closes_with(1008).await
}
