//! State of a worker loop between steps, as JSON: mostly the position of a scan.
//!
//! Reading the state locks its row, so that one worker runs the step and others skip it.

use serde::{Serialize, de::DeserializeOwned};
use sqlx::PgConnection;

use crate::{StoreError, StoreResult};

/// Result of locking the state of a loop.
#[derive(Debug)]
pub(crate) enum LoopState<T> {
    /// Another worker holds the lock.
    Busy,
    /// Locked until the transaction ends. `None` on the first run.
    Locked(Option<T>),
}

/// Locks the state of `name` for the rest of the transaction.
pub(crate) async fn lock_state<T: DeserializeOwned>(tx: &mut PgConnection, name: &str) -> StoreResult<LoopState<T>> {
    let doing = "locking the state of a loop";
    // Inserted on the first run, because only an existing row can be locked.
    sqlx::query("INSERT INTO loop_state (loop, value, updated_at) VALUES ($1, 'null', now()) ON CONFLICT DO NOTHING")
        .bind(name)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let value: Option<serde_json::Value> =
        sqlx::query_scalar("SELECT value FROM loop_state WHERE loop = $1 FOR UPDATE SKIP LOCKED")
            .bind(name)
            .fetch_optional(tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
    Ok(match value {
        None => LoopState::Busy,
        // A value of another release, which may run beside this one, does not decode: the loop starts over.
        Some(value) => LoopState::Locked(serde_json::from_value(value).unwrap_or(None)),
    })
}

/// Stores the state of `name`, which the caller has locked in the same transaction.
pub(crate) async fn save_state<T: Serialize + Sync>(tx: &mut PgConnection, name: &str, value: &T) -> StoreResult<()> {
    sqlx::query("UPDATE loop_state SET value = $2, updated_at = now() WHERE loop = $1")
        .bind(name)
        .bind(sqlx::types::Json(value))
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("storing the state of a loop"))?;
    Ok(())
}
