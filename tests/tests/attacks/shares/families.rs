//! A workspace with children: together they have the share of one tenant.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use futures::future::{join_all, try_join_all};
use relay_acceptance::tcp_client::TcpClient;
use relay_testkit::{client::Api, stack::Stack, wait};
use serde_json::json;
use sqlx::{Connection as _, PgConnection, PgPool};

use super::create_family;

/// Children of the attacker: as many as the smallest plan allows, and enough to take what four tenants may.
const CHILDREN: usize = 3;
/// Searches of each workspace at a time.
const SEARCHES: usize = 4;
/// Requests of the other tenant during the attack.
const REQUESTS: usize = 5;
/// Less than a request waits for a place.
const SOON: Duration = Duration::from_secs(4);
const WAITING_SEARCHES: &str = "SELECT count(*) FROM pg_stat_activity
     WHERE wait_event_type = 'Lock' AND query LIKE '%message_search%' AND pid <> pg_backend_pid()";
const WITHIN: Duration = Duration::from_secs(30);

/// Creates a workspace and its children, a child of a child among them.
async fn family(gateway: &str) -> Result<Vec<Api>> {
    let members = create_family(gateway, CHILDREN).await?;
    Ok(members.iter().map(Api::without_retries).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_searches_of_a_family_leave_places_to_other_tenants() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let members = family(stack.gateway(0).url()).await?;
    let other = Api::create_workspace(stack.gateway(0).url(), "other").await?;
    // Every search waits for this lock; other reads that need a place do not.
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let observer = PgPool::connect(stack.database_url()).await?;
    let mut transaction = database.begin().await?;
    sqlx::query("LOCK TABLE message_search IN ACCESS EXCLUSIVE MODE").execute(&mut *transaction).await?;

    let is_over = AtomicBool::new(false);
    let attack =
        join_all(members.iter().flat_map(|member| std::iter::repeat_n(member, SEARCHES)).map(|member| async {
            while !is_over.load(Ordering::Relaxed) {
                let _ = member.get("/v1/search?q=words").await;
            }
        }));
    let others = async {
        wait::until_ok("a search that waits", WITHIN, || async {
            let waiting: i64 = sqlx::query_scalar(WAITING_SEARCHES).fetch_one(&observer).await?;
            ensure!(waiting > 0);
            Ok(())
        })
        .await?;
        for _ in 0..REQUESTS {
            let answer = tokio::time::timeout(SOON, other.get("/v1/activity")).await;
            answer.context("the other tenant waits for a place")??.success()?;
        }
        anyhow::Ok(())
    };
    let others = async {
        let served = others.await;
        is_over.store(true, Ordering::Relaxed);
        transaction.rollback().await?;
        served
    };
    let (_, served) = tokio::join!(attack, others);
    served
}

/// Asks for a node socket; `None` if there are too many connections.
async fn socket(gateway: &str, token: &str) -> Result<Option<TcpClient>> {
    let (mut client, head) =
        TcpClient::upgrade(gateway, "/v1/node/ws", &[format!("authorization: Bearer {token}")]).await?;
    if head.status == 101 {
        return Ok(Some(client));
    }
    let code = client.error_code(&head).await?;
    ensure!(head.status == 503 && code == "too_many_connections", "{} {code}", head.status);
    Ok(None)
}

#[tokio::test]
async fn a_family_has_one_share_of_the_sockets() -> Result<()> {
    let stack =
        Stack::builder().gateways(2).worker(false).env("RELAY_MAX_CONNECTIONS_PER_WORKSPACE", "4").start().await?;
    let members = family(stack.gateway(0).url()).await?;
    let tokens = try_join_all(members.iter().map(|member| async move {
        let node = member.create_broker_node("node_attacker", "attacker").await?;
        anyhow::Ok(node.token)
    }))
    .await?;
    // The second gateway has not met these workspaces yet.
    for gateway in [stack.gateway(0).url(), stack.gateway(1).url()] {
        let mut held = Vec::new();
        for token in &tokens {
            held.push(socket(gateway, token).await?.context("within the share")?);
        }
        for token in &tokens {
            ensure!(socket(gateway, token).await?.is_none(), "one more than the share of one workspace");
        }
        let other = Api::create_workspace(gateway, "other").await?;
        let node = other.create_broker_node("node_other", "other").await?;
        ensure!(socket(gateway, &node.token).await?.is_some(), "another tenant has its own");
    }
    Ok(())
}

/// Bodies of a megabyte that a family may hold at a gateway.
const BODIES: usize = 16;
const BODIES_OF_MEMBER: usize = 20;
const BODY_BYTES: usize = 1_000_000;
const MIB: f64 = 1024.0 * 1024.0;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_bodies_of_a_family_take_one_share_of_the_memory() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let members = family(gateway.url()).await?;
    let other = sender(&Api::create_workspace(gateway.url(), "other").await?).await?;
    let agents = try_join_all(members.iter().map(|member| member.register_agent("ann"))).await?;

    let waits = || async { gateway.metric("relay_body_waits_total").await.unwrap_or_default() };
    let waits_before = waits().await;
    let requests = agents.iter().flat_map(|agent| std::iter::repeat_n(agent, BODIES_OF_MEMBER));
    let _unfinished = try_join_all(requests.map(|agent| async {
        let mut client = TcpClient::connect(gateway.url()).await?;
        let head = format!(
            "POST /v1/channels/general/messages HTTP/1.1\r\nhost: relay\r\nauthorization: Bearer {}\r\n\
             content-type: application/json\r\ncontent-length: {BODY_BYTES}\r\n\r\n{{",
            agent.token
        );
        client.send(head.as_bytes()).await?;
        anyhow::Ok(client)
    }))
    .await?;
    let expected = (members.len() * BODIES_OF_MEMBER - BODIES) as f64;
    wait::until_ok("bodies that wait for memory", SOON, || async {
        let waiting = waits().await - waits_before;
        ensure!(waiting >= expected, "{waiting} of {expected} wait");
        Ok(())
    })
    .await?;
    let held = gateway.metric("relay_body_bytes").await?;
    ensure!(held <= 16.0 * MIB, "the family holds {} MiB", held / MIB);
    let body = json!({ "text": "hello", "blocks": [{ "type": "x", "value": "y".repeat(600_000) }] });
    other.post("/v1/channels/general/messages", body).await?.success()?;
    Ok(())
}

/// Posts of a batch, and batches of each of two workspaces: together more than a family may queue, each alone less.
const BATCH: usize = 100;
const BATCHES: usize = 15;
/// A batch waits 2 s for a lock; then the others are committed without the workspace that it belongs to. Both
/// workspaces have one.
const OTHERS_WITHIN: Duration = Duration::from_secs(10);

/// Creates the agents ann and bob with a conversation, and returns the client of ann.
async fn sender(key: &Api) -> Result<Api> {
    let agents = try_join_all(["ann", "bob"].map(|name| key.register_agent(name))).await?;
    let ann = key.as_agent(&agents[0]).without_retries();
    ann.dm("bob", "first").await?.success()?;
    Ok(ann)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_posts_of_a_family_leave_room_in_the_queue() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let members = create_family(gateway.url(), 1).await?;
    let senders = try_join_all(members.iter().map(sender)).await?;
    let other = sender(&Api::create_workspace(gateway.url(), "other").await?).await?;
    // The posts of the family wait for these locks.
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let mut transaction = database.begin().await?;
    let locked = sqlx::query(
        "SELECT FROM mailbox_heads h JOIN agents a USING (workspace_id, agent_id) JOIN workspaces w USING (workspace_id)
          WHERE a.name = 'bob' AND w.name NOT LIKE 'other%' FOR UPDATE OF h",
    )
    .fetch_all(&mut *transaction)
    .await?;
    ensure!(locked.len() == members.len(), "{} mailboxes are locked", locked.len());

    let refused = || async { gateway.metric("relay_queue_refused_total").await.unwrap_or_default() };
    let batch = json!({ "messages": vec![json!({ "to": "bob", "text": "again" }); BATCH] });
    let attack = join_all(senders.iter().flat_map(|sender| std::iter::repeat_n(sender, BATCHES)).map(|sender| {
        let batch = batch.clone();
        async move { sender.post("/v1/messages/batch", batch).await }
    }));
    let others = async {
        wait::until("a refusal, because the family has its share", WITHIN, || async { refused().await > 0.0 }).await;
        let answered = tokio::time::timeout(OTHERS_WITHIN, other.dm("bob", "hello"));
        answered.await.context("the other tenant's post waits for those of the family")??.success()?;
        transaction.rollback().await?;
        anyhow::Ok(())
    };
    let (_, served) = tokio::join!(attack, others);
    served
}
