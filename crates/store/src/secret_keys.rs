//! Keys that the engine made for itself because none was configured.

use crate::{Store, StoreError, StoreResult};

impl Store {
    /// The keys that were made here, oldest first.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn secret_keys(&self) -> StoreResult<Vec<(String, Vec<u8>)>> {
        sqlx::query_as("SELECT key_id, key FROM secret_keys ORDER BY created_at, key_id LIMIT 100")
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading the engine's own keys"))
    }

    /// Keeps a fresh key unless one of that id is there, and returns the one that is: of several processes
    /// that start at once, all get the same.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn keep_secret_key(&self, key_id: &str, fresh: &[u8; 32]) -> StoreResult<Vec<u8>> {
        let doing = "keeping a key of the engine's own";
        sqlx::query("INSERT INTO secret_keys (key_id, key) VALUES ($1, $2) ON CONFLICT (key_id) DO NOTHING")
            .bind(key_id)
            .bind(&fresh[..])
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        sqlx::query_scalar("SELECT key FROM secret_keys WHERE key_id = $1")
            .bind(key_id)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))
    }
}
