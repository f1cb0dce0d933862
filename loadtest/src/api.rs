//! REST calls that prepare a run: workspace, agents, nodes, channels.

use std::sync::Arc;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::http::Pool;

/// Maximum number of concurrent setup calls.
const AT_ONCE: usize = 64;

/// Workspace, reached through all gateways in turn.
#[derive(Clone, Debug)]
pub(crate) struct Workspace {
    pools: Vec<Arc<Pool>>,
    key: Arc<str>,
}

/// Registered agent.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Agent {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) token: String,
}

/// Credentials of a node.
#[derive(Clone, Debug)]
pub(crate) struct NodeAccess {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) token: String,
}

#[derive(Deserialize)]
struct Envelope<T> {
    data: T,
}

impl Workspace {
    /// Creates a workspace.
    pub(crate) async fn create(gateway_urls: &[String]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Created {
            api_key: String,
        }
        let pools: Vec<_> = gateway_urls.iter().map(|url| Arc::new(Pool::new(url))).collect();
        let first = pools.first().context("no gateway")?;
        let created: Created = call(first, "/v1/workspaces", None, &json!({"name": "loadtest"})).await?;
        Ok(Self { key: created.api_key.into(), pools })
    }

    /// Returns a workspace of a server that asks for no key.
    pub(crate) fn without_key(url: &str) -> Self {
        Self { key: "".into(), pools: vec![Arc::new(Pool::new(url))] }
    }

    /// Returns the connection pool for call or socket number `turn`.
    pub(crate) fn pool(&self, turn: usize) -> &Arc<Pool> {
        &self.pools[turn % self.pools.len()]
    }

    /// Returns a pool as [`Self::pool`] does, except that of gateway `excluded` while there are others.
    pub(crate) fn pool_but(&self, turn: usize, excluded: usize) -> &Arc<Pool> {
        let count = self.pools.len();
        let skip = usize::from(count > 1 && turn % count == excluded);
        self.pool(turn % count + skip)
    }

    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// Adds an agent to a channel.
    pub(crate) async fn join(&self, channel: &str, agent: &Agent) -> Result<()> {
        let path = format!("/v1/channels/{channel}/join");
        call::<Value>(self.pool(0), &path, Some(&agent.token), &json!({})).await.map(drop)
    }

    /// Returns the same workspace through gateway `index` only.
    pub(crate) fn through_gateway(&self, index: usize) -> Self {
        Self { pools: vec![Arc::clone(&self.pools[index])], key: Arc::clone(&self.key) }
    }

    /// Registers `count` agents, named by `prefix` and their number.
    pub(crate) async fn agents(&self, prefix: &str, count: usize) -> Result<Vec<Agent>> {
        let calls = (0..count).map(|number| async move {
            let body = json!({"name": format!("{prefix}-{number}"), "type": "agent"});
            call(self.pool(number), "/v1/agents", Some(&self.key), &body).await
        });
        stream::iter(calls).buffered(AT_ONCE).try_collect().await.context("register agents")
    }

    /// Creates the direct node of each of `agents`.
    pub(crate) async fn direct_nodes(&self, agents: &[Agent]) -> Result<Vec<NodeAccess>> {
        #[derive(Deserialize)]
        struct Minted {
            node_id: String,
            node_name: String,
            token: String,
        }
        let calls = agents.iter().enumerate().map(|(number, agent)| async move {
            let path = "/v1/agent/node-token";
            let minted: Minted = call(self.pool(number), path, Some(&agent.token), &json!({})).await?;
            Ok::<_, anyhow::Error>(NodeAccess { id: minted.node_id, name: minted.node_name, token: minted.token })
        });
        stream::iter(calls).buffered(AT_ONCE).try_collect().await.context("mint node tokens")
    }

    /// Creates a broker node.
    pub(crate) async fn broker_node(&self, name: &str) -> Result<NodeAccess> {
        let body = json!({"name": name, "kind": "ws", "role": "broker", "version": "relay-loadtest/1"});
        #[derive(Deserialize)]
        struct Created {
            id: String,
            token: String,
        }
        let created: Created = call(self.pool(0), "/v1/nodes", Some(&self.key), &body).await?;
        Ok(NodeAccess { id: created.id, name: name.to_owned(), token: created.token })
    }

    /// Creates an http_push node.
    pub(crate) async fn push_node(&self, name: &str, delivery: Value) -> Result<()> {
        let body = json!({"name": name, "kind": "http_push", "delivery": delivery});
        call::<Value>(self.pool(0), "/v1/nodes", Some(&self.key), &body).await.map(drop)
    }

    /// Binds `agents` to the broker node `node`.
    pub(crate) async fn bind(&self, node: &str, agents: &[Agent]) -> Result<()> {
        let path = &format!("/v1/nodes/{node}/agents");
        let calls = agents.iter().enumerate().map(|(number, agent)| async move {
            let body = json!({"agent_name": agent.name});
            call::<Value>(self.pool(number), path, Some(&self.key), &body).await
        });
        stream::iter(calls).buffer_unordered(AT_ONCE).try_for_each(|_| async { Ok(()) }).await.context("bind agents")
    }

    /// Creates a channel owned by `owner` and adds `members`.
    pub(crate) async fn channel(&self, name: &str, owner: &Agent, members: &[Agent]) -> Result<()> {
        call::<Value>(self.pool(0), "/v1/channels", Some(&owner.token), &json!({"name": name})).await?;
        let path = &format!("/v1/channels/{name}/join");
        let calls = members.iter().enumerate().map(|(number, agent)| async move {
            call::<Value>(self.pool(number), path, Some(&agent.token), &json!({})).await
        });
        stream::iter(calls).buffer_unordered(AT_ONCE).try_for_each(|_| async { Ok(()) }).await.context("join channel")
    }
}

async fn call<T: DeserializeOwned>(pool: &Pool, path: &str, token: Option<&str>, body: &Value) -> Result<T> {
    let answer = pool.post(path, token, &body.to_string()).await?;
    let answer = answer.success().with_context(|| format!("POST {path}"))?;
    let envelope: Envelope<T> = serde_json::from_slice(&answer.body)
        .with_context(|| format!("POST {path} answered {}", String::from_utf8_lossy(&answer.body)))?;
    Ok(envelope.data)
}
