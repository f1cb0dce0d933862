//! Where mailboxes stand, for those who look at a workspace.

use relay_domain::{AgentId, WorkspaceScope};
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{Store, StoreError, StoreResult};

/// Where one agent's mailbox stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MailboxRow {
    /// The agent.
    pub agent_id: AgentId,
    /// Its name.
    pub agent_name: String,
    /// The seq of its newest delivery; 0 without any.
    pub last_seq: i64,
    /// Acknowledged over a socket up to here.
    pub ack_floor: i64,
    /// Settled by whatever means up to here.
    pub settled_floor: i64,
}

impl FromRow<'_, PgRow> for MailboxRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            agent_id: AgentId::new(row.try_get("agent_id")?),
            agent_name: row.try_get("name")?,
            last_seq: row.try_get("last_seq")?,
            ack_floor: row.try_get("ack_floor")?,
            settled_floor: row.try_get("settled_floor")?,
        })
    }
}

impl Store {
    /// Up to `limit` mailboxes of living agents, in the order of their ids, behind `after`. `only` names the
    /// agents that are asked for; `None` for all.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn mailboxes(
        &self,
        scope: WorkspaceScope,
        only: Option<&[AgentId]>,
        after: Option<AgentId>,
        limit: i64,
    ) -> StoreResult<Vec<MailboxRow>> {
        let only: Option<Vec<i64>> = only.map(|agents| agents.iter().map(|agent| agent.get()).collect());
        sqlx::query_as(
            "SELECT a.agent_id, a.name, h.next_seq - 1 AS last_seq, c.ack_floor, c.settled_floor
               FROM agents a
               JOIN mailbox_heads h ON h.workspace_id = a.workspace_id AND h.agent_id = a.agent_id
               JOIN mailbox_cursors c ON c.workspace_id = a.workspace_id AND c.agent_id = a.agent_id
              WHERE a.workspace_id = $1 AND a.agent_id > $2 AND a.deleted_at IS NULL
                AND ($3::bigint[] IS NULL OR a.agent_id = ANY ($3))
              ORDER BY a.agent_id LIMIT $4",
        )
        .bind(scope.workspace_id().get())
        .bind(after.map_or(0, AgentId::get))
        .bind(only)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing mailboxes"))
    }
}
