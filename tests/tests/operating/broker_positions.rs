//! Brokers whose last received seq is above the head of a restored database, after JetStream was lost too.

use std::{ops::Range, time::Duration};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::{database::Database, end_state::judge, ledger::content_of, sender::send_accepted};
use relay_testkit::{
    client::{Agent, Api, NodeSocket},
    history::{History, Losses, Tick, tick},
    stack::{Service, Stack},
    wait,
};
use serde_json::Value;
use sqlx::{Connection as _, PgConnection};

const SOON: Duration = Duration::from_secs(30);
/// Less than the ten that the broker has received, so that skipping the margin is not enough.
const MARGIN: i64 = 6;

struct Scene {
    stack: Stack,
    key: Api,
    ada: Agent,
    bob: Agent,
    node: String,
    token: String,
    workspace: String,
    /// Acks that claim more than was received are not recorded.
    history: History,
    /// From the state that is restored to its restoration.
    lost: Range<Tick>,
}

impl Scene {
    /// Sends ten messages to an agent on a broker; the restored database has only the first, and the log is lost.
    async fn restored() -> Result<Self> {
        let stack = Stack::builder().gateways(1).env("RELAY_RESTORE_MARGIN", MARGIN.to_string()).start().await?;
        let key = Api::create_workspace(stack.gateway(0).url(), "told").await?;
        let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
        let node = format!("node_{}", &uuid::Uuid::new_v4().simple().to_string()[..18]);
        let workspace = key.get("/v1/workspace").await?.success()?["id"].as_str().context("an id")?.to_owned();
        let token = key.create_broker_node(&node, "box").await?.token;
        key.bind(&node, "bob").await?;
        let mut scene = Self { stack, key, ada, bob, node, token, workspace, history: History::default(), lost: 0..0 };
        scene.send("message 1").await?;
        let mut socket = scene.socket(0).await?;
        scene.receive_delivery(&mut socket, 1..=1).await?;
        let copied = tick();
        scene.stopped(|| async { scene.database("CREATE DATABASE older TEMPLATE relay").await }).await?;

        let mut socket = scene.socket(1).await?;
        for nth in 2..=10 {
            scene.send(&format!("message {nth}")).await?;
        }
        scene.receive_delivery(&mut socket, 2..=10).await?;
        drop(socket);
        scene
            .stopped(|| async {
                scene.stack.nats().stop().await?;
                std::fs::remove_dir_all(scene.stack.nats().store_dir())?;
                scene.stack.nats().restart().await?;
                scene.database("DROP DATABASE relay WITH (FORCE)").await?;
                scene.database("CREATE DATABASE relay TEMPLATE older").await
            })
            .await?;
        scene.lost = copied..tick();
        Ok(scene)
    }

    async fn send(&self, words: &str) -> Result<Value> {
        let (reply, post) = send_accepted(&self.key.as_agent(&self.ada), "bob", words).await?;
        self.history.record_post(post);
        reply.success()
    }

    /// Acknowledges deliveries that were received.
    async fn ack(&self, socket: &NodeSocket, seq: u64) -> Result<()> {
        self.history.record_ack("bob", seq);
        socket.ack("bob", seq).await
    }

    fn record(&self, frame: &Value) -> Result<()> {
        self.history.record_frame("bob", frame["seq"].as_u64().context("a seq")?, content_of(frame));
        Ok(())
    }

    /// Judges what was posted, received and acknowledged. Nothing but the messages since the restored state is lost.
    async fn verify(&self) -> Result<()> {
        let losses = Losses::Within(std::slice::from_ref(&self.lost));
        judge(&self.history, &Database::connect(self.stack.database_url())?, &self.key, losses).await?;
        assert_eq!(self.history.lost_ids().len(), 9, "messages 2 to 10");
        Ok(())
    }

    /// Connects as a broker that has received everything up to `had` and answers the position request.
    async fn socket(&self, had: u64) -> Result<NodeSocket> {
        let mut socket = NodeSocket::connect(&self.stack.gateway(0).ws_url(), &self.token).await?;
        socket.register_broker_with(&self.node, "box", "told", &[]).await?;
        socket.inventory(&[(&self.bob.id, "bob")]).await?;
        if had > 0 {
            let asked = socket
                .expect_where("a question", SOON, |frame| frame["payload"]["type"] == "delivery.position")
                .await?;
            assert_eq!((&asked["seq"], &asked["agent"]), (&Value::from(0), &Value::from("bob")));
            socket.ack("bob", had).await?;
        }
        Ok(socket)
    }

    /// Receives the frames with these numbers and returns their texts.
    async fn receive_delivery(
        &self,
        socket: &mut NodeSocket,
        numbers: std::ops::RangeInclusive<i64>,
    ) -> Result<Vec<String>> {
        let mut said = Vec::new();
        for number in numbers.clone() {
            let frame = socket
                .expect_where("its number", SOON, |frame| frame["seq"] == number && frame["agent"] == "bob")
                .await?;
            self.record(&frame)?;
            said.push(frame["payload"]["data"]["text"].as_str().unwrap_or_default().to_owned());
        }
        let last = *numbers.end();
        self.ack(socket, last.unsigned_abs()).await?;
        wait::until_ok("the ack to be stored", SOON, || async {
            let floor = self
                .number("SELECT c.ack_floor FROM mailbox_cursors c JOIN agents a USING (workspace_id, agent_id)")
                .await?;
            ensure!(floor == last, "{floor}");
            anyhow::Ok(())
        })
        .await?;
        Ok(said)
    }

    async fn stopped<F: Future<Output = Result<()>>>(&self, work: impl FnOnce() -> F) -> Result<()> {
        let services = || self.stack.gateways().iter().chain(self.stack.workers());
        services().for_each(Service::kill9);
        work().await?;
        for service in services() {
            service.start_again()?;
        }
        for service in services() {
            service.wait_ready().await?;
        }
        Ok(())
    }

    /// Runs a statement on the server after the sessions of killed processes have ended.
    async fn database(&self, statement: &'static str) -> Result<()> {
        wait::until_ok(statement, SOON, || async {
            let mut server = PgConnection::connect(&self.stack.postgres().url()).await?;
            sqlx::raw_sql(statement).execute(&mut server).await?;
            anyhow::Ok(())
        })
        .await
    }

    /// Returns a number of bob's mailbox.
    async fn number(&self, query: &str) -> Result<i64> {
        let mut database = PgConnection::connect(self.stack.database_url()).await?;
        let query = format!("{query} WHERE a.workspace_id = {} AND a.name = 'bob'", self.workspace);
        Ok(sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(&mut database).await?)
    }

    async fn next_seq(&self) -> Result<i64> {
        self.number("SELECT h.next_seq FROM mailbox_heads h JOIN agents a USING (workspace_id, agent_id)").await
    }

    async fn lost(&self) -> Result<usize> {
        let letters = self.key.get("/v1/dead-letters?reason=lost_in_restore").await?.success()?;
        Ok(letters.as_array().context("letters")?.len())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seqs_that_a_broker_has_received_are_not_assigned_again() -> Result<()> {
    let scene = Scene::restored().await?;
    assert_eq!(scene.next_seq().await?, 2 + MARGIN, "the first, and the margin");
    // Written before the broker reconnects: it gets a number that the broker has already seen.
    let next = scene.send("next").await?;
    assert_eq!(scene.next_seq().await?, 9);

    let mut socket = scene.socket(10).await?;
    let frame = socket.expect_where("the message", SOON, |frame| frame["payload"]["type"] == "dm.received").await?;
    assert_eq!((&frame["seq"], &frame["payload"]["data"]["text"]), (&Value::from(11), &Value::from("next")), "{frame}");
    assert_eq!(frame["payload"]["data"]["id"], next["message"]["id"], "{frame}");
    scene.record(&frame)?;
    scene.ack(&socket, 11).await?;
    assert_eq!(scene.lost().await?, 2, "of 9 and 10 nothing is known");

    scene.send("and on").await?;
    assert_eq!(scene.receive_delivery(&mut socket, 12..=12).await?, ["and on"]);
    scene.verify().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_claims_too_much_raises_nothing() -> Result<()> {
    let scene = Scene::restored().await?;
    for (reported, expected) in [(1_000_000, 8), (u64::MAX, 8), (13, 14), (14, 14)] {
        let socket = scene.socket(reported).await?;
        wait::until_ok("the claim to be judged", SOON, || async {
            let next = scene.next_seq().await?;
            ensure!(next == expected, "{reported}: {next}");
            anyhow::Ok(())
        })
        .await?;
        socket.close().await?;
    }
    assert_eq!(scene.lost().await?, 6, "the margin is used up");
    scene.send("after all").await?;
    let mut socket = scene.socket(13).await?;
    assert_eq!(scene.receive_delivery(&mut socket, 14..=14).await?, ["after all"]);
    scene.verify().await
}
