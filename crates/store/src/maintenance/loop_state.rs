//! State of a worker loop between steps, as JSON: mostly the position of a scan.
//!
//! Locking the state locks its row, so that one worker runs the step and others skip it. Workers of two releases run
//! side by side during an upgrade: the type of a state keeps the form that it has been stored in. Ids are stored as
//! numbers.

use relay_domain::{AgentId, WorkspaceId, ids::as_number};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sqlx::{FromRow, PgExecutor, types::Json};

use crate::{StoreError, StoreResult, connections::DatabaseSession, decode::decode_row};

/// Result of locking the state of a loop.
#[derive(Debug)]
pub(crate) enum LoopState<T> {
    /// Another worker holds the lock.
    Busy,
    /// Locked until the transaction ends. `None` on the first run.
    Locked(Option<T>),
}

/// Last agent that a scan of all agents or of their mailboxes has read.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct AgentPosition {
    #[serde(with = "as_number")]
    pub(crate) workspace_id: WorkspaceId,
    #[serde(with = "as_number")]
    pub(crate) agent_id: AgentId,
}

impl AgentPosition {
    pub(crate) const START: Self = Self { workspace_id: WorkspaceId::new(0), agent_id: AgentId::new(0) };
}

#[derive(FromRow)]
struct StateRow<T: DeserializeOwned + 'static> {
    value: Json<Option<T>>,
}

const LOCKING: &str = "locking the state of a loop";

/// Locks the state of `name` for the rest of the transaction.
pub(crate) async fn lock_state<T: DeserializeOwned + 'static>(
    tx: &mut DatabaseSession,
    name: &str,
) -> StoreResult<LoopState<T>> {
    if let Some(state) = lock_row(tx, name).await? {
        return Ok(state);
    }
    // Inserted on the first run, because only an existing row can be locked.
    sqlx::query(
        "INSERT INTO loop_state (loop, value, updated_at) VALUES ($1, 'null', relay_now()) ON CONFLICT DO NOTHING",
    )
    .bind(name)
    .execute(&mut *tx)
    .await
    .map_err(StoreError::from_sqlx(LOCKING))?;
    // The row exists now, so if none is returned, another worker holds its lock.
    Ok(lock_row(tx, name).await?.unwrap_or(LoopState::Busy))
}

/// Locks the state; `None` if there is no row, or another worker holds the lock.
async fn lock_row<T: DeserializeOwned + 'static>(
    tx: &mut DatabaseSession,
    name: &str,
) -> StoreResult<Option<LoopState<T>>> {
    // As `name`, so that an error about the state says which loop it belongs to (`decode_row`).
    let row = sqlx::query("SELECT loop AS name, value FROM loop_state WHERE loop = $1 FOR UPDATE SKIP LOCKED")
        .bind(name)
        .fetch_optional(tx)
        .await
        .map_err(StoreError::from_sqlx(LOCKING))?;
    let Some(row) = row else { return Ok(None) };
    let StateRow { value } = decode_row("loop_state", &row)?;
    Ok(Some(LoopState::Locked(value.0)))
}

/// Reads the state of `name` without locking it; `None` before the first run.
pub(crate) async fn read_state<T: DeserializeOwned + 'static>(
    executor: impl PgExecutor<'_>,
    name: &str,
) -> StoreResult<Option<T>> {
    let row = sqlx::query("SELECT loop AS name, value FROM loop_state WHERE loop = $1")
        .bind(name)
        .fetch_optional(executor)
        .await
        .map_err(StoreError::from_sqlx("reading the state of a loop"))?;
    let Some(row) = row else { return Ok(None) };
    let StateRow { value } = decode_row("loop_state", &row)?;
    Ok(value.0)
}

/// Stores the state of `name`, which the caller has locked in the same transaction. Nothing is written if it is stored
/// already, as in the rounds of an idle installation.
pub(crate) async fn save_state<T: Serialize + Sync>(
    tx: &mut DatabaseSession,
    name: &str,
    value: &T,
) -> StoreResult<()> {
    sqlx::query(
        "UPDATE loop_state SET value = $2, updated_at = relay_now() WHERE loop = $1 AND value IS DISTINCT FROM $2",
    )
    .bind(name)
    .bind(Json(value))
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("storing the state of a loop"))?;
    Ok(())
}
