//! Signing keys for operators: list, rotate, retire.

use chrono::{DateTime, Utc};
use relay_store::{RetireOutcome, SigningKeyRow};

use super::{Observers, keys};
use crate::{
    EngineError, EngineResult,
    error::{Conflict, Missing},
};

/// Bound of the active keys. Every gateway holds them all.
pub(super) const MAX_LIVING_KEYS: i64 = 16;

#[derive(Debug, Clone)]
pub struct SigningKey {
    /// Key id in token headers.
    pub kid: String,
    /// Ed25519, 32 bytes.
    pub public_key: Vec<u8>,
    /// True if its private half is encrypted at rest.
    pub sealed: bool,
    /// True if this gateway signs with it.
    pub signs: bool,
    pub created_at: DateTime<Utc>,
    pub retired_at: Option<DateTime<Utc>>,
}

impl Observers {
    /// Lists all signing keys, newest first.
    pub async fn signing_keys(&self) -> EngineResult<Vec<SigningKey>> {
        let rows = self.core.store.signing_keys().await?;
        Ok(rows.into_iter().map(|row| self.describe_key(row)).collect())
    }

    /// Generates a key; later tokens are signed with it. Tokens signed by older keys stay valid.
    ///
    /// # Errors
    /// When as many keys are active as allowed.
    pub async fn rotate_signing_key(&self) -> EngineResult<SigningKey> {
        let row = keys::generate(self.cache.refresher.secret(), self.core.now())?;
        if !self.core.store.add_signing_key(&row, false, MAX_LIVING_KEYS).await? {
            return Err(EngineError::Conflict(Conflict::TooManySigningKeys));
        }
        self.refresh_after_change().await;
        Ok(self.describe_key(row))
    }

    /// Retires a key: every token that it signed is revoked.
    ///
    /// # Errors
    /// When there is no such key, or it is the newest.
    pub async fn retire_signing_key(&self, kid: &str) -> EngineResult<()> {
        match self.core.store.retire_signing_key(kid, self.core.now()).await? {
            RetireOutcome::Retired => {
                self.refresh_after_change().await;
                Ok(())
            }
            RetireOutcome::InUse => Err(EngineError::Conflict(Conflict::SigningKeyInUse)),
            RetireOutcome::Missing => Err(EngineError::NotFound(Missing::SigningKey)),
        }
    }

    /// Refreshes after a committed change of observer tokens: this process knows it when this returns, the others soon.
    pub(crate) async fn refresh_after_change(&self) {
        self.core.hints.observers_changed();
        if let Err(error) = self.refresh().await {
            // The periodic refresh retries within a second.
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "observer token refresh failed after a change, will retry"
            );
        }
    }

    fn describe_key(&self, row: SigningKeyRow) -> SigningKey {
        SigningKey {
            signs: self.cache.ring().signing_key().is_some_and(|(kid, _)| *kid == row.kid),
            kid: row.kid,
            public_key: row.public_key,
            sealed: row.sealed_with.is_some(),
            created_at: row.created_at,
            retired_at: row.retired_at,
        }
    }
}
