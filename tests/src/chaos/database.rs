//! Direct access to the database, to verify the engine's state.

use std::{collections::HashMap, time::Duration};

use anyhow::Result;
use relay_testkit::wait;
use sqlx::{PgPool, Postgres, Transaction, postgres::PgPoolOptions};

/// Connection to the engine's database.
#[derive(Clone, Debug)]
pub struct Database {
    pool: PgPool,
}

/// Position of a mailbox in the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MailboxPosition {
    /// Highest assigned seq.
    pub head: u64,
    /// Highest seq that was sent.
    pub sent: u64,
    /// Ack floor of the socket.
    pub ack_floor: u64,
    /// Settled floor.
    pub settled_floor: u64,
}

impl Database {
    /// Creates a pool that connects on first use.
    pub fn connect(url: &str) -> Result<Self> {
        Ok(Self { pool: PgPoolOptions::new().max_connections(2).connect_lazy(url)? })
    }

    /// Returns the positions of all mailboxes by agent name, which is unique because each test has its own database.
    pub async fn mailbox_positions(&self) -> Result<HashMap<String, MailboxPosition>> {
        let rows: Vec<(String, i64, i64, i64, i64)> = sqlx::query_as(
            "SELECT a.name, h.next_seq - 1, c.sent_seq, c.ack_floor, c.settled_floor
               FROM agents a JOIN mailbox_heads h USING (workspace_id, agent_id)
               JOIN mailbox_cursors c USING (workspace_id, agent_id) WHERE a.deleted_at IS NULL",
        )
        .fetch_all(&self.pool)
        .await?;
        let stand = |(agent, head, sent, ack_floor, settled_floor)| {
            let [head, sent, ack_floor, settled_floor] =
                [head, sent, ack_floor, settled_floor].map(|seq| u64::try_from(seq).unwrap_or_default());
            (agent, MailboxPosition { head, sent, ack_floor, settled_floor })
        };
        Ok(rows.into_iter().map(stand).collect())
    }

    /// Returns the position of one mailbox.
    pub async fn mailbox_position(&self, agent: &str) -> Result<MailboxPosition> {
        let stands = self.mailbox_positions().await?;
        stands.get(agent).copied().ok_or_else(|| anyhow::anyhow!("no mailbox of {agent}"))
    }

    /// Returns the ids of all messages by text.
    pub async fn messages(&self) -> Result<HashMap<String, Vec<String>>> {
        let rows: Vec<(String, i64)> =
            sqlx::query_as("SELECT text, message_id FROM messages").fetch_all(&self.pool).await?;
        let mut messages: HashMap<String, Vec<String>> = HashMap::new();
        for (text, id) in rows {
            messages.entry(text).or_default().push(id.to_string());
        }
        Ok(messages)
    }

    /// Waits until this standby has everything that `primary` has committed by now.
    pub async fn wait_replicated(&self, primary: &Self, within: Duration) -> Result<()> {
        let end: String =
            sqlx::query_scalar("SELECT pg_current_wal_flush_lsn()::text").fetch_one(&primary.pool).await?;
        wait::until_ok("the standby to have everything", within, || async {
            let has: bool = sqlx::query_scalar("SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn")
                .bind(&end)
                .fetch_one(&self.pool)
                .await?;
            anyhow::ensure!(has, "not at {end} yet");
            anyhow::Ok(())
        })
        .await
    }

    /// Returns the number of unpublished commit batches.
    pub async fn unpublished(&self) -> Result<i64> {
        Ok(sqlx::query_scalar("SELECT count(*) FROM outbox WHERE published_at IS NULL").fetch_one(&self.pool).await?)
    }

    /// Lets an agent's rows with these seqs expire in a second. Not in the past, which the expiry loop has already
    /// scanned.
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

    /// Returns the number of deliveries whose life has ended.
    pub async fn expired_count(&self) -> Result<i64> {
        let expired = "SELECT count(*) FROM deliveries WHERE expires_at <= now()";
        Ok(sqlx::query_scalar(expired).fetch_one(&self.pool).await?)
    }

    /// Returns whether a node's provider is recorded as connected.
    pub async fn is_connected(&self, node_id: &str) -> Result<bool> {
        let connected = "SELECT EXISTS (SELECT FROM providers WHERE node_id = $1 AND gateway_id IS NOT NULL)";
        Ok(sqlx::query_scalar(connected).bind(node_id).fetch_one(&self.pool).await?)
    }

    /// Runs a statement in a transaction that stays open until it is rolled back: `LOCK TABLE` simulates a stalled
    /// storage.
    pub async fn lock(&self, statement: &'static str) -> Result<Transaction<'static, Postgres>> {
        let mut held = self.pool.begin().await?;
        sqlx::query(statement).execute(&mut *held).await?;
        Ok(held)
    }

    /// Returns whether a statement that begins like this waits for a lock.
    pub async fn waits_for_lock(&self, statement: &str) -> Result<bool> {
        let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
                        AND wait_event_type = 'Lock' AND starts_with(query, $1))";
        Ok(sqlx::query_scalar(waits).bind(statement).fetch_one(&self.pool).await?)
    }

    /// Returns the start of the registration that waits for the lock on the table of providers, if any.
    pub async fn registration_waits_since(&self) -> Result<Option<String>> {
        let waiting = "SELECT min(query_start)::text FROM pg_stat_activity
                        WHERE datname = current_database() AND wait_event_type = 'Lock'
                          AND query LIKE 'WITH locked_nodes AS MATERIALIZED %INSERT INTO providers %'";
        Ok(sqlx::query_scalar(waiting).fetch_one(&self.pool).await?)
    }

    pub async fn execute(&self, statement: &'static str) -> Result<u64> {
        Ok(sqlx::query(statement).execute(&self.pool).await?.rows_affected())
    }
}
