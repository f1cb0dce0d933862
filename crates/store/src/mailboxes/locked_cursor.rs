//! Lock on the cursor of one mailbox, taken by claims and settlements before they read or move its floors.

use relay_domain::{AgentId, WorkspaceScope, mailboxes::stream::Seq};
use sqlx::FromRow;

use crate::{StoreError, StoreResult, connections::Transaction, decode::decode_row};

/// Cursor of a mailbox whose row is locked until the transaction ends.
#[derive(Debug, Clone, Copy, FromRow)]
pub(crate) struct LockedCursor {
    pub(crate) sent_seq: Seq,
    pub(crate) ack_floor: Seq,
    pub(crate) settled_floor: Seq,
}

/// Locks a mailbox's cursor row, which it creates if necessary. The second read waits for a concurrent insert.
pub(crate) async fn lock_cursor(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    agent: AgentId,
) -> StoreResult<LockedCursor> {
    let doing = "locking a mailbox cursor";
    let select = "SELECT sent_seq, ack_floor, settled_floor FROM mailbox_cursors
                   WHERE workspace_id = $1 AND agent_id = $2 FOR UPDATE";
    let workspace = scope.workspace_id();
    let found = sqlx::query(select)
        .bind(workspace)
        .bind(agent)
        .fetch_optional(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    if let Some(row) = found {
        return decode_row("mailbox_cursors", &row);
    }
    sqlx::query("INSERT INTO mailbox_cursors (workspace_id, agent_id) VALUES ($1, $2) ON CONFLICT DO NOTHING")
        .bind(workspace)
        .bind(agent)
        .execute(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let row = sqlx::query(select)
        .bind(workspace)
        .bind(agent)
        .fetch_one(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    decode_row("mailbox_cursors", &row)
}
