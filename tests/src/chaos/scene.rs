//! Private engine with a workspace, and the conditions that most fault tests wait for.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Result, ensure};
use relay_testkit::{
    client::{Agent, Api, Reply},
    history::Losses,
    proxy::{Direction, Verdict},
    stack::{Stack, StackBuilder},
    wait,
};
use serde_json::json;

use super::{
    database::Database,
    ledger::Ledger,
    node::Node,
    sender::{Outcome, SentMessage},
};

/// Engine that a test may break.
#[derive(Debug)]
pub struct Scene {
    /// Processes of the engine.
    pub stack: Stack,
    /// Database, reached without a proxy.
    pub database: Database,
    /// Client with the workspace key, at the first gateway.
    pub workspace: Api,
    /// Ledger of all nodes.
    pub ledger: Arc<Ledger>,
}

impl Scene {
    /// Starts two gateways and a worker.
    pub async fn start() -> Result<Self> {
        Self::start_with(Stack::builder()).await
    }

    /// Starts a custom stack.
    pub async fn start_with(builder: StackBuilder) -> Result<Self> {
        let stack = builder.start().await?;
        let database = Database::connect(stack.database_url())?;
        let workspace = Api::create_workspace(stack.gateway(0).url(), "chaos").await?;
        Ok(Self { stack, database, workspace, ledger: Arc::default() })
    }

    /// Returns the gateways' URLs, starting with this one.
    pub fn gateways_from(&self, first: usize) -> Vec<&str> {
        let mut urls: Vec<&str> = self.stack.gateways().iter().map(|gateway| gateway.url()).collect();
        let count = urls.len();
        urls.rotate_left(first % count);
        urls
    }

    /// Returns the agent's REST client at a gateway.
    pub fn api_of(&self, agent: &Agent, gateway: usize) -> Api {
        self.workspace.as_agent(agent).at(self.gateways_from(gateway)[0])
    }

    /// Starts a broker node with agents, with this gateway as its home.
    pub async fn broker(&self, name: &str, agents: &[&str], gateway: usize) -> Result<(Node, Vec<Agent>)> {
        let agents: Vec<String> = agents.iter().map(|agent| (*agent).to_owned()).collect();
        Node::broker(&self.workspace, name, &agents, &self.gateways_from(gateway), &self.ledger).await
    }

    /// Starts an agent with a direct node, with this gateway as its home.
    pub async fn direct(&self, name: &str, gateway: usize) -> Result<(Node, Agent)> {
        let agent = self.workspace.register_agent(name).await?;
        Ok((Node::direct(&self.workspace, &agent, &self.gateways_from(gateway), &self.ledger).await?, agent))
    }

    /// Sends a message that must be accepted.
    pub async fn dm(&self, from: &Agent, gateway: usize, to: &str, text: &str) -> Result<Reply> {
        let reply = self.api_of(from, gateway).dm(to, text).await?;
        ensure!(reply.is_success(), "answered {}: {}", reply.status, reply.body);
        Ok(reply)
    }

    /// Sets a limit of the workspace's deliveries that no route can set.
    pub async fn set_limit(&self, statement: &'static str) -> Result<()> {
        ensure!(self.database.execute(statement).await? == 1, "{statement} met no row");
        Ok(())
    }

    /// Makes the workspace watched, so that its batches are committed by a transaction with a statement per step.
    pub async fn commit_in_steps(&self) -> Result<()> {
        self.set_limit("UPDATE event_heads SET watched_until = 'infinity'").await
    }

    /// Cuts all connections at the statement that commits the post with this text; the flag says when. It is the only
    /// one that carries the text, and is sent in one write. Not for a workspace that commits in steps.
    pub fn cut_post_of(&self, text: &str, verdict: Verdict) -> Arc<AtomicBool> {
        let fired = Arc::new(AtomicBool::new(false));
        let (cut, text) = (Arc::clone(&fired), text.as_bytes().to_vec());
        self.stack.postgres_proxy().set_filter(Direction::ToServer, move |_, chunk| {
            if chunk.windows(text.len()).any(|window| window == text) && !cut.swap(true, Ordering::Relaxed) {
                return verdict;
            }
            Verdict::Forward
        });
        fired
    }

    /// Cuts all connections at the first COMMIT on one that has carried this text to Postgres; the flag says when.
    /// Other transactions commit meanwhile and must not count: the text would be rolled back.
    pub fn cut_commit_of(&self, text: &str, verdict: Verdict) -> Arc<AtomicBool> {
        self.on_commit_of(text, move |_| verdict)
    }

    /// Swallows the first COMMIT after this text: the transaction stays open, like that of a frozen process.
    pub fn swallow_commit_of(&self, text: &str) -> Arc<AtomicBool> {
        self.on_commit_of(text, |chunk| {
            chunk.clear();
            Verdict::Forward
        })
    }

    fn on_commit_of(
        &self,
        text: &str,
        mut then: impl FnMut(&mut Vec<u8>) -> Verdict + Send + 'static,
    ) -> Arc<AtomicBool> {
        let fired = Arc::new(AtomicBool::new(false));
        let (mut carriers, cut, text) = (HashSet::new(), Arc::clone(&fired), text.to_owned());
        let contains = |chunk: &[u8], what: &[u8]| chunk.windows(what.len()).any(|window| window == what);
        self.stack.postgres_proxy().set_filter(Direction::ToServer, move |connection, chunk| {
            if contains(chunk, text.as_bytes()) {
                carriers.insert(connection);
            }
            if carriers.contains(&connection) && contains(chunk, b"COMMIT") && !cut.swap(true, Ordering::Relaxed) {
                return then(chunk);
            }
            Verdict::Forward
        });
        fired
    }

    /// Waits until the agent has received everything up to this seq.
    pub async fn wait_received(&self, agent: &str, seq: u64, within: Duration) {
        let what = format!("{agent} to have seq {seq}");
        if wait::until_ok(&what, within, || async {
            let has = self.ledger.position(agent);
            if has >= seq { Ok(()) } else { Err(format!("it has {has}")) }
        })
        .await
        .is_err()
        {
            let stand = self.database.mailbox_position(agent).await;
            panic!(
                "{agent} has {} of {seq} after {within:?}; mailbox: {stand:?}; nodes down: {:?}; violations: {:?}\n{}",
                self.ledger.position(agent),
                self.ledger.nodes_down(),
                self.ledger.violations(),
                self.stack.logs(20)
            );
        }
    }

    /// Waits until the agent's mailbox is acknowledged up to this seq.
    pub async fn wait_acked(&self, agent: &str, seq: u64, within: Duration) {
        let what = format!("the ack floor of {agent} to be {seq}");
        let done = wait::until_ok(&what, within, || async {
            let stand = self.database.mailbox_position(agent).await?;
            ensure!(stand.ack_floor == seq, "{stand:?}");
            Ok(())
        });
        if let Err(error) = done.await {
            panic!("{error:#}\n{}", self.stack.logs(20));
        }
    }

    /// Reads the floors of these nodes over REST; nothing below them may be repeated.
    pub async fn read_floors(&self, api: &Api, nodes: impl Iterator<Item = &str>) -> Result<()> {
        for node in nodes {
            let listed = api.get(&format!("/v1/nodes/{node}/agents")).await?.success()?;
            for row in listed.as_array().into_iter().flatten() {
                let floor = row["delivery_ack_seq"].as_u64().unwrap_or_default();
                self.ledger.record_floor(row["agent_name"].as_str().unwrap_or_default(), floor);
            }
        }
        Ok(())
    }

    /// Verifies the senders' results against the database and the ledger.
    pub async fn verify(&self, sent: &[SentMessage]) -> Result<()> {
        let messages = self.database.messages().await?;
        let mut wrong = self.ledger.connection_violations();
        for one in sent {
            let rows = messages.get(&one.text).map_or(&[][..], Vec::as_slice);
            match &one.outcome {
                Outcome::Accepted(id) if rows != [id.clone()] => {
                    wrong.push(format!("{} was accepted as {id} and is stored as {rows:?}", one.text));
                }
                Outcome::Refused(status) if !rows.is_empty() => {
                    wrong.push(format!("{} was refused with {status} and is stored as {rows:?}", one.text));
                }
                Outcome::Unknown if rows.len() > 1 => wrong.push(format!("{} is stored as {rows:?}", one.text)),
                Outcome::Accepted(_) | Outcome::Refused(_) | Outcome::Unknown => {}
            }
        }
        for one in sent {
            self.ledger.history().record_post(one.to_post());
        }
        wrong.extend(self.ledger.history().violations(Losses::None).iter().map(ToString::to_string));
        // Without an answer, the database tells whether a message was accepted.
        let unanswered = sent.iter().filter(|one| one.outcome == Outcome::Unknown && messages.contains_key(&one.text));
        for one in unanswered {
            for agent in &one.recipients {
                if !self.ledger.texts(agent).contains(&one.text) {
                    wrong.push(format!("{agent} never got the stored {}", one.text));
                }
            }
        }
        let first: Vec<_> = wrong.iter().take(20).collect();
        ensure!(wrong.is_empty(), "{} violations: {}", wrong.len(), json!(first));
        Ok(())
    }
}
