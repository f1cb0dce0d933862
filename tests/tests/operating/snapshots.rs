//! A snapshot of Postgres' disk is put back, and the delivery log is lost as well: neither the identity of the database nor
//! the log shows that the database is older.

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Result, ensure};
use relay_testkit::{
    client::Api,
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

async fn post(sender: &Api, text: &str) -> Result<()> {
    wait::until_ok("a post to be accepted", SOON, || async { sender.dm("bob", text).await?.success().map(drop) }).await
}

/// Puts back a snapshot while the engine runs or is stopped. Two messages were sent before it, three later.
async fn put_back_snapshot(is_running: bool) -> Result<()> {
    let stack = Stack::builder().env("RELAY_RESTORE_MARGIN", "1000").start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "snapshot").await?;
    let (ada, _bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
    let sender = key.as_agent(&ada).without_retries();
    post(&sender, "before").await?;
    post(&sender, "before, too").await?;
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
    for text in ["after", "after, too", "the last"] {
        post(&sender, text).await?;
    }
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
    // Also the first post gets a number that was not assigned before.
    post(&sender, "since").await?;
    let head = number(&stack, HEAD).await?;
    ensure!(head == 1004, "the next number is {head}: 3 at the snapshot, the margin, and one more post");
    for process in processes(&stack) {
        process.wait_ready().await?;
    }
    ensure!(number(&stack, HEAD).await? == head, "one process recovers");
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
