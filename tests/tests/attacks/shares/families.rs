//! A workspace with children: together they have the share of one tenant.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use futures::future::{join_all, try_join_all};
use relay_acceptance::tcp_client::TcpClient;
use relay_testkit::{client::Api, stack::Stack, wait};
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
