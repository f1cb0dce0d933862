//! Statements of a tenant that wait for each other: they take a part of a gateway's database connections, not all.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, future::join_all, stream};
use relay_acceptance::room::text;
use relay_testkit::{
    client::{Api, NodeSocket},
    stack::Stack,
    wait,
};
use serde_json::json;
use sqlx::{Connection as _, PgConnection, PgPool, Postgres, Transaction};

/// Requests at a time, and sockets with a frame in progress: more than two for each database connection of a gateway.
const AT_A_TIME: usize = 40;
/// Frames that each socket has sent.
const FRAMES: usize = 10;
/// Requests of the other tenant during an attack.
const REQUESTS: usize = 20;
const MAX_REFUSED: usize = 4;
const WITHIN: Duration = Duration::from_secs(30);
const WAITING_STATEMENTS: &str = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";

async fn id_of(key: &Api) -> Result<i64> {
    Ok(text(&key.get("/v1/workspace").await?.success()?["id"]).parse()?)
}

/// Locks rows of a workspace for which its statements then wait.
async fn lock<'a>(database: &'a mut PgConnection, table: &str, workspace: i64) -> Result<Transaction<'a, Postgres>> {
    let mut transaction = database.begin().await?;
    let statement = format!("SELECT FROM {table} WHERE workspace_id = $1 FOR UPDATE");
    sqlx::query(sqlx::AssertSqlSafe(statement)).bind(workspace).execute(&mut *transaction).await?;
    Ok(transaction)
}

/// Requests of another tenant once statements of the attacker wait. Few are refused, by a busy machine.
async fn serve_other(stack: &Stack, name: &str) -> Result<()> {
    let pool = PgPool::connect(stack.database_url()).await?;
    wait::until("statements that wait", WITHIN, || async {
        sqlx::query_scalar::<_, i64>(WAITING_STATEMENTS).fetch_one(&pool).await.is_ok_and(|waiting| waiting >= 4)
    })
    .await;
    let other = Api::create_workspace(stack.gateway(0).url(), name).await?.without_retries();
    let mut refused = 0;
    for nth in 0..REQUESTS {
        let reply = other.post("/v1/agents", json!({ "name": format!("agent-{nth}") })).await?;
        refused += usize::from(!reply.is_success());
        ensure!(refused <= MAX_REFUSED, "the other tenant was refused: {}", reply.body);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_for_a_row_leave_connections_to_other_tenants() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let attacker = Api::create_workspace(stack.gateway(0).url(), "attacker").await?.without_retries();
    let workspace = id_of(&attacker).await?;
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let transaction = lock(&mut database, "workspaces", workspace).await?;
    let is_over = AtomicBool::new(false);
    let attack = join_all((0..AT_A_TIME).map(|_| async {
        while !is_over.load(Ordering::Relaxed) {
            let _ = attacker.patch("/v1/workspace", json!({ "metadata": { "touched": true } })).await;
        }
    }));
    let others = async {
        let served = serve_other(&stack, "other").await;
        is_over.store(true, Ordering::Relaxed);
        transaction.rollback().await?;
        served
    };
    let (_, served) = tokio::join!(attack, others);
    served
}

/// Connects a node of its own, once the gateway has a connection for it.
async fn connect(key: &Api, nth: usize) -> Result<NodeSocket> {
    let name = format!("node-{nth}");
    let node = key.create_broker_node(&name, &name).await?;
    wait::until_ok("a registered node", WITHIN, || async {
        let mut socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
        socket.register_broker(&node.node_id, &name, "one").await?;
        anyhow::Ok(socket)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_wait_for_a_row_leave_connections_to_other_tenants() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let attacker = Api::create_workspace(stack.gateway(0).url(), "attacker").await?;
    let workspace = id_of(&attacker).await?;
    let sockets: Vec<NodeSocket> =
        stream::iter(0..AT_A_TIME).map(|nth| connect(&attacker, nth)).buffer_unordered(4).try_collect().await?;
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let transaction = lock(&mut database, "event_heads", workspace).await?;
    for (nth, socket) in sockets.iter().enumerate() {
        for frame in 0..FRAMES {
            let name = format!("agent-{nth}-{frame}");
            socket.send_json(&json!({ "v": 1, "type": "agent.register", "id": name, "name": name })).await?;
        }
    }
    let served = serve_other(&stack, "other").await;
    transaction.rollback().await?;
    served
}
