//! Large logs: mailboxes whose deliveries are written directly into Postgres and JetStream.

use anyhow::{Context as _, Result};
use relay_testkit::wait;
use sqlx::PgPool;

use super::scene::Scene;

/// Mailboxes in which everything is acknowledged.
const MAILBOXES: [&str; 4] = [
    "INSERT INTO agents (workspace_id, agent_id, name, status, node_id, created_at, last_seen_at)
     SELECT w.workspace_id, n, 'bulk-' || n, 'offline', 'node_direct_' || n, now(), now()
       FROM workspaces w, generate_series(1, $1::bigint) AS n WHERE $2::bigint > 0",
    "INSERT INTO mailbox_heads (workspace_id, agent_id, next_seq)
     SELECT w.workspace_id, n, $2::bigint + 1 FROM workspaces w, generate_series(1, $1::bigint) AS n",
    "INSERT INTO mailbox_cursors (workspace_id, agent_id, sent_seq, ack_floor, settled_floor)
     SELECT w.workspace_id, n, $2::bigint, $2::bigint, $2::bigint
       FROM workspaces w, generate_series(1, $1::bigint) AS n",
    "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, node_id, created_at, expires_at)
     SELECT w.workspace_id, n, seq, (now() AT TIME ZONE 'UTC')::date, n, 'node_direct_' || n, now(),
            now() + interval '1 hour'
       FROM workspaces w, generate_series(1, $1::bigint) AS n, generate_series(1, $2::bigint) AS seq",
];

/// Entries that wait for their confirmation together: the server drops those beyond its queue of 10 000.
const UNCONFIRMED: u32 = 2000;

/// Adds `mailboxes` mailboxes with `each` deliveries to the only workspace, and as many entries to the delivery log.
/// Returns once `replica` has them and the engine has recorded the end of the log.
pub async fn load(scene: &Scene, replica: &str, mailboxes: u32, each: u32) -> Result<()> {
    let pool = PgPool::connect(scene.stack.database_url()).await?;
    for statement in MAILBOXES {
        sqlx::query(statement).bind(i64::from(mailboxes)).bind(i64::from(each)).execute(&pool).await?;
    }
    let client = async_nats::jetstream::new(async_nats::connect(scene.stack.nats_url()).await?);
    // A frame of a short message has about this size.
    let frame = vec![b' '; 600];
    for _ in 0..each {
        for first in (1..=mailboxes).step_by(UNCONFIRMED as usize) {
            let mut stored = Vec::new();
            for mailbox in first..(first + UNCONFIRMED).min(mailboxes + 1) {
                stored.push(client.publish(format!("d.0.0.{mailbox}"), frame.clone().into()).await?);
            }
            for stored in stored {
                stored.await?;
            }
        }
    }
    let entries = i64::from(mailboxes) * i64::from(each);
    let replica = PgPool::connect(replica).await?;
    wait::until_ok("the end of the log to be replicated", std::time::Duration::from_secs(120), || async {
        let position: Option<i64> =
            sqlx::query_scalar("SELECT (log_marks -> 'deliveries' ->> 'position')::bigint FROM recovery_state")
                .fetch_one(&replica)
                .await?;
        let position = position.context("no position")?;
        anyhow::ensure!(position >= entries, "{position} of {entries}");
        anyhow::Ok(())
    })
    .await
}
