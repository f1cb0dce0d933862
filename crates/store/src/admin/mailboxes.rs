//! The inside of a mailbox, and dead letters.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult};

/// Where a mailbox stands.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct MailboxInside {
    /// The agent.
    pub agent_id: i64,
    /// Its name.
    pub name: String,
    /// Where its deliveries go.
    pub node_id: String,
    /// The process there, if one has claimed it.
    pub provider: Option<String>,
    /// Whether that process is connected.
    pub connected: bool,
    /// The next seq to be given.
    pub next_seq: i64,
    /// Highest seq written to a socket.
    pub sent_seq: i64,
    /// Acknowledged over a socket up to here.
    pub ack_floor: i64,
    /// Settled by any means up to here.
    pub settled_floor: i64,
    /// Seqs above the settled floor that have no row: there should be none.
    pub holes: Vec<i64>,
}

/// A row that was settled or parked apart from the floors.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct MailboxException {
    /// Its seq.
    pub seq: i64,
    /// 1 acked by REST, 2 failed, 3 deferred, 4 dead-lettered.
    pub state: i16,
    /// Why.
    pub reason: Option<String>,
    /// What the recipient said.
    pub error: Option<String>,
    /// Since when.
    pub at: DateTime<Utc>,
}

/// One of the newest rows.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct MailboxFrame {
    /// Its seq.
    pub seq: i64,
    /// The message or result that it delivers.
    pub source_id: i64,
    /// How often it was redriven.
    pub redrive_no: i16,
    /// When it was written.
    pub created_at: DateTime<Utc>,
    /// When it becomes a dead letter unless it is settled.
    pub expires_at: DateTime<Utc>,
    /// The first characters of the text, of a message.
    pub beginning: Option<String>,
}

/// A dead letter.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct DeadLetterRow {
    /// Whose it was, by name.
    pub agent: String,
    /// The same by id.
    pub agent_id: i64,
    /// Its seq.
    pub seq: i64,
    /// The message or result that it delivered.
    pub source_id: i64,
    /// How often it was redriven before.
    pub redrive_no: i16,
    /// Why it died.
    pub reason: Option<String>,
    /// What the recipient said last.
    pub error: Option<String>,
    /// When it died.
    pub at: DateTime<Utc>,
    /// The seq of the delivery that took its place, if it was redriven.
    pub redriven_seq: Option<i64>,
    /// When it was redriven.
    pub redriven_at: Option<DateTime<Utc>>,
}

impl Store {
    /// Where the mailbox of a living agent stands, by its name or id.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn mailbox_inside(&self, scope: WorkspaceScope, name_or_id: &str) -> StoreResult<Option<MailboxInside>> {
        sqlx::query_as(
            "SELECT a.agent_id, a.name, a.node_id, a.provider,
                    EXISTS (SELECT FROM providers p WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id
                             AND (a.provider IS NULL OR p.provider = a.provider) AND p.gateway_id IS NOT NULL) AS connected,
                    coalesce(h.next_seq, 1) AS next_seq, coalesce(c.sent_seq, 0) AS sent_seq,
                    coalesce(c.ack_floor, 0) AS ack_floor, coalesce(c.settled_floor, 0) AS settled_floor,
                    ARRAY(
                        SELECT n FROM generate_series(coalesce(c.settled_floor, 0) + 1,
                                                      least(h.next_seq - 1, coalesce(c.settled_floor, 0) + 2000)) AS n
                         WHERE NOT EXISTS (SELECT FROM deliveries d WHERE d.workspace_id = a.workspace_id
                                            AND d.agent_id = a.agent_id AND d.seq = n)
                         ORDER BY n LIMIT 20
                    ) AS holes
               FROM agents a
               LEFT JOIN mailbox_heads h USING (workspace_id, agent_id)
               LEFT JOIN mailbox_cursors c USING (workspace_id, agent_id)
              WHERE a.workspace_id = $1 AND a.deleted_at IS NULL AND (a.name = $2 OR a.agent_id::text = $2)
              ORDER BY (a.name = $2) DESC LIMIT 1",
        )
        .bind(scope.workspace_id().get())
        .bind(name_or_id)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a mailbox"))
    }

    /// The newest exceptions of a mailbox, newest first.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn mailbox_exceptions(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        limit: i64,
    ) -> StoreResult<Vec<MailboxException>> {
        sqlx::query_as(
            "SELECT seq, state, reason, error, at FROM delivery_exceptions
              WHERE workspace_id = $1 AND agent_id = $2 ORDER BY seq DESC LIMIT $3",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the exceptions of a mailbox"))
    }

    /// The newest rows of a mailbox, newest first.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn mailbox_frames(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        limit: i64,
    ) -> StoreResult<Vec<MailboxFrame>> {
        sqlx::query_as(
            "SELECT d.seq, d.source_id, d.redrive_no, d.created_at, d.expires_at,
                    (SELECT left(m.text, 60) FROM messages m
                      WHERE m.workspace_id = d.workspace_id AND m.message_id = d.source_id AND d.source_kind = 0) AS beginning
               FROM deliveries d WHERE d.workspace_id = $1 AND d.agent_id = $2 ORDER BY d.seq DESC LIMIT $3",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the rows of a mailbox"))
    }

    /// Dead letters of a workspace whose rows are still kept and that were not purged, newest first; of one agent if its name is given.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn dead_letter_rows(
        &self,
        scope: WorkspaceScope,
        agent: Option<&str>,
        limit: i64,
    ) -> StoreResult<Vec<DeadLetterRow>> {
        sqlx::query_as(
            "SELECT a.name AS agent, x.agent_id, x.seq, d.source_id, d.redrive_no, x.reason, x.error, x.at,
                    x.redriven_seq, x.redriven_at
               FROM delivery_exceptions x
               JOIN agents a USING (workspace_id, agent_id)
               JOIN deliveries d ON d.workspace_id = x.workspace_id AND d.agent_id = x.agent_id AND d.seq = x.seq
              WHERE x.workspace_id = $1 AND x.state = 4 AND x.purged_at IS NULL AND ($2::text IS NULL OR a.name = $2)
              ORDER BY x.at DESC, x.seq DESC LIMIT $3",
        )
        .bind(scope.workspace_id().get())
        .bind(agent)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing dead letters"))
    }
}
