//! Postgres restored to an older state than JetStream, and a lost JetStream: the engine detects and repairs both.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::{
    chaos::{database::Database, end_state::judge, ledger::content_of, sender::send_accepted},
    relayctl::relayctl_with,
};
use relay_testkit::{
    client::{Agent, Api, NodeSocket},
    history::{History, Losses, tick},
    stack::Stack,
    wait,
};
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};

const SOON: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn stop(stack: &Stack) {
    stack.gateways().iter().chain(stack.workers()).for_each(relay_testkit::stack::Service::kill9);
}

async fn start(stack: &Stack) -> Result<()> {
    for service in stack.gateways().iter().chain(stack.workers()) {
        service.start_again()?;
    }
    for service in stack.gateways().iter().chain(stack.workers()) {
        service.wait_ready().await?;
    }
    Ok(())
}

/// Copies an unused database, as a dump would.
async fn copy(stack: &Stack, from: &str, to: &str) -> Result<()> {
    // Sessions of killed processes may take a moment to end.
    wait::until_ok("a copy of the database", SOON, || async {
        let mut server = PgConnection::connect(&stack.postgres().url()).await?;
        let statement = format!("CREATE DATABASE {to} TEMPLATE {from}");
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut server).await?;
        anyhow::Ok(())
    })
    .await
}

/// Replaces the engine's database by the copy while the engine is stopped.
async fn restore(stack: &Stack, from: &str) -> Result<()> {
    let mut server = PgConnection::connect(&stack.postgres().url()).await?;
    sqlx::raw_sql("DROP DATABASE relay WITH (FORCE)").execute(&mut server).await?;
    copy(stack, from, "relay").await
}

/// Waits until the engine has recorded its liveness after the log was created, as in any installation older than
/// seconds.
async fn wait_seen(stack: &Stack) -> Result<()> {
    let jetstream = async_nats::jetstream::new(async_nats::connect(stack.nats_url()).await?);
    let made = jetstream.get_stream("RELAY_DELIVERIES").await?.cached_info().created.unix_timestamp();
    wait::until_ok("a sign of life", SOON, || async {
        let seen = number(stack, "SELECT extract(epoch FROM seen_at)::bigint FROM recovery_state", "").await?;
        ensure!(seen > made + 1, "{seen} {made}");
        anyhow::Ok(())
    })
    .await
}

struct Scene {
    key: Api,
    ada: Agent,
    bob: Agent,
    id: String,
    history: History,
}

impl Scene {
    async fn new(stack: &Stack) -> Result<Self> {
        let key = Api::create_workspace(stack.gateway(0).url(), "restored").await?;
        let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
        let id = text(&key.get("/v1/workspace").await?.success()?["id"]).to_owned();
        Ok(Self { key, ada, bob, id, history: History::default() })
    }

    async fn send(&self, words: &str) -> Result<Value> {
        self.send_to("bob", words).await
    }

    async fn send_to(&self, name: &str, words: &str) -> Result<Value> {
        let (reply, post) = send_accepted(&self.key.as_agent(&self.ada), name, words).await?;
        self.history.record_post(post);
        reply.success()
    }

    /// Connects bob, who acknowledges each delivery that [`Self::next`] returns.
    async fn socket(&self) -> Result<NodeSocket> {
        let mut socket = self.key.as_agent(&self.bob).direct_socket().await?;
        socket.auto_ack(true);
        Ok(socket)
    }

    /// Returns bob's next delivery: its seq, type and text.
    async fn next(&self, socket: &mut NodeSocket) -> Result<(i64, String, String)> {
        let frame = socket.expect("deliver").await?;
        let seq = frame["seq"].as_u64().context("a seq")?;
        self.history.record_frame("bob", seq, content_of(&frame));
        self.history.record_ack("bob", seq);
        Ok((i64::try_from(seq)?, text(&frame["payload"]["type"]).to_owned(), words(&frame).to_owned()))
    }

    /// Judges what was posted, received and acknowledged.
    async fn verify(&self, stack: &Stack, losses: Losses<'_>) -> Result<()> {
        judge(&self.history, &Database::connect(stack.database_url())?, &self.key, losses).await
    }
}

/// Returns the text of a delivery.
fn words(frame: &Value) -> &str {
    text(&frame["payload"]["data"]["text"])
}

async fn number(stack: &Stack, query: &str, workspace: &str) -> Result<i64> {
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let query = query.replace("WORKSPACE", workspace);
    Ok(sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(&mut database).await?)
}

const HEAD: &str = "SELECT h.next_seq FROM mailbox_heads h JOIN agents a USING (workspace_id, agent_id)
                     WHERE h.workspace_id = WORKSPACE AND a.name = 'bob'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deliveries_lost_in_a_restore_are_recovered_or_reported() -> Result<()> {
    let stack = Stack::builder().gateways(2).start().await?;
    let scene = Scene::new(&stack).await?;
    let mut socket = scene.socket().await?;
    scene.send("before").await?;
    assert_eq!(scene.next(&mut socket).await?, (1, "dm.received".to_owned(), "before".to_owned()));
    wait::until_ok("the ack to be stored", SOON, || async {
        let floor =
            number(&stack, "SELECT max(ack_floor) FROM mailbox_cursors WHERE workspace_id = WORKSPACE", &scene.id);
        ensure!(floor.await? == 1);
        anyhow::Ok(())
    })
    .await?;
    wait_seen(&stack).await?;
    stop(&stack);
    let copied = tick();
    copy(&stack, "relay", "older").await?;
    start(&stack).await?;

    // After the copy: messages that are delivered and acknowledged, one of them too large for the log.
    let mut socket = scene.socket().await?;
    scene.send("after").await?;
    let large = "x".repeat(40 * 1024);
    let lost = scene.send(&large).await?;
    scene.send("after that").await?;
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.push(scene.next(&mut socket).await?.0);
    }
    assert_eq!(seen, [2, 3, 4]);
    wait::until_ok("the log to have it all", SOON, || async {
        ensure!(number(&stack, "SELECT count(*) FROM outbox WHERE published_at IS NULL", &scene.id).await? == 0);
        anyhow::Ok(())
    })
    .await?;
    stop(&stack);
    restore(&stack, "older").await?;
    let lost_since_copy = copied..tick();
    assert_eq!(number(&stack, HEAD, &scene.id).await?, 2, "this is the older state");
    start(&stack).await?;

    // Readiness implies recovery: new numbers are above all assigned ones.
    assert_eq!(number(&stack, HEAD, &scene.id).await?, 5);
    let mut socket = scene.socket().await?;
    scene.send("later").await?;
    let mut again: Vec<(i64, String, String)> = Vec::new();
    while again.last().is_none_or(|(seq, ..)| *seq < 5) {
        again.push(scene.next(&mut socket).await?);
    }
    assert_eq!(again.last().context("the new one")?, &(5, "dm.received".to_owned(), "later".to_owned()));
    let kinds: Vec<_> = again.iter().map(|(seq, kind, words)| (*seq, kind.as_str(), words.as_str())).collect();
    assert!(
        kinds.contains(&(2, "dm.received", "after")) && kinds.contains(&(4, "dm.received", "after that")),
        "{kinds:?}"
    );
    assert!(!kinds.iter().any(|(seq, kind, _)| *seq == 3 && *kind == "dm.received"), "{kinds:?}");

    // Unrecoverable deliveries are dead letters with their reason, and the event log notifies the sender.
    let letters = scene.key.get("/v1/dead-letters?reason=lost_in_restore").await?.success()?;
    let letters = letters.as_array().context("letters")?;
    assert_eq!(letters.len(), 1, "{letters:?}");
    assert_eq!((&letters[0]["seq"], text(&letters[0]["reason"])), (&json!(3), "lost_in_restore"));
    assert_eq!(letters[0]["message_id"], lost["message"]["id"], "{letters:?}");
    let reported = number(
        &stack,
        "SELECT count(*) FROM event_log WHERE workspace_id = WORKSPACE
            AND events::text LIKE '%delivery.failed%' AND events::text LIKE '%lost_in_restore%'",
        &scene.id,
    );
    assert_eq!(reported.await?, 1);
    // Recovered messages are in the conversation again.
    let listed = scene.key.as_agent(&scene.ada).get("/v1/dm/conversations").await?.success()?;
    let conversation = text(&listed[0]["id"]).to_owned();
    let messages = scene.key.as_agent(&scene.ada).get(&format!("/v1/dm/{conversation}/messages")).await?.success()?;
    let found: HashSet<&str> = messages.as_array().context("messages")?.iter().map(|one| text(&one["text"])).collect();
    assert!(found.is_superset(&HashSet::from(["before", "after", "after that", "later"])), "{messages}");
    scene.verify(&stack, Losses::Within(&[lost_since_copy])).await?;
    assert_eq!(scene.history.lost_ids(), [text(&lost["message"]["id"])], "the log had the others");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seqs_skip_the_margin_when_the_log_is_lost_too() -> Result<()> {
    let stack = Stack::builder().gateways(1).env("RELAY_RESTORE_MARGIN", "1000").start().await?;
    let scene = Scene::new(&stack).await?;
    scene.send("waits").await?;
    let cyd = scene.key.register_agent("cyd").await?;
    scene.send_to("cyd", "waits as well").await?;
    stop(&stack);
    let copied = tick();
    copy(&stack, "relay", "older").await?;
    start(&stack).await?;
    scene.send("lost for good").await?;
    stop(&stack);
    stack.nats().stop().await?;
    std::fs::remove_dir_all(stack.nats().store_dir())?;
    stack.nats().restart().await?;
    restore(&stack, "older").await?;
    let lost_since_copy = copied..tick();
    start(&stack).await?;

    assert_eq!(number(&stack, HEAD, &scene.id).await?, 1002, "two were given away; nobody can tell");
    let rows = "SELECT (SELECT count(*) FROM skipped_seqs WHERE workspace_id = WORKSPACE)
                       + 1000 * (SELECT count(*) FROM delivery_exceptions WHERE workspace_id = WORKSPACE)";
    assert_eq!(number(&stack, rows, &scene.id).await?, 2, "one for each mailbox in which something waits");
    let idle = "SELECT c.settled_floor FROM mailbox_cursors c JOIN agents a USING (workspace_id, agent_id)
                 WHERE c.workspace_id = WORKSPACE AND a.name = 'ada'";
    assert_eq!(number(&stack, idle, &scene.id).await?, 1000);
    let mut socket = scene.socket().await?;
    scene.send("later").await?;
    // A position within the skipped range is settled: waiting deliveries come first, then new ones.
    let first = scene.next(&mut socket).await?;
    assert_eq!(first, (1, "dm.received".to_owned(), "waits".to_owned()));
    let last = loop {
        let frame = scene.next(&mut socket).await?;
        if frame.1 == "dm.received" {
            break frame;
        }
    };
    assert_eq!(last, (1002, "dm.received".to_owned(), "later".to_owned()));

    // Settling waiting deliveries over REST settles the skipped numbers too.
    let cyd = scene.key.as_agent(&cyd);
    let listed = cyd.get("/v1/deliveries").await?.success()?;
    assert_eq!(listed.as_array().map(Vec::len), Some(1), "{listed}");
    cyd.post_empty(&format!("/v1/deliveries/{}/ack", text(&listed[0]["id"]))).await?.success()?;
    let floor = "SELECT c.settled_floor FROM mailbox_cursors c JOIN agents a USING (workspace_id, agent_id)
                  WHERE c.workspace_id = WORKSPACE AND a.name = 'cyd'";
    assert_eq!(number(&stack, floor, &scene.id).await?, 1001);
    scene.history.allow_loss("cyd", "waits as well");
    scene.verify(&stack, Losses::Within(&[lost_since_copy])).await?;
    assert_eq!(scene.history.lost_ids().len(), 1, "\"lost for good\"");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_log_is_rebuilt_completely() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let scene = Scene::new(&stack).await?;
    for number in 1..=3 {
        scene.send(&format!("letter {number}")).await?;
    }
    stack.nats().stop().await?;
    std::fs::remove_dir_all(stack.nats().store_dir())?;
    scene.send("letter 4").await?;
    stack.nats().restart().await?;

    wait::until_ok("the log to be rebuilt", SOON, || async {
        let jetstream = async_nats::jetstream::new(async_nats::connect(stack.nats_url()).await?);
        let stream = jetstream.get_stream("RELAY_DELIVERIES").await?;
        let info = stream.cached_info();
        ensure!(info.state.messages >= 4 && info.config.metadata.contains_key("relay-rebuilt"), "{:?}", info.state);
        anyhow::Ok(())
    })
    .await?;
    assert_eq!(number(&stack, HEAD, &scene.id).await?, 5, "numbers go on: Postgres has lost nothing");
    let mut socket = scene.socket().await?;
    for number in 1..=4 {
        assert_eq!(scene.next(&mut socket).await?, (number, "dm.received".to_owned(), format!("letter {number}")));
    }
    scene.send("letter 5").await?;
    assert_eq!(scene.next(&mut socket).await?.0, 5);
    scene.verify(&stack, Losses::None).await
}

/// Makes the first change of a repair wait until the table is empty.
const HOLD_REPAIR: [&str; 3] = [
    "CREATE TABLE held_repairs AS SELECT 1 AS held",
    "CREATE FUNCTION wait_while_held() RETURNS trigger LANGUAGE plpgsql AS $$
     BEGIN
         WHILE EXISTS (SELECT FROM held_repairs) LOOP
             PERFORM pg_sleep(0.05);
         END LOOP;
         RETURN NULL;
     END $$",
    "CREATE TRIGGER wait_while_held BEFORE UPDATE ON event_heads FOR EACH STATEMENT EXECUTE FUNCTION wait_while_held()",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_restore_renews_its_worker_number() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    stop(&stack);
    let mut database = PgConnection::connect(stack.database_url()).await?;
    for statement in HOLD_REPAIR {
        sqlx::raw_sql(statement).execute(&mut database).await?;
    }
    let nats_url = stack.nats_url();
    let variables = [("DATABASE_URL", stack.database_url()), ("NATS_URL", nats_url.as_str())];
    let restoring = async { relayctl_with(&["restore"], &variables, "").await?.expect_success() };
    let leased_until = "SELECT coalesce(max(extract(epoch FROM lease_until) * 1000)::bigint, 0) FROM worker_ids
                         WHERE owner LIKE 'relayctl-%'";
    let renewing = async {
        let first = wait::until_ok("the restore to lease a number", SOON, || async {
            let until = number(&stack, leased_until, "").await?;
            ensure!(until > 0, "no lease");
            anyhow::Ok(until)
        })
        .await?;
        wait::until_ok("the lease to be renewed", SOON, || async {
            ensure!(number(&stack, leased_until, "").await? > first, "not renewed");
            anyhow::Ok(())
        })
        .await?;
        sqlx::raw_sql("DELETE FROM held_repairs").execute(&mut database).await?;
        anyhow::Ok(())
    };
    tokio::try_join!(restoring, renewing)?;
    Ok(())
}
