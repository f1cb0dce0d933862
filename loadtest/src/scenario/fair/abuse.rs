//! Ways in which one tenant may disturb the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::api::{Agent, Workspace};
use crate::cli::Common;
use crate::collector::Collector;
use crate::endpoint::Endpoints;
use crate::fleet::{Fleet, nodes};

/// Large content of a message, in bytes.
const LARGE: usize = 800 * 1024;
const FILE_BYTES: usize = 20 << 20;
/// Sockets that one task holds before it begins anew.
const HELD_SOCKETS: usize = 40;
/// Pause after a refusal: an attacker without any is limited by its own machine, which is also the engine's here.
const PAUSE: Duration = Duration::from_millis(20);
const CONCURRENT_SETUP: usize = 32;

/// Way of abuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Abuse {
    /// Large posts to 50 connected agents.
    LargePosts,
    /// Invocations whose schemas cost as much as they may, and definitions of others.
    Schemas,
    /// Sockets that are opened with one token and never register.
    Sockets,
    /// Searches in many messages.
    Searches,
    /// Requests with tokens that do not exist.
    UnknownTokens,
    /// Downloads that are not read.
    Transfers,
    /// Large posts that 100 subscriptions to one host match.
    Subscriptions,
    /// Calls to hosts whose name server never answers.
    Names,
    /// One idempotency key, 512 times in parallel.
    OneKey,
    /// Posts to many recipients.
    Recipients,
}

/// Abusive tenant.
pub(crate) struct Scene {
    workspace: Workspace,
    eve: Agent,
    recipients: usize,
}

/// Abuse in progress, ended when dropped.
pub(crate) struct Attack {
    tasks: JoinSet<()>,
    counts: Arc<Counts>,
    _held: Vec<Fleet>,
}

/// Answers to the abuse.
#[derive(Default)]
struct Counts {
    turn: AtomicUsize,
    accepted: AtomicU64,
    refused: AtomicU64,
}

impl Scene {
    pub(crate) async fn create(urls: &[String], common: &Common) -> Result<Self> {
        let workspace = Workspace::create(urls).await?;
        let eve = workspace.agents("eve", 1).await?.swap_remove(0);
        Ok(Self { workspace, eve, recipients: common.scaled(2000) })
    }

    /// Deletes the workspace, so that its background work disturbs no later phase.
    pub(crate) async fn end(self) -> Result<()> {
        self.workspace.pool(0).delete("/v1/workspace", self.workspace.key()).await?.success().map(drop)
    }

    /// Posts as the abusive agent and returns the data of the answer.
    async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let answer = self.workspace.pool(0).post(path, Some(&self.eve.token), &body.to_string()).await?;
        let answer: Value = serde_json::from_slice(&answer.success()?.body)?;
        Ok(answer["data"].clone())
    }
}

impl Attack {
    fn new() -> Self {
        Self { tasks: JoinSet::new(), counts: Arc::default(), _held: Vec::new() }
    }

    /// Describes the answers.
    pub(crate) fn outcome(&self) -> String {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        format!("abuse: {} accepted, {} refused", count(&self.counts.accepted), count(&self.counts.refused))
    }

    /// Repeats one request in many tasks.
    fn repeat(&mut self, tasks: usize, scene: &Scene, request: Request) {
        let request = Arc::new(request);
        for _ in 0..tasks {
            let (workspace, counts, request) =
                (scene.workspace.clone(), Arc::clone(&self.counts), Arc::clone(&request));
            self.tasks.spawn(async move {
                loop {
                    let turn = counts.turn.fetch_add(1, Ordering::Relaxed);
                    let is_accepted = request.send(&workspace, turn).await.unwrap_or(false);
                    counts.count(is_accepted).await;
                }
            });
        }
    }
}

impl Counts {
    /// Counts an answer; pauses after a refusal.
    async fn count(&self, is_accepted: bool) {
        if is_accepted {
            self.accepted.fetch_add(1, Ordering::Relaxed);
        } else {
            self.refused.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Request that is repeated.
enum Request {
    Post {
        path: String,
        token: String,
        body: String,
    },
    Keyed {
        path: String,
        token: String,
        key: String,
        body: String,
    },
    Get {
        path: String,
        token: String,
    },
    /// With a token that does not exist, another one each time.
    Unknown,
}

impl Request {
    async fn send(&self, workspace: &Workspace, turn: usize) -> Result<bool> {
        let pool = workspace.pool(turn);
        let answer = match self {
            Self::Post { path, token, body } => pool.post(path, Some(token), body).await,
            Self::Keyed { path, token, key, body } => pool.post_keyed(path, token, key, body).await,
            Self::Get { path, token } => pool.get(path, Some(token)).await,
            Self::Unknown => pool.get("/v1/agents", Some(&format!("at_live_{}", uuid::Uuid::new_v4().simple()))).await,
        };
        Ok((200..300).contains(&answer?.status))
    }
}

impl Abuse {
    pub(crate) const ALL: &'static [Self] = &[
        Self::LargePosts,
        Self::Schemas,
        Self::Sockets,
        Self::Searches,
        Self::UnknownTokens,
        Self::Transfers,
        Self::Subscriptions,
        Self::Names,
        Self::OneKey,
        Self::Recipients,
    ];

    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::LargePosts => "large posts",
            Self::Schemas => "schemas",
            Self::Sockets => "sockets",
            Self::Searches => "searches",
            Self::UnknownTokens => "unknown tokens",
            Self::Transfers => "transfers",
            Self::Subscriptions => "subscriptions",
            Self::Names => "names",
            Self::OneKey => "one key",
            Self::Recipients => "recipients",
        }
    }

    /// Prepares the abuse and begins it.
    pub(crate) async fn start(self, scene: &Scene) -> Result<Attack> {
        match self {
            Self::LargePosts => large_posts(scene).await,
            Self::Schemas => schemas(scene).await,
            Self::Sockets => sockets(scene).await,
            Self::Searches => searches(scene).await,
            Self::UnknownTokens => Ok(repeated(128, scene, Request::Unknown)),
            Self::Transfers => transfers(scene).await,
            Self::Subscriptions => subscriptions(scene).await,
            Self::Names => names(scene).await,
            Self::OneKey => Ok(one_key(scene)),
            Self::Recipients => recipients(scene).await,
        }
    }
}

fn repeated(tasks: usize, scene: &Scene, request: Request) -> Attack {
    let mut attack = Attack::new();
    attack.repeat(tasks, scene, request);
    attack
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

async fn large_posts(scene: &Scene) -> Result<Attack> {
    let agents = scene.workspace.agents("m", 50).await?;
    scene.workspace.channel("large", &scene.eve, &agents).await?;
    let specs = nodes(&scene.workspace, &agents, agents.len(), "large").await?;
    let fleet = Fleet::connect(&scene.workspace, &specs, &Arc::new(Collector::default())).await?;
    let mut attack = repeated(8, scene, channel_post(scene, "large", LARGE));
    attack._held.push(fleet);
    Ok(attack)
}

async fn schemas(scene: &Scene) -> Result<Attack> {
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

async fn sockets(scene: &Scene) -> Result<Attack> {
    let node = scene.workspace.broker_node("sockets").await?;
    let mut attack = Attack::new();
    for task in 0..32 {
        let (workspace, token, counts) = (scene.workspace.clone(), node.token.clone(), Arc::clone(&attack.counts));
        attack.tasks.spawn(async move {
            let mut held = Vec::new();
            for turn in task.. {
                let opened = open_socket(workspace.pool(turn).address(), &token).await;
                counts.count(opened.is_ok()).await;
                held.extend(opened);
                if held.len() >= HELD_SOCKETS {
                    held.clear();
                }
            }
        });
    }
    Ok(attack)
}

async fn open_socket(address: &str, token: &str) -> Result<tokio_tungstenite::WebSocketStream<TcpStream>> {
    let tcp = TcpStream::connect(address).await?;
    let url = format!("ws://{address}/v1/node/ws?token={token}");
    Ok(tokio_tungstenite::client_async(url, tcp).await?.0)
}

async fn searches(scene: &Scene) -> Result<Attack> {
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

async fn transfers(scene: &Scene) -> Result<Attack> {
    let file = json!({ "filename": "a", "content_type": "text/plain", "size_bytes": FILE_BYTES });
    let declared = scene.post("/v1/files/upload", &file).await?;
    let client = reqwest::Client::new();
    let upload = declared["upload_url"].as_str().context("an upload URL")?;
    client.put(upload).body(vec![b'x'; FILE_BYTES]).send().await?.error_for_status()?;
    let id = declared["id"].as_str().context("an id")?;
    let complete = scene.post(&format!("/v1/files/{id}/complete"), &json!({})).await?;
    let url: Arc<str> = complete["download_url"].as_str().context("a download URL")?.into();
    let mut attack = Attack::new();
    for _ in 0..64 {
        let (client, url, counts) = (client.clone(), Arc::clone(&url), Arc::clone(&attack.counts));
        attack.tasks.spawn(async move {
            loop {
                let response = client.get(&*url).send().await.and_then(reqwest::Response::error_for_status);
                counts.count(response.is_ok()).await;
                if response.is_ok() {
                    // Not read: the slot is held until the server gives up.
                    tokio::time::sleep(Duration::from_secs(60)).await;
                }
            }
        });
    }
    Ok(attack)
}

async fn subscriptions(scene: &Scene) -> Result<Attack> {
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

async fn names(scene: &Scene) -> Result<Attack> {
    let agents = scene.workspace.agents("m", 140).await?;
    scene.workspace.channel("names", &scene.eve, &agents).await?;
    let bound = agents.iter().enumerate().map(|(number, agent)| async move {
        let node = format!("silent-{number}");
        let delivery = json!({ "url": format!("http://silent.host-{number}.example/"), "ack_mode": "on_2xx" });
        scene.workspace.push_node(&node, delivery).await?;
        scene.workspace.bind(&node, std::slice::from_ref(agent)).await
    });
    stream::iter(bound).buffer_unordered(CONCURRENT_SETUP).try_collect::<()>().await?;
    Ok(repeated(1, scene, channel_post(scene, "names", 0)))
}

fn one_key(scene: &Scene) -> Attack {
    let request = Request::Keyed {
        path: "/v1/channels/general/messages".into(),
        token: scene.eve.token.clone(),
        key: "storm".into(),
        body: json!({ "text": "once" }).to_string(),
    };
    repeated(512, scene, request)
}

async fn recipients(scene: &Scene) -> Result<Attack> {
    let agents = scene.workspace.agents("m", scene.recipients).await?;
    scene.workspace.channel("crowd", &scene.eve, &agents).await?;
    Ok(repeated(64, scene, channel_post(scene, "crowd", 0)))
}
