//! The write of one explicit read. Marking a message as read and settling its delivery both call it.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, MessageId, WorkspaceScope};

use crate::{StoreError, StoreResult, connections::Transaction, messages::days::day_of_id};

/// Writes the receipt once and moves the member's last-read pointer forward. Returns the time of the first
/// read, and true if this is the first read.
pub(crate) async fn record_read(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    message: MessageId,
    agent: AgentId,
) -> StoreResult<(DateTime<Utc>, bool)> {
    let doing = "recording a read";
    let workspace = scope.workspace_id();
    let first: Option<DateTime<Utc>> = sqlx::query_scalar(
        "INSERT INTO message_reads (workspace_id, message_id, agent_id, read_at) VALUES ($1, $2, $3, relay_now())
         ON CONFLICT DO NOTHING RETURNING read_at",
    )
    .bind(workspace)
    .bind(message)
    .bind(agent)
    .fetch_optional(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    if let Some(read_at) = first {
        // Forward only: an agent may mark an older message after a newer one.
        sqlx::query(
            "UPDATE channel_members cm SET last_read_id = $2, last_read_at = relay_now()
               FROM messages m
              WHERE m.workspace_id = $1 AND m.message_id = $2 AND m.created_on = $3
                AND cm.workspace_id = $1 AND cm.channel_id = m.channel_id AND cm.agent_id = $4
                AND coalesce(cm.last_read_id, -1) < $2",
        )
        .bind(workspace)
        .bind(message)
        .bind(day_of_id(message.get()))
        .bind(agent)
        .execute(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        return Ok((read_at, true));
    }
    // The conflicting receipt is there: retention removes it only together with its message.
    let read_at = sqlx::query_scalar(
        "SELECT read_at FROM message_reads WHERE workspace_id = $1 AND message_id = $2 AND agent_id = $3",
    )
    .bind(workspace)
    .bind(message)
    .bind(agent)
    .fetch_one(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    Ok((read_at, false))
}
