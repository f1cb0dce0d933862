//! Ways in which one tenant may disturb the others.

mod accounts;
mod posts;
mod requests;
mod sockets;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use serde_json::Value;
use tokio::task::JoinSet;

use crate::api::{Agent, Workspace};
use crate::cli::Common;
use crate::fleet::Fleet;

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
    /// Posts to full mailboxes of an absent broker.
    Mailboxes,
    /// Child workspaces, and workspaces of an anonymous client, that are created and deleted.
    Workspaces,
    /// Observer tokens that are created and revoked, and observer sockets.
    Observers,
    /// Posts that match triggers with costly patterns.
    Triggers,
    /// Control frames and large heartbeats of many nodes.
    Frames,
}

/// Abusive tenant.
pub(crate) struct Scene {
    workspace: Workspace,
    eve: Agent,
    recipients: usize,
    full_mailboxes: usize,
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
        Ok(Self { workspace, eve, recipients: common.scaled(2000), full_mailboxes: common.scaled(50) })
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
        self.spawn(tasks, scene, |_, workspace, counts| {
            let request = Arc::clone(&request);
            async move {
                loop {
                    let turn = counts.turn.fetch_add(1, Ordering::Relaxed);
                    let is_accepted = request.send(&workspace, turn).await.unwrap_or(false);
                    counts.count(is_accepted).await;
                }
            }
        });
    }

    /// Starts tasks, each given its number.
    fn spawn<F>(&mut self, tasks: usize, scene: &Scene, mut task: impl FnMut(usize, Workspace, Arc<Counts>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        for number in 0..tasks {
            self.tasks.spawn(task(number, scene.workspace.clone(), Arc::clone(&self.counts)));
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
        Self::Mailboxes,
        Self::Workspaces,
        Self::Observers,
        Self::Triggers,
        Self::Frames,
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
            Self::Mailboxes => "mailboxes",
            Self::Workspaces => "workspaces",
            Self::Observers => "observers",
            Self::Triggers => "triggers",
            Self::Frames => "frames",
        }
    }

    /// Prepares the abuse and begins it.
    pub(crate) async fn start(self, scene: &Scene) -> Result<Attack> {
        match self {
            Self::LargePosts => posts::large_posts(scene).await,
            Self::Schemas => requests::schemas(scene).await,
            Self::Sockets => sockets::sockets(scene).await,
            Self::Searches => requests::searches(scene).await,
            Self::UnknownTokens => Ok(repeated(128, scene, Request::Unknown)),
            Self::Transfers => requests::transfers(scene).await,
            Self::Subscriptions => posts::subscriptions(scene).await,
            Self::Names => posts::names(scene).await,
            Self::OneKey => Ok(posts::one_key(scene)),
            Self::Recipients => posts::recipients(scene).await,
            Self::Mailboxes => posts::mailboxes(scene).await,
            Self::Workspaces => Ok(accounts::workspaces(scene)),
            Self::Observers => accounts::observers(scene).await,
            Self::Triggers => posts::triggers(scene).await,
            Self::Frames => sockets::frames(scene).await,
        }
    }
}

fn repeated(tasks: usize, scene: &Scene, request: Request) -> Attack {
    let mut attack = Attack::new();
    attack.repeat(tasks, scene, request);
    attack
}
