//! Fan-outs that are observed and stopped between two chunks.

use anyhow::Result;
use sqlx::{PgPool, Postgres, Transaction};

use super::scene::Scene;

/// Recipients of a chunk.
pub const CHUNK: i64 = 512;

/// Members of a channel, with the ids from 1 on.
const CROWD: [&str; 4] = [
    "INSERT INTO agents (workspace_id, agent_id, name, status, node_id, created_at, last_seen_at)
     SELECT w.workspace_id, n, 'crowd-' || n, 'offline', 'node_direct_' || n, now(), now()
       FROM workspaces w, generate_series(1, $2::bigint) AS n WHERE $1::text IS NOT NULL",
    "INSERT INTO mailbox_heads (workspace_id, agent_id, next_seq)
     SELECT workspace_id, agent_id, 1 FROM agents WHERE agent_id <= $2::bigint AND $1::text IS NOT NULL",
    "INSERT INTO mailbox_cursors (workspace_id, agent_id, sent_seq, ack_floor, settled_floor)
     SELECT workspace_id, agent_id, 0, 0, 0 FROM agents WHERE agent_id <= $2::bigint AND $1::text IS NOT NULL",
    "INSERT INTO channel_members (workspace_id, channel_id, agent_id, joined_at)
     SELECT c.workspace_id, c.channel_id, n, now() FROM channels c, generate_series(1, $2::bigint) AS n
      WHERE c.name = $1",
];

/// Adds agents to a channel of the only workspace, before the first post into it.
pub async fn create_crowd(scene: &Scene, channel: &str, agents: i64) -> Result<()> {
    let pool = PgPool::connect(scene.stack.database_url()).await?;
    for statement in CROWD {
        sqlx::query(statement).bind(channel).bind(agents).execute(&pool).await?;
    }
    Ok(())
}

/// Locks the mailbox of the first recipient of a chunk, counted from 0, which cannot be written until the rollback.
pub async fn hold_chunk(scene: &Scene, chunk: i64) -> Result<Transaction<'static, Postgres>> {
    let mut held = PgPool::connect(scene.stack.database_url()).await?.begin().await?;
    sqlx::query("SELECT FROM mailbox_heads WHERE agent_id = $1 FOR UPDATE")
        .bind(chunk * CHUNK + 1)
        .execute(&mut *held)
        .await?;
    Ok(held)
}

/// Returns the number of recipients that the chunks of the only fan-out have dealt with; `None` without an open one.
pub async fn progress(scene: &Scene) -> Result<Option<i64>> {
    let pool = PgPool::connect(scene.stack.database_url()).await?;
    Ok(sqlx::query_scalar("SELECT written::bigint FROM fanouts").fetch_optional(&pool).await?)
}

/// Returns the mailboxes that have the message with this text as a delivery, all of whose numbers are written, and the
/// number of its deliveries.
pub async fn recipients_of(scene: &Scene, text: &str) -> Result<(i64, i64)> {
    let pool = PgPool::connect(scene.stack.database_url()).await?;
    let counts = sqlx::query_as(
        "SELECT count(DISTINCT d.agent_id) FILTER (
                    WHERE h.next_seq - 1 = (SELECT count(*) FROM deliveries o WHERE o.agent_id = d.agent_id)),
                count(*)
           FROM messages m
           JOIN deliveries d ON d.workspace_id = m.workspace_id AND d.source_id = m.message_id
           JOIN mailbox_heads h ON h.workspace_id = d.workspace_id AND h.agent_id = d.agent_id
          WHERE m.text = $1",
    );
    Ok(counts.bind(text).fetch_one(&pool).await?)
}
