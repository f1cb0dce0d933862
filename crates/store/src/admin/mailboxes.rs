//! Mailboxes and dead letters as operators see them.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, NodeId, ProviderName, SourceId, WorkspaceScope,
    mailboxes::{delivery::Settlement, stream::Seq},
};

use crate::{
    Store, StoreError, StoreResult,
    codes::{DEAD_LETTERED, MESSAGE_SOURCE},
    decode::decode_rows,
};

/// Floors and placement of a mailbox.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct MailboxDetails {
    pub agent_id: AgentId,
    pub name: String,
    /// Node that receives its deliveries.
    pub node_id: NodeId,
    /// Provider to which the agent is pinned.
    pub provider: Option<ProviderName>,
    /// Whether that provider, or any of the node without a pin, is connected.
    pub connected: bool,
    /// Seq of the next delivery.
    pub next_seq: Seq,
    /// Highest seq written to a socket.
    pub sent_seq: Seq,
    pub ack_floor: Seq,
    pub settled_floor: Seq,
    /// Seqs above the settled floor without a row, at most 20: there should be none.
    pub holes: Vec<Seq>,
}

/// Row that was settled or deferred apart from the floors.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct MailboxSettlement {
    pub seq: Seq,
    /// Serialized as its code.
    #[serde(serialize_with = "serialize_code")]
    pub state: Settlement,
    pub reason: Option<String>,
    /// Error reported by the recipient.
    pub error: Option<String>,
    pub at: DateTime<Utc>,
}

/// Delivery row.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct MailboxEntry {
    pub seq: Seq,
    /// Delivered message or invocation result.
    pub source_id: SourceId,
    /// Number of redrives.
    pub redrive_no: i16,
    pub created_at: DateTime<Utc>,
    /// Time at which it becomes a dead letter unless it is settled.
    pub expires_at: DateTime<Utc>,
    /// First 60 characters of the text of a message.
    pub beginning: Option<String>,
}

#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct DeadLetterSummary {
    /// Name of the recipient.
    pub agent: String,
    pub agent_id: AgentId,
    pub seq: Seq,
    /// Delivered message or invocation result.
    pub source_id: SourceId,
    /// Number of earlier redrives.
    pub redrive_no: i16,
    /// Reason of the dead-lettering.
    pub reason: Option<String>,
    /// Last error reported by the recipient.
    pub error: Option<String>,
    /// Time of the dead-lettering.
    pub at: DateTime<Utc>,
    /// Seq of the delivery that replaced it, if it was redriven.
    pub redriven_seq: Option<Seq>,
    pub redriven_at: Option<DateTime<Utc>>,
}

fn serialize_code<S: serde::Serializer>(state: &Settlement, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_i16(state.code())
}

impl Store {
    /// Returns the mailbox of an agent that is not deleted, by its name or id. A name wins over an equal id.
    pub async fn mailbox_details(
        &self,
        scope: WorkspaceScope,
        name_or_id: &str,
    ) -> StoreResult<Option<MailboxDetails>> {
        // Holes are looked for in 2000 seqs only: a long backlog would otherwise be read as a whole.
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
        .bind(scope.workspace_id())
        .bind(name_or_id)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a mailbox"))
    }

    /// Returns the newest settlements of a mailbox, newest first.
    pub async fn mailbox_settlements(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        limit: i64,
    ) -> StoreResult<Vec<MailboxSettlement>> {
        let rows = sqlx::query(
            "SELECT agent_id, seq, state, reason, error, at FROM delivery_exceptions
              WHERE workspace_id = $1 AND agent_id = $2 ORDER BY seq DESC LIMIT $3",
        )
        .bind(scope.workspace_id())
        .bind(agent)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the settlements of a mailbox"))?;
        decode_rows("delivery_exceptions", &rows)
    }

    /// Returns the newest deliveries of a mailbox, newest first.
    pub async fn mailbox_entries(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        limit: i64,
    ) -> StoreResult<Vec<MailboxEntry>> {
        sqlx::query_as(formatcp!(
            "SELECT d.seq, d.source_id, d.redrive_no, d.created_at, d.expires_at,
                    (SELECT left(m.text, 60) FROM messages m
                      WHERE m.workspace_id = d.workspace_id AND m.message_id = d.source_id AND d.source_kind = {MESSAGE_SOURCE}) AS beginning
               FROM deliveries d WHERE d.workspace_id = $1 AND d.agent_id = $2 ORDER BY d.seq DESC LIMIT $3"
        ))
        .bind(scope.workspace_id())
        .bind(agent)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the deliveries of a mailbox"))
    }

    /// Returns the dead letters of a workspace, or of one agent by name, newest first. Excludes purged ones and those
    /// whose delivery retention has dropped.
    pub async fn dead_letter_rows(
        &self,
        scope: WorkspaceScope,
        agent: Option<&str>,
        limit: i64,
    ) -> StoreResult<Vec<DeadLetterSummary>> {
        sqlx::query_as(formatcp!(
            "SELECT a.name AS agent, x.agent_id, x.seq, d.source_id, d.redrive_no, x.reason, x.error, x.at,
                    x.redriven_seq, x.redriven_at
               FROM delivery_exceptions x
               JOIN agents a USING (workspace_id, agent_id)
               JOIN deliveries d ON d.workspace_id = x.workspace_id AND d.agent_id = x.agent_id AND d.seq = x.seq
              WHERE x.workspace_id = $1 AND x.state = {DEAD_LETTERED} AND x.purged_at IS NULL AND ($2::text IS NULL OR a.name = $2)
              ORDER BY x.at DESC, x.seq DESC LIMIT $3"
        ))
        .bind(scope.workspace_id())
        .bind(agent)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing dead letters"))
    }
}
