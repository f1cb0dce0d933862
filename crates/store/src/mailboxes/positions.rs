//! Positions of mailboxes as readers of a workspace list them.

use relay_domain::{AgentId, WorkspaceScope, mailboxes::Mailbox};

use crate::{Store, StoreError, StoreResult};

impl Store {
    /// Lists up to `limit` mailboxes of agents that are not deleted, in the order of their ids, behind `after` and
    /// limited to the agents of `only` if given.
    pub async fn mailboxes(
        &self,
        scope: WorkspaceScope,
        only: Option<&[AgentId]>,
        after: Option<AgentId>,
        limit: i64,
    ) -> StoreResult<Vec<Mailbox>> {
        sqlx::query_as(
            "SELECT a.agent_id, a.name, h.next_seq - 1 AS last_seq, c.ack_floor, c.settled_floor
               FROM agents a
               JOIN mailbox_heads h ON h.workspace_id = a.workspace_id AND h.agent_id = a.agent_id
               JOIN mailbox_cursors c ON c.workspace_id = a.workspace_id AND c.agent_id = a.agent_id
              WHERE a.workspace_id = $1 AND a.agent_id > $2 AND a.deleted_at IS NULL
                AND ($3::bigint[] IS NULL OR a.agent_id = ANY ($3))
              ORDER BY a.agent_id LIMIT $4",
        )
        .bind(scope.workspace_id())
        .bind(after.unwrap_or(AgentId::new(0)))
        .bind(only)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing mailboxes"))
    }
}
