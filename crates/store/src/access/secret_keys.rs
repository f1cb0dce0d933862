//! Encryption keys that the engine generated because none was configured.

use crate::{
    Store, StoreError, StoreResult,
    decode::{decode_row, decode_rows},
};

/// Key of 256 bits with its id.
#[derive(sqlx::FromRow)]
pub struct SecretKeyRow {
    pub key_id: String,
    pub key: [u8; 32],
}

impl Store {
    /// Returns the generated keys, oldest first, at most 100.
    pub async fn secret_keys(&self) -> StoreResult<Vec<SecretKeyRow>> {
        let rows = sqlx::query("SELECT key_id, key FROM secret_keys ORDER BY created_at, key_id LIMIT 100")
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading generated keys"))?;
        decode_rows("secret_keys", &rows)
    }

    /// Stores a key unless one with this id exists, and returns the stored one, so that processes that start together
    /// agree on one key.
    pub async fn insert_secret_key(&self, key_id: &str, fresh: &[u8; 32]) -> StoreResult<SecretKeyRow> {
        let doing = "storing a generated key";
        // A second statement reads the row: if another process was first, DO NOTHING waits for its commit and returns
        // no row.
        sqlx::query("INSERT INTO secret_keys (key_id, key) VALUES ($1, $2) ON CONFLICT (key_id) DO NOTHING")
            .bind(key_id)
            .bind(&fresh[..])
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let row = sqlx::query("SELECT key_id, key FROM secret_keys WHERE key_id = $1")
            .bind(key_id)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        decode_row("secret_keys", &row)
    }
}
