//! A snapshot of Postgres' disk is put back, and the delivery log is lost as well: neither the identity of the database
//! nor the log shows that the database is older.

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::{
    database::Database,
    end_state::judge,
    ledger::content_of,
    sender::{Target, send_keyed},
};
use relay_testkit::{
    client::{Agent, Api, NodeSocket},
    history::{History, Losses, tick},
    stack::{Service, Stack},
    wait,
};
use sqlx::{Connection as _, PgConnection};

const SOON: Duration = Duration::from_secs(30);
const HEAD: &str = "SELECT h.next_seq FROM mailbox_heads h JOIN agents a USING (workspace_id, agent_id)
                     WHERE a.name = 'bob'";
const CONFIRMATIONS: &str = "SELECT confirmations FROM recovery_state";

async fn number(stack: &Stack, query: &'static str) -> Result<i64> {
    let mut database = PgConnection::connect(stack.database_url()).await?;
    Ok(sqlx::query_scalar(query).fetch_one(&mut database).await?)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    // Files belong to the user that runs Postgres.
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status()?;
    ensure!(status.success(), "cp {} {}: {status}", from.display(), to.display());
    Ok(())
}

fn processes(stack: &Stack) -> impl Iterator<Item = &Service> {
    stack.gateways().iter().chain(stack.workers())
}

/// Workspace in which ada writes to eve, who is connected all the time, and to bob, who is connected at the end only.
struct Scene {
    key: Api,
    ada: Api,
    eve: Agent,
    bob: Agent,
    history: History,
}

impl Scene {
    async fn new(stack: &Stack) -> Result<Self> {
        let key = Api::create_workspace(stack.gateway(0).url(), "snapshot").await?;
        let ada = key.as_agent(&key.register_agent("ada").await?);
        let (eve, bob) = (key.register_agent("eve").await?, key.register_agent("bob").await?);
        Ok(Self { key, ada, eve, bob, history: History::default() })
    }

    /// Sends both a message, through an outage.
    async fn post(&self, text: &str) -> Result<()> {
        for name in ["eve", "bob"] {
            let to = Target::Dm(name.to_owned());
            let sent = send_keyed(std::slice::from_ref(&self.ada), &to, &format!("{text} for {name}")).await?;
            self.history.record_post(sent.to_post());
        }
        Ok(())
    }

    /// Connects an agent, who acknowledges each delivery that it receives.
    async fn connect(&self, agent: &Agent) -> Result<NodeSocket> {
        let mut socket = self.key.as_agent(agent).direct_socket().await?;
        socket.auto_ack(true);
        Ok(socket)
    }

    /// Receives deliveries up to this seq.
    async fn receive(&self, agent: &Agent, socket: &mut NodeSocket, until: u64) -> Result<()> {
        loop {
            let frame = socket.expect("deliver").await?;
            let seq = frame["seq"].as_u64().context("a seq")?;
            self.history.record_frame(&agent.name, seq, content_of(&frame));
            self.history.record_ack(&agent.name, seq);
            if seq == until {
                return Ok(());
            }
        }
    }
}

/// Puts back a snapshot while the engine runs or is stopped. Two messages were sent before it, three later.
async fn put_back_snapshot(is_running: bool) -> Result<()> {
    let stack = Stack::builder().env("RELAY_RESTORE_MARGIN", "1000").start().await?;
    let scene = Scene::new(&stack).await?;
    let mut eve_socket = scene.connect(&scene.eve).await?;
    scene.post("before").await?;
    scene.post("before, too").await?;
    scene.receive(&scene.eve, &mut eve_socket, 2).await?;
    let database = Database::connect(stack.database_url())?;
    wait::until_ok("the acks of eve to be stored", SOON, || async {
        ensure!(database.mailbox_position("eve").await?.ack_floor == 2);
        anyhow::Ok(())
    })
    .await?;
    wait::until_ok("the log to be known", SOON, || async {
        let known =
            number(&stack, "SELECT count(log_marks -> 'deliveries' ->> 'position') FROM recovery_state").await?;
        ensure!(known == 1 && number(&stack, CONFIRMATIONS).await? > 0);
        anyhow::Ok(())
    })
    .await?;
    let (data, snapshot) = (stack.postgres().data_dir(), stack.state_dir().join("snapshot"));
    stack.postgres().stop().await?;
    copy(data, &snapshot)?;
    stack.postgres().restart().await?;
    let confirmed = number(&stack, CONFIRMATIONS).await?;
    let copied = tick();
    for text in ["after", "after, too", "the last"] {
        scene.post(text).await?;
    }
    scene.receive(&scene.eve, &mut eve_socket, 5).await?;
    // Every process has confirmed the later state.
    wait::until_ok("later confirmations", SOON, || async {
        ensure!(number(&stack, CONFIRMATIONS).await? > confirmed + 6);
        anyhow::Ok(())
    })
    .await?;
    ensure!(number(&stack, HEAD).await? == 6);

    if !is_running {
        processes(&stack).for_each(Service::kill9);
    }
    stack.nats().stop().await?;
    stack.postgres().stop().await?;
    std::fs::remove_dir_all(stack.nats().store_dir())?;
    std::fs::remove_dir_all(data)?;
    copy(&snapshot, data)?;
    stack.nats().restart().await?;
    stack.postgres().restart().await?;
    if !is_running {
        for process in processes(&stack) {
            process.start_again()?;
        }
    }
    let lost_since_copy = copied..tick();
    // Also the first post gets a number that was not assigned before.
    scene.post("since").await?;
    let head = number(&stack, HEAD).await?;
    ensure!(head == 1004, "the next number is {head}: 3 at the snapshot, the margin, and one more post");
    for process in processes(&stack) {
        process.wait_ready().await?;
    }
    ensure!(number(&stack, HEAD).await? == head, "one process recovers");
    for agent in [&scene.eve, &scene.bob] {
        scene.receive(agent, &mut scene.connect(agent).await?, 1003).await?;
    }
    judge(&scene.history, &database, &scene.key, Losses::Within(&[lost_since_copy])).await?;
    let lost = scene.history.lost_ids().len();
    ensure!(lost == 6, "{lost} messages are lost, of three to each agent");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_jump_over_those_assigned_after_a_snapshot_under_running_gateways() -> Result<()> {
    put_back_snapshot(true).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_jump_over_those_assigned_after_a_snapshot_put_back_while_stopped() -> Result<()> {
    put_back_snapshot(false).await
}
