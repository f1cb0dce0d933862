//! What a worker loop remembers between ticks: positions of scans, as JSON.
//!
//! Reading a position locks its row, so that of several workers one goes on and the others skip the tick.

use serde::{Serialize, de::DeserializeOwned};
use sqlx::PgConnection;

use crate::{StoreError, StoreResult};

/// What a loop finds when it asks for its position.
#[derive(Debug)]
pub(crate) enum Remembered<T> {
    /// Another worker is at it.
    Busy,
    /// Ours until the transaction ends. `None` on the first run, or when the value has lost its meaning.
    Ours(Option<T>),
}

/// Takes the position of `name` for the rest of the transaction.
pub(crate) async fn recall<T: DeserializeOwned>(tx: &mut PgConnection, name: &str) -> StoreResult<Remembered<T>> {
    let doing = "recalling a loop's position";
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
        None => Remembered::Busy,
        Some(value) => Remembered::Ours(serde_json::from_value(value).unwrap_or(None)),
    })
}

/// Remembers the position of `name`; the caller has recalled it in the same transaction.
pub(crate) async fn remember<T: Serialize + Sync>(tx: &mut PgConnection, name: &str, value: &T) -> StoreResult<()> {
    sqlx::query("UPDATE loop_state SET value = $2, updated_at = now() WHERE loop = $1")
        .bind(name)
        .bind(sqlx::types::Json(value))
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("remembering a loop's position"))?;
    Ok(())
}
