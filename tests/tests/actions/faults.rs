//! Crashes of gateways and nodes during invocations: every invocation has one outcome.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use relay_testkit::{
    client::{Agent, Api, NodeSocket},
    stack::{Stack, StackBuilder},
    wait,
};
use serde_json::{Value, json};
use sqlx::PgPool;

const SOON: Duration = Duration::from_secs(30);
/// Timeout for effects of a node's liveness time (30 s) on a loaded machine.
const LATER: Duration = Duration::from_secs(75);
/// Maximum delay that one workspace's flood may cause to another's call on a loaded machine.
const FAIR: Duration = Duration::from_secs(5);

struct Scene {
    stack: Stack,
    key: Api,
    ann: Agent,
    database: PgPool,
}

impl Scene {
    async fn start() -> Result<Self> {
        Self::with(Stack::builder().gateways(2)).await
    }

    async fn with(builder: StackBuilder) -> Result<Self> {
        let stack = builder.start().await?;
        let key = Api::create_workspace(stack.gateway(0).url(), "faults").await?;
        let ann = key.register_agent("ann").await?;
        let database = PgPool::connect(stack.database_url()).await?;
        Ok(Self { stack, key, ann, database })
    }

    fn ann(&self, gateway: usize) -> Api {
        self.key.as_agent(&self.ann).at(self.stack.gateway(gateway).url())
    }

    /// Connects a node with this capacity to a gateway.
    async fn node(&self, gateway: usize, name: &str, capacity: &str) -> Result<Connected> {
        let token = self.key.create_broker_node(&format!("node_{name}"), name).await?;
        let node = Node { name: name.to_owned(), id: token.node_id, token: token.token, capacity: capacity.to_owned() };
        let socket = node.connect(&self.stack.gateway(gateway).ws_url()).await?;
        Ok(Connected { node, socket })
    }

    async fn invoke(&self, gateway: usize, action: &str) -> Result<String> {
        let ack = self.ann(gateway).post(&format!("/v1/actions/{action}/invoke"), json!({})).await?.success()?;
        Ok(ack["invocation_id"].as_str().context("an id")?.to_owned())
    }

    async fn outcome(&self, gateway: usize, action: &str, id: &str) -> Result<Value> {
        let path = format!("/v1/actions/{action}/invocations/{id}");
        let api = self.ann(gateway);
        wait::until("an outcome", LATER, || async {
            let row = api.get(&path).await.and_then(relay_testkit::client::Reply::success);
            row.is_ok_and(|row| row["completed_at"].is_string())
        })
        .await;
        api.get(&path).await?.success()
    }

    async fn reserved(&self) -> Result<i64> {
        let query = "SELECT count(*) FROM invocations WHERE reserves";
        Ok(sqlx::query_scalar(query).fetch_one(&self.database).await?)
    }
}

struct Node {
    name: String,
    id: String,
    token: String,
    capacity: String,
}

/// Node with its socket.
struct Connected {
    node: Node,
    socket: NodeSocket,
}

impl Node {
    async fn connect(&self, ws_base: &str) -> Result<NodeSocket> {
        let mut socket = NodeSocket::connect(ws_base, &self.token).await?;
        let instance = uuid::Uuid::new_v4().to_string();
        socket.register_broker_with(&self.id, &self.name, &instance, &[&self.capacity]).await?;
        Ok(socket)
    }
}

impl Connected {
    /// Reconnects to another gateway and drops the old socket.
    async fn reconnect(&mut self, scene: &Scene, gateway: usize) -> Result<()> {
        self.socket = self.node.connect(&scene.stack.gateway(gateway).ws_url()).await?;
        Ok(())
    }

    /// Drops the connection and connects another instance of the provider.
    async fn replace_connection(self, scene: &Scene, gateway: usize) -> Result<Self> {
        let Self { node, socket } = self;
        socket.abort();
        let url = scene.stack.gateway(gateway).ws_url();
        // The node counts as connected until the loss is noticed.
        let socket = wait::until_ok("the node's place to be free", LATER, async || node.connect(&url).await).await?;
        Ok(Self { node, socket })
    }

    async fn next_invocation(&mut self, within: Duration) -> Result<String> {
        let what = format!("an invocation at {}", self.node.name);
        let frame = self.socket.expect_where(&what, within, |frame| frame["type"] == "action.invoke").await?;
        Ok(frame["invocation_id"].as_str().context("an id")?.to_owned())
    }

    async fn result(&self, id: &str, output: &Value) -> Result<()> {
        let frame = json!({ "v": 1, "type": "action.result", "invocation_id": id, "output": output });
        self.socket.send_json(&frame).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unsent_invocation_of_a_dead_gateway_is_sent_by_another() -> Result<()> {
    let scene = Scene::start().await?;
    let mut node = scene.node(1, "box", "grind").await?;
    let mut attempts = 0;
    let id = loop {
        attempts += 1;
        // A frozen gateway still holds its lease, so its node counts as connected for three seconds.
        scene.stack.gateway(1).sigstop();
        match scene.invoke(0, "grind").await {
            Ok(id) => break id,
            Err(error) if attempts == 5 => return Err(error),
            Err(_) => scene.stack.gateway(1).sigcont(),
        }
        node = wait::until_ok("the node to be there again", SOON, || scene.node(1, "box", "grind")).await?;
    };
    scene.stack.gateway(1).kill9();
    ensure!(node.next_invocation(Duration::from_millis(200)).await.is_err(), "nothing can have been sent");
    node.reconnect(&scene, 0).await?;
    assert_eq!(node.next_invocation(SOON).await?, id);
    node.result(&id, &json!({ "by": "box" })).await?;
    let row = scene.outcome(0, "grind", &id).await?;
    assert_eq!((&row["status"], &row["output"]), (&json!("completed"), &json!({ "by": "box" })));
    assert_eq!(scene.reserved().await?, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_is_accepted_by_another_gateway_after_a_crash() -> Result<()> {
    let scene = Scene::start().await?;
    let mut caller = scene.ann(0).direct_socket().await?;
    let mut node = scene.node(1, "box", "grind").await?;
    let id = scene.invoke(0, "grind").await?;
    assert_eq!(node.next_invocation(SOON).await?, id);
    scene.stack.gateway(1).kill9();
    node.reconnect(&scene, 0).await?;
    node.result(&id, &json!({ "by": "box" })).await?;
    let row = scene.outcome(0, "grind", &id).await?;
    assert_eq!((&row["status"], &row["output"]), (&json!("completed"), &json!({ "by": "box" })));
    let told = |frame: &Value| frame["payload"]["type"] == "action.completed";
    caller.expect_where("the outcome", SOON, told).await?;
    let again = caller.expect_where("a second outcome", Duration::from_secs(1), told).await;
    assert!(again.is_err(), "{again:?}");
    assert_eq!(scene.reserved().await?, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invocations_of_a_lost_node_move_and_its_late_result_is_refused() -> Result<()> {
    let scene = Scene::start().await?;
    let mut nodes = [scene.node(0, "east", "grind").await?, scene.node(1, "west", "grind").await?];
    let ack = scene.ann(0).post("/v1/actions/grind/invoke", json!({})).await?.success()?;
    let id = ack["invocation_id"].as_str().context("an id")?.to_owned();
    let first = usize::from(ack["dispatched_node_id"] != nodes[0].node.id.as_str());
    let second = 1 - first;
    assert_eq!(nodes[first].next_invocation(SOON).await?, id);
    assert_eq!(scene.reserved().await?, 1);
    // Another instance is refused while the first responds within a second. On a loaded machine it may be admitted and
    // then becomes the incumbent.
    let mut refused = false;
    for _ in 0..5 {
        match nodes[first].node.connect(&scene.stack.gateway(first).ws_url()).await {
            Ok(socket) => nodes[first].socket = socket,
            Err(_) => refused = true,
        }
        if refused {
            break;
        }
    }
    ensure!(refused, "another instance while the first lives");
    // The process has exited and its socket is closed.
    let replacement = NodeSocket::connect(&scene.stack.gateway(first).ws_url(), &nodes[first].node.token).await?;
    std::mem::replace(&mut nodes[first].socket, replacement).abort();
    assert_eq!(nodes[second].next_invocation(LATER).await?, id, "the same invocation, at the other node");
    nodes[first].reconnect(&scene, second).await?;
    nodes[first].result(&id, &json!({ "by": "the late one" })).await?;
    // Results are processed in order: after this answer the late result has been processed.
    nodes[first].socket.request(json!({ "v": 1, "type": "inventory.sync", "agents": [] })).await?;
    let path = format!("/v1/actions/grind/invocations/{id}?explain=true");
    let open = scene.ann(0).get(&path).await?.success()?;
    assert_eq!(open["status"], "dispatched", "{open}");
    nodes[second].result(&id, &json!({ "by": "the other" })).await?;
    let row = scene.outcome(0, "grind", &id).await?;
    assert_eq!(row["output"], json!({ "by": "the other" }));
    let placements = open["placements"].as_array().context("placements")?;
    assert_eq!(placements.len(), 2, "{open}");
    assert_ne!(placements[0]["chosen"]["node"], placements[1]["chosen"]["node"], "{open}");
    assert_eq!(scene.reserved().await?, 0);
    let refused = scene.stack.gateway(second).metric("relay_action_results_refused_total").await?;
    assert!(refused >= 1.0, "{refused}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_completions_on_two_gateways_agree_on_one_outcome() -> Result<()> {
    let scene = Scene::start().await?;
    let mut caller = scene.ann(0).direct_socket().await?;
    let bob = scene.key.register_agent("bob").await?;
    let bobs = [0, 1].map(|gateway| scene.key.as_agent(&bob).at(scene.stack.gateway(gateway).url()));
    bobs[0]
        .post("/v1/actions", json!({ "name": "decide", "description": "", "handler_agent": "bob" }))
        .await?
        .success()?;
    for round in 0..20 {
        let id = scene.invoke(round % 2, "decide").await?;
        let path = format!("/v1/actions/decide/invocations/{id}/complete");
        let (a, b) = tokio::try_join!(
            bobs[0].post(&path, json!({ "output": { "said": "a" } })),
            bobs[1].post(&path, json!({ "error": "b" })),
        )?;
        assert_eq!(a.success()?, b.success()?, "both are told the one outcome");
        let told = |frame: &Value| frame["payload"]["data"]["invocation_id"] == id.as_str();
        caller.expect_where("the outcome", SOON, told).await?;
    }
    let more = |frame: &Value| frame["payload"]["data"]["invocation_id"].is_string();
    let again = caller.expect_where("an outcome more", Duration::from_secs(1), more).await;
    assert!(again.is_err(), "{again:?}");
    Ok(())
}

/// A result carries no id for an answer, so no node would send it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_received_while_postgres_is_unavailable_is_stored_later() -> Result<()> {
    let scene = Scene::with(Stack::builder().gateways(2).through_proxies(true)).await?;
    let mut node = scene.node(1, "box", "grind").await?;
    let id = scene.invoke(0, "grind").await?;
    assert_eq!(node.next_invocation(SOON).await?, id);
    scene.stack.postgres_proxy().cut();
    node.result(&id, &json!({ "by": "box" })).await?;
    // Shorter than the gateways' leases, longer than refusing a result takes.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    scene.stack.postgres_proxy().restore();
    let row = scene.outcome(0, "grind", &id).await?;
    assert_eq!((&row["status"], &row["output"]), (&json!("completed"), &json!({ "by": "box" })));
    let again = node.next_invocation(Duration::from_millis(100)).await;
    assert!(again.is_err(), "it was not asked twice: {again:?}");
    Ok(())
}

/// More than the queue of a connection and one page of a provider's invocations.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invocations_sent_over_a_lost_connection_are_sent_again() -> Result<()> {
    const LARGE: usize = 5;
    const SMALL: usize = 120;
    let scene = Scene::start().await?;
    let mut node = scene.node(1, "box", "grind").await?;
    let large = "x".repeat(200 * 1024);
    let calls = (0..LARGE + SMALL).map(|nth| {
        let (api, input) = (scene.ann(0), if nth < LARGE { large.as_str() } else { "small" });
        let body = json!({ "input": { "text": input } });
        async move { api.post("/v1/actions/grind/invoke", body).await?.success() }
    });
    let calls = futures::future::try_join_all(calls).await?;
    let sent: BTreeSet<String> =
        calls.iter().filter_map(|ack| ack["invocation_id"].as_str().map(str::to_owned)).collect();
    for round in ["first", "again"] {
        let mut told = BTreeSet::new();
        while told.len() < sent.len() {
            told.insert(node.next_invocation(SOON).await.with_context(|| format!("{round}: {} told", told.len()))?);
        }
        assert_eq!(told, sent, "{round}");
        // Sent invocations are recorded asynchronously.
        wait::until("all to be noted", SOON, || async {
            let noted = "SELECT count(*) FROM invocations WHERE sent_epoch = (SELECT max(epoch) FROM providers)";
            let noted: Result<i64, _> = sqlx::query_scalar(noted).fetch_one(&scene.database).await;
            noted.is_ok_and(|noted| usize::try_from(noted) == Ok(sent.len()))
        })
        .await;
        node = node.replace_connection(&scene, 0).await?;
    }
    Ok(())
}

/// Sixty invocations are open when a gateway dies; its node reconnects elsewhere and repeats what it is sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_completes_although_a_gateway_dies() -> Result<()> {
    let scene = Scene::start().await?;
    let mut nodes = [scene.node(0, "east", "grind").await?, scene.node(1, "west", "grind").await?];
    let calls = futures::future::try_join_all((0..60).map(|_| scene.invoke(0, "grind"))).await?;
    scene.stack.gateway(1).kill9();
    nodes[1].reconnect(&scene, 0).await?;
    let mut open: BTreeMap<String, ()> = calls.iter().map(|id| (id.clone(), ())).collect();
    let deadline = tokio::time::Instant::now() + LATER;
    while !open.is_empty() {
        ensure!(tokio::time::Instant::now() < deadline, "left: {open:?}\n{}", scene.stack.logs(30));
        for node in &mut nodes {
            while let Ok(id) = node.next_invocation(Duration::from_millis(50)).await {
                node.result(&id, &json!({ "by": node.node.name })).await?;
                open.remove(&id);
            }
        }
    }
    for id in &calls {
        let row = scene.outcome(0, "grind", id).await?;
        assert_eq!(row["status"], "completed", "{row}");
    }
    assert_eq!(scene.reserved().await?, 0);
    Ok(())
}

/// One long-running invocation reports its start; another one on the same node stays silent for too long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_accepted_invocation_survives_silence_of_its_node() -> Result<()> {
    let scene = Scene::start().await?;
    let mut first = scene.node(0, "east", "grind").await?;
    let [accepted, silent, reported] =
        [scene.invoke(0, "grind").await?, scene.invoke(0, "grind").await?, scene.invoke(1, "grind").await?];
    for _ in 0..3 {
        first.next_invocation(SOON).await?;
    }
    let mut second = scene.node(1, "west", "grind").await?;
    let accept = |id: &str| json!({ "v": 1, "type": "action.accept", "invocation_id": id, "execution_id": "e-1" });
    let refused = second.socket.request(accept(&accepted)).await.err().context("not its own")?.to_string();
    ensure!(refused.contains("invocation_not_found"), "{refused}");
    ensure!(first.socket.request(accept("inv_7")).await.is_err());
    assert_eq!(first.socket.request(accept(&accepted)).await?, Value::Null);
    let part = json!({ "v": 1, "type": "action.result", "invocation_id": reported, "output": { "done": 0.5 }, "final": false });
    assert_eq!(first.socket.request(part).await?, Value::Null, "results of long tasks are answered");

    let read = async |id: &str| scene.ann(0).get(&format!("/v1/actions/grind/invocations/{id}")).await?.success();
    let since = read(&accepted).await?["accepted_at"].clone();
    ensure!(since.is_string() && read(&reported).await?["accepted_at"].is_string());
    ensure!(read(&silent).await?.get("accepted_at").is_none());
    assert_eq!(first.socket.request(accept(&accepted)).await?, Value::Null);
    assert_eq!(read(&accepted).await?["accepted_at"], since, "once");

    sqlx::query("UPDATE invocations SET due_at = now() - interval '1 minute'").execute(&scene.database).await?;
    assert_eq!(second.next_invocation(LATER).await?, silent, "what was not accepted goes elsewhere");
    for id in [&accepted, &reported] {
        assert_eq!(read(id).await?["status"], "dispatched");
        first.result(id, &json!({ "by": "east" })).await?;
        assert_eq!(scene.outcome(1, "grind", id).await?["output"]["by"], "east");
    }
    let late = first.socket.request(accept(&accepted)).await.err().context("it is over")?.to_string();
    ensure!(late.contains("invocation_not_found"), "{late}");

    // Invocations of a lost node move to another one, accepted or not.
    second.socket.request(accept(&silent)).await?;
    second.socket.abort();
    assert_eq!(first.next_invocation(LATER).await?, silent);
    ensure!(read(&silent).await?.get("accepted_at").is_none());
    first.result(&silent, &json!({ "by": "east" })).await?;
    assert_eq!(scene.outcome(1, "grind", &silent).await?["status"], "completed");
    assert_eq!(scene.reserved().await?, 0);
    Ok(())
}

/// Ten thousand invocations of one workspace wait without a capable node: it can open no more, and others are
/// unaffected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_workspace_with_thousands_of_invocations_does_not_delay_others() -> Result<()> {
    let scene = Scene::start().await?;
    let (_east, _west) = (scene.node(0, "east", "grind").await?, scene.node(1, "west", "mill").await?);
    let flood = async |count: i64, action: &str, after: i64| {
        sqlx::query(
            "INSERT INTO invocations (workspace_id, invocation_id, action_name, capability, caller_name, input, status,
                                      due_at, unreachable_since, created_at)
             SELECT workspace_id, $3 + n, $2, 'nobody-can', 'x', '{}', 'pending', now(), now(), now()
               FROM workspaces, generate_series(1, $1) AS n",
        )
        .bind(count)
        .bind(action)
        .bind(after)
        .execute(&scene.database)
        .await
    };
    let invoke = async |action: &str| scene.ann(0).post(&format!("/v1/actions/{action}/invoke"), json!({})).await;
    flood(1_999, "grind", 0).await?;
    invoke("grind").await?.success()?;
    invoke("grind").await?.refused(429, "too_many_invocations")?;
    invoke("mill").await?.success()?;
    flood(7_999, "other", 2_000).await?;
    invoke("mill").await?.refused(429, "too_many_invocations")?;

    let noisy = scene.ann(0);
    let other = Scene { key: Api::create_workspace(scene.stack.gateway(1).url(), "others").await?, ..scene };
    let ann = other.key.register_agent("ann").await?;
    let other = Scene { ann, ..other };
    let mut box_ = other.node(1, "box", "spawn:sh").await?;
    let spawn = async |name: &str| {
        let began = Instant::now();
        let body = json!({ "name": name, "cli": "sh", "node": "box", "task": "" });
        let ack = other.ann(0).post("/v1/agents/spawn", body).await?.success()?;
        anyhow::Ok((ack["invocation_id"].as_str().context("an id")?.to_owned(), ack["status"].clone(), began))
    };
    let (first, status, began) = spawn("one").await?;
    assert_eq!((status, box_.next_invocation(SOON).await?), (json!("dispatched"), first.clone()));
    let undisturbed = began.elapsed();
    box_.result(&first, &json!({})).await?;
    assert_eq!(other.outcome(0, "spawn", &first).await?["status"], "completed");

    // The noisy workspace may open some more and calls as fast as it can through the same gateway.
    sqlx::query("DELETE FROM invocations WHERE action_name = 'other'").execute(&other.database).await?;
    let (made, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let flooding = futures::future::join_all((0..64).map(|_| async {
        while !is_over.load(Ordering::Relaxed) {
            let reply = noisy.post("/v1/actions/mill/invoke", json!({})).await;
            made.fetch_add(u64::from(reply.is_ok_and(|reply| reply.is_success())), Ordering::Relaxed);
        }
    }));
    let amid = async {
        let told = async {
            wait::until("the flood", SOON, || async { made.load(Ordering::Relaxed) >= 200 }).await;
            let (flooded, _, began) = spawn("amid").await?;
            ensure!(box_.next_invocation(SOON).await? == flooded, "another one");
            anyhow::Ok((began.elapsed(), flooded))
        };
        let told = told.await;
        is_over.store(true, Ordering::Relaxed);
        told
    };
    let (_, told) = tokio::join!(flooding, amid);
    let (took, flooded) = told?;
    println!("told after {undisturbed:?}, and after {took:?} amid {} calls", made.load(Ordering::Relaxed));
    assert!(took < FAIR, "{took:?} instead of {undisturbed:?}");
    box_.result(&flooded, &json!({})).await?;
    assert_eq!(other.outcome(0, "spawn", &flooded).await?["status"], "completed");

    // Invocations for an offline node are sent when it returns in time and fail otherwise.
    let node = box_.node;
    box_.socket.abort();
    let waiting = wait::until_ok("the node to be unavailable", SOON, || async {
        let (id, status, _) = spawn("two").await?;
        ensure!(status == "pending", "{status}");
        anyhow::Ok(id)
    });
    let second = waiting.await?;
    let mut socket = node.connect(&other.stack.gateway(0).ws_url()).await?;
    let told = |frame: &Value| frame["invocation_id"] == second.as_str();
    socket.expect_where("what waited", SOON, told).await?;
    socket.abort();
    let hopeless = wait::until_ok("the node to be unavailable again", SOON, || async {
        let (id, status, _) = spawn("three").await?;
        ensure!(status == "pending", "{status}");
        anyhow::Ok(id)
    });
    let hopeless = hopeless.await?;
    let id: i64 = hopeless.trim_start_matches("inv_").parse()?;
    sqlx::query("UPDATE invocations SET unreachable_since = now() - interval '121 seconds' WHERE invocation_id = $1")
        .bind(id)
        .execute(&other.database)
        .await?;
    let row = other.outcome(1, "spawn", &hopeless).await?;
    assert_eq!((&row["status"], &row["error"]), (&json!("failed"), &json!("handler_unavailable")));
    Ok(())
}
