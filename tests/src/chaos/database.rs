//! What the database holds, read past the engine to judge it.

use std::collections::HashMap;

use anyhow::Result;
use sqlx::{PgPool, Postgres, Transaction, postgres::PgPoolOptions};

/// The engine's database.
#[derive(Clone, Debug)]
pub struct Database {
    pool: PgPool,
}

/// A mailbox as the database has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stand {
    /// The highest seq allotted.
    pub head: u64,
    /// The socket ack floor.
    pub ack_floor: u64,
    /// The settled floor.
    pub settled_floor: u64,
}

impl Database {
    /// Connects on first use.
    pub fn connect(url: &str) -> Result<Self> {
        Ok(Self { pool: PgPoolOptions::new().max_connections(2).connect_lazy(url)? })
    }

    /// Where all mailboxes stand, by agent name. Each test has a database of its own, so names are enough.
    pub async fn stands(&self) -> Result<HashMap<String, Stand>> {
        let rows: Vec<(String, i64, i64, i64)> = sqlx::query_as(
            "SELECT a.name, h.next_seq - 1, c.ack_floor, c.settled_floor
               FROM agents a JOIN mailbox_heads h USING (workspace_id, agent_id)
               JOIN mailbox_cursors c USING (workspace_id, agent_id) WHERE a.deleted_at IS NULL",
        )
        .fetch_all(&self.pool)
        .await?;
        let stand = |row: (String, i64, i64, i64)| {
            let number = |n: i64| u64::try_from(n).unwrap_or_default();
            (row.0, Stand { head: number(row.1), ack_floor: number(row.2), settled_floor: number(row.3) })
        };
        Ok(rows.into_iter().map(stand).collect())
    }

    /// Where one mailbox stands.
    pub async fn stand(&self, agent: &str) -> Result<Stand> {
        let stands = self.stands().await?;
        stands.get(agent).copied().ok_or_else(|| anyhow::anyhow!("no mailbox of {agent}"))
    }

    /// Ids of all messages, by text.
    pub async fn messages(&self) -> Result<HashMap<String, Vec<String>>> {
        let rows: Vec<(String, i64)> =
            sqlx::query_as("SELECT text, message_id FROM messages").fetch_all(&self.pool).await?;
        let mut messages: HashMap<String, Vec<String>> = HashMap::new();
        for (text, id) in rows {
            messages.entry(text).or_default().push(id.to_string());
        }
        Ok(messages)
    }

    /// Commit batches that nobody has published.
    pub async fn unpublished(&self) -> Result<i64> {
        Ok(sqlx::query_scalar("SELECT count(*) FROM outbox WHERE published_at IS NULL").fetch_one(&self.pool).await?)
    }

    /// Lets an agent's rows with these seqs expire in a second. Not in the past: the expiry loop has been there.
    pub async fn expire(&self, agent: &str, seqs: &[i64]) -> Result<u64> {
        let done = sqlx::query(
            "UPDATE deliveries SET expires_at = now() + interval '1 second' WHERE seq = ANY($2)
                AND (workspace_id, agent_id) = (SELECT workspace_id, agent_id FROM agents WHERE name = $1)",
        )
        .bind(agent)
        .bind(seqs)
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected())
    }

    /// Whether a node's provider is recorded as connected.
    pub async fn is_connected(&self, node_id: &str) -> Result<bool> {
        let connected = "SELECT EXISTS (SELECT FROM providers WHERE node_id = $1 AND gateway_id IS NOT NULL)";
        Ok(sqlx::query_scalar(connected).bind(node_id).fetch_one(&self.pool).await?)
    }

    /// Keeps the engine off a table, as a storage that does not answer, until what it returns is rolled back. The statement
    /// is a `LOCK TABLE`.
    pub async fn lock(&self, statement: &'static str) -> Result<Transaction<'static, Postgres>> {
        let mut held = self.pool.begin().await?;
        sqlx::query(statement).execute(&mut *held).await?;
        Ok(held)
    }

    /// When the registration began that waits for the table of providers now, if one does.
    pub async fn registration_waits_since(&self) -> Result<Option<String>> {
        let waiting = "SELECT min(query_start)::text FROM pg_stat_activity
                        WHERE datname = current_database() AND wait_event_type = 'Lock'
                          AND query LIKE 'SELECT p.epoch, p.instance_id, %'";
        Ok(sqlx::query_scalar(waiting).fetch_one(&self.pool).await?)
    }

    /// Runs a statement.
    pub async fn execute(&self, statement: &'static str) -> Result<u64> {
        Ok(sqlx::query(statement).execute(&self.pool).await?.rows_affected())
    }
}
