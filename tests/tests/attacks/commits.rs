//! A tenant whose posts cannot be committed, or repeat one idempotency key: the others' posts do not wait for them, and
//! the repetitions cost no transactions.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::future::{join_all, try_join_all};
use relay_testkit::{client::Api, stack::Stack};
use reqwest::Method;
use serde_json::json;
use sqlx::{Connection as _, PgConnection};

/// Posts with one key at a time; one batch holds them all.
const REPEATS: usize = 200;
/// A batch waits 2 s for a lock; then the others are committed without the workspace that it belongs to.
const OTHERS_WITHIN: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn posts_that_wait_for_a_lock_or_share_a_key_delay_no_other_tenant() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let gateway = stack.gateway(0);
    let (attacker, other) = (room(gateway.url(), "attacker").await?, room(gateway.url(), "other").await?);

    // Opens the conversations, so that the posts below do nothing else.
    for sender in [&attacker, &other] {
        sender.dm("bob", "first").await?.success()?;
    }
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let mut transaction = database.begin().await?;
    let locked = sqlx::query(
        "SELECT 1 FROM mailbox_heads h JOIN agents a USING (workspace_id, agent_id)
           JOIN workspaces w USING (workspace_id)
          WHERE w.name LIKE 'attacker%' AND a.name = 'bob' FOR UPDATE OF h",
    )
    .fetch_all(&mut *transaction)
    .await?;
    ensure!(locked.len() == 1, "{} mailboxes are locked", locked.len());

    let before = gateway.metric("relay_commit_batch_size_count").await?;
    let body = json!({"to": "bob", "text": "again"});
    let repeats = join_all(
        (0..REPEATS)
            .map(|_| attacker.call(Method::POST, "/v1/dm", Some(body.clone()), &[("idempotency-key", "one-key")])),
    );
    let others = async {
        // The lock is held until the other tenant has its answers.
        let answered = tokio::time::timeout(OTHERS_WITHIN, async {
            for nth in 0..5 {
                other.dm("bob", &format!("post {nth}")).await?.success()?;
            }
            anyhow::Ok(())
        });
        answered.await.context("the other tenant's posts wait for the attacker's")??;
        transaction.rollback().await?;
        anyhow::Ok(())
    };
    let (repeats, others) = tokio::join!(repeats, others);
    others?;
    let repeats = repeats.into_iter().collect::<Result<Vec<_>>>()?;
    for reply in &repeats {
        assert_eq!((reply.status, reply.data()["id"].as_str()), (201, repeats[0].data()["id"].as_str()));
    }
    let fresh = repeats.iter().filter(|reply| !reply.headers.contains_key("idempotency-replayed")).count();
    assert_eq!(fresh, 1, "one of them is the post");
    let batches = gateway.metric("relay_commit_batch_size_count").await? - before;
    assert!(batches < 30.0, "{batches} batches for {REPEATS} posts with one key and 5 others");
    Ok(())
}

/// The usual batch costs one statement. Without this test a fact that never holds would only make posts slow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn posts_are_committed_by_one_statement_unless_the_workspace_is_watched() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let gateway = stack.gateway(0);
    let ann = room(gateway.url(), "usual").await?;
    ann.dm("bob", "first").await?.success()?;
    let in_steps = || gateway.metric("relay_commits_in_steps_total");
    let before = in_steps().await?;
    let body = json!({"to": "bob", "text": "keyed"});
    let keyed = || ann.call(Method::POST, "/v1/dm", Some(body.clone()), &[("idempotency-key", "a-key")]);
    ann.dm("bob", "second").await?.success()?;
    let id = keyed().await?.success()?["id"].clone();
    assert_eq!(in_steps().await? - before, 0.0);

    assert_eq!(keyed().await?.success()?["id"], id, "the key is known");
    assert_eq!(in_steps().await? - before, 1.0);
    let mut database = PgConnection::connect(stack.database_url()).await?;
    sqlx::query("UPDATE event_heads SET watched_until = 'infinity'").execute(&mut database).await?;
    ann.dm("bob", "watched").await?.success()?;
    assert_eq!(in_steps().await? - before, 2.0);
    let seqs: Vec<i64> = sqlx::query_scalar("SELECT seq FROM deliveries ORDER BY seq").fetch_all(&mut database).await?;
    assert_eq!(seqs, [1, 2, 3, 4]);
    let unnumbered: i64 = sqlx::query_scalar(
        "SELECT h.next_seq - 1 - coalesce(sum(l.last_seq - l.first_seq + 1), 0)::bigint
           FROM event_heads h JOIN event_log l USING (workspace_id) GROUP BY h.workspace_id, h.next_seq",
    )
    .fetch_one(&mut database)
    .await?;
    assert_eq!(unnumbered, 0, "both ways number events without a gap");
    Ok(())
}

/// Creates a workspace with the agents ann and bob, and returns the client of ann.
async fn room(gateway: &str, name: &str) -> Result<Api> {
    let key = Api::create_workspace(gateway, name).await?.without_retries();
    let agents = try_join_all(["ann", "bob"].map(|agent| key.register_agent(agent))).await?;
    Ok(key.as_agent(&agents[0]))
}
