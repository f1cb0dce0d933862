//! A burst of slow searches: it takes a few database connections of a gateway, not all.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use futures::future::join_all;
use relay_testkit::{client::Api, stack::Stack};
use sqlx::{Connection as _, PgConnection};

use super::register_others;

/// Searches at a time: four for each database connection of a gateway.
const AT_A_TIME: usize = 64;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_searches_leave_connections_to_other_tenants() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let gateway = stack.gateway(0).url();
    let attacker = Api::create_workspace(gateway, "attacker").await?.without_retries();
    let other = Api::create_workspace(gateway, "other").await?.without_retries();
    // Every search waits for this lock; nothing else reads the index.
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let mut transaction = database.begin().await?;
    sqlx::query("LOCK TABLE message_search IN ACCESS EXCLUSIVE MODE").execute(&mut *transaction).await?;

    let is_over = AtomicBool::new(false);
    let attack = join_all((0..AT_A_TIME).map(|_| async {
        while !is_over.load(Ordering::Relaxed) {
            let _ = attacker.get("/v1/search?q=words").await;
        }
    }));
    let (_, others) = tokio::join!(attack, register_others(&other, transaction, &is_over));
    others
}
