//! Private engine with a workspace, and the conditions that most fault tests wait for.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
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
    end_state::judge,
    ledger::Ledger,
    node::Node,
    report::print_row,
    sender::{Outcome, SentMessage, Target, repeat_keyed, send_accepted, send_once},
};

/// Limit for a loaded machine.
const SERVED_WITHIN: Duration = Duration::from_secs(90);
/// Most requests that are repeated with their idempotency keys.
const REPEATED_KEYS: usize = 20;

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

    /// Registers an agent on an http_push node with this URL, which acks with 2xx.
    pub async fn pushed(&self, name: &str, url: &str) -> Result<Agent> {
        let agent = self.workspace.register_agent(name).await?;
        let delivery = json!({ "url": url, "ack_mode": "on_2xx" });
        let node = json!({ "name": "hook", "kind": "http_push", "delivery": delivery });
        self.workspace.post("/v1/nodes", node).await?.success()?;
        self.workspace.bind("hook", name).await?;
        Ok(agent)
    }

    /// Sends a message that must be accepted, and records it. Each text is sent once.
    pub async fn dm(&self, from: &Agent, gateway: usize, to: &str, text: &str) -> Result<Reply> {
        let (reply, post) = send_accepted(&self.api_of(from, gateway), to, text).await?;
        self.ledger.history().record_post(post);
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

    /// Cuts all connections at the first statement that carries this text; the flag says when. A post is committed by
    /// one statement, sent in one write, unless its workspace commits in steps.
    pub fn cut_statement_of(&self, text: &str, verdict: Verdict) -> Arc<AtomicBool> {
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

    /// Waits until every gateway has accepted a post, which is recorded. Each attempt is another message.
    pub async fn wait_service(&self, from: &Agent, to: &str, text: &str) -> Result<()> {
        for nth in 0..self.stack.gateways().len() {
            self.wait_service_at(nth, from, to, text).await?;
        }
        Ok(())
    }

    /// The same of one gateway. Returns the post.
    pub async fn wait_service_at(&self, gateway: usize, from: &Agent, to: &str, text: &str) -> Result<SentMessage> {
        let name = format!("a post to be accepted by {}", self.stack.gateway(gateway).name());
        let (target, mut attempts) = (Target::Dm(to.to_owned()), 0);
        wait::until_ok(&name, SERVED_WITHIN, || {
            attempts += 1;
            let (api, target, text) = (self.api_of(from, gateway), &target, format!("{text} {gateway}-{attempts}"));
            async move {
                let sent = send_once(&api, target, &text).await?;
                self.ledger.history().record_post(sent.to_post());
                ensure!(matches!(sent.outcome, Outcome::Accepted(_)), "{:?}", sent.outcome);
                anyhow::Ok(sent)
            }
        })
        .await
    }

    /// Waits until these agents have received and acknowledged everything up to their heads.
    pub async fn wait_settled(&self, agents: &[Agent], within: Duration) -> Result<()> {
        let settled = wait::until_ok("all mailboxes to be settled", within, || async {
            let positions = self.database.mailbox_positions().await?;
            for agent in agents {
                let position = positions.get(&agent.name).context("a mailbox")?;
                ensure!(position.settled_floor == position.head, "{}: {position:?}", agent.name);
            }
            anyhow::Ok(())
        });
        settled.await.with_context(|| self.stack.logs(15))
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

    /// Repeats accepted requests with their idempotency keys, spread over all of them, and records the answers, which
    /// must name the same messages. Fails without such a request.
    pub async fn repeat_keys<'a>(&self, from: &Agent, sent: impl Iterator<Item = &'a SentMessage>) -> Result<()> {
        let accepted: Vec<_> =
            sent.filter(|one| one.key.is_some() && matches!(one.outcome, Outcome::Accepted(_))).collect();
        ensure!(!accepted.is_empty(), "no key to repeat");
        let step = accepted.len().div_ceil(REPEATED_KEYS);
        for (nth, one) in accepted.into_iter().step_by(step).enumerate() {
            let repeated = repeat_keyed(&self.api_of(from, nth), one).await?;
            self.ledger.history().record_post(repeated.to_post());
        }
        Ok(())
    }

    /// Prints the figures of a test with a fault, once its history is judged. `sent` are the posts of its senders.
    pub fn print_row(&self, fault: &str, service_after: Duration, sent: &[SentMessage]) {
        let retries = sent.iter().map(|one| u64::from(one.attempts.saturating_sub(1))).sum();
        print_row(fault, service_after, self.ledger.history(), retries);
    }

    /// Judges what senders, nodes and the database know, once every delivery has arrived. Nothing may be lost.
    pub async fn verify(&self, sent: &[SentMessage]) -> Result<()> {
        self.judge(sent, Losses::None).await.map(drop)
    }

    /// [`Self::verify`] at a gateway that the scene has not started: its own have stopped.
    pub async fn verify_at(&self, url: &str, sent: &[SentMessage]) -> Result<()> {
        self.judge_at(url, sent, Losses::None).await.map(drop)
    }

    /// Judges connections, and the history of posts, frames and positions. Returns the ids of accepted messages that
    /// are lost.
    pub async fn judge(&self, sent: &[SentMessage], losses: Losses<'_>) -> Result<Vec<String>> {
        let gateway = self.stack.gateways().iter().find(|gateway| gateway.is_running()).context("a gateway")?;
        self.judge_at(gateway.url(), sent, losses).await
    }

    async fn judge_at(&self, url: &str, sent: &[SentMessage], losses: Losses<'_>) -> Result<Vec<String>> {
        let violations = self.ledger.connection_violations();
        let first = &violations[..violations.len().min(20)];
        ensure!(violations.is_empty(), "{} violations: {first:#?}", violations.len());
        let history = self.ledger.history();
        sent.iter().for_each(|one| history.record_post(one.to_post()));
        judge(history, &self.database, &self.workspace.at(url), losses).await?;
        Ok(history.lost_ids())
    }
}
