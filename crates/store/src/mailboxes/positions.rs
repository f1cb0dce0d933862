//! Positions of mailboxes as readers of a workspace list them.

use relay_domain::{AgentId, WorkspaceScope};
use sqlx::FromRow;

use crate::{Store, StoreError, StoreResult};

/// Position of one agent's mailbox.
#[derive(Debug, Clone, PartialEq, Eq, FromRow)]
pub struct MailboxRow {
    pub agent_id: AgentId,
    #[sqlx(rename = "name")]
    pub agent_name: String,
    /// Seq of the newest delivery; 0 if there is none.
    pub last_seq: i64,
    pub ack_floor: i64,
    pub settled_floor: i64,
}

impl Store {
    /// Lists up to `limit` mailboxes of agents that are not deleted, in the order of their ids, behind `after` and limited
    /// to the agents of `only` if given.
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
