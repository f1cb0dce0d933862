//! Posts to full mailboxes of an absent broker: each costs one hint, whatever the number of mailboxes.

use std::time::Duration;

use anyhow::{Result, ensure};
use relay_testkit::{
    client::{Api, NodeSocket},
    stack::Stack,
    wait,
};
use sqlx::{Connection as _, PgConnection};

const AGENTS: usize = 50;
const DEPTH: i32 = 3;
const POSTS: u32 = 10;
const SOON: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_mailboxes_cost_one_hint_for_each_post() -> Result<()> {
    let stack = Stack::builder().gateways(2).worker(false).start().await?;
    let (posting, serving) = (stack.gateway(0), stack.gateway(1));
    let key = Api::create_workspace(posting.url(), "full").await?;
    let node = key.create_broker_node("node_full", "full").await?;
    let mut broker = NodeSocket::connect(&posting.ws_url(), &node.token).await?;
    broker.register_broker(&node.node_id, &node.name, "one").await?;
    for nth in 0..AGENTS {
        broker.register_agent(&format!("agent-{nth}")).await?;
    }
    drop(broker);
    let mut database = PgConnection::connect(stack.database_url()).await?;
    sqlx::query("UPDATE workspaces SET mailbox_depth = $1").bind(DEPTH).execute(&mut database).await?;

    let ann = key.as_agent(&key.register_agent("ann").await?);
    // The sender's own socket is at the other gateway.
    let own = ann.direct_node_token().await?;
    let mut socket = NodeSocket::connect(&serving.ws_url(), &own.token).await?;
    socket.register_direct(&own.node_id, &own.name).await?;
    for nth in 0..DEPTH {
        ann.post_message("general", &format!("post {nth}")).await?.success()?;
    }
    // JetStream has them, so that no hint of a batch without an answer is among those that are counted.
    let stored = DEPTH * i32::try_from(AGENTS)?;
    wait::until("the deliveries to be stored", SOON, || async {
        let published = posting.metric("relay_deliveries_published_total").await;
        published.is_ok_and(|published| published >= f64::from(stored))
    })
    .await;
    let sent = || posting.metric("relay_hints_sent_total");
    let before = sent().await?;
    for nth in 0..POSTS {
        ann.post_message("general", &format!("too many {nth}")).await?.success()?;
    }
    for _ in 0..POSTS as usize * AGENTS {
        let failed = socket.expect_where("a failure", SOON, |frame| frame["event"] == "delivery.failed").await?;
        ensure!(failed["data"]["reason"] == "depth_cap", "{failed}");
        ensure!(
            failed["data"]["target_agent_name"].as_str().is_some_and(|name| name.starts_with("agent-")),
            "{failed}"
        );
    }
    // To the gateway of the sender's only connection. All notices have arrived, so their hints are counted.
    let hints = sent().await? - before;
    ensure!(hints == f64::from(POSTS), "{hints} hints for {POSTS} posts");
    Ok(())
}
