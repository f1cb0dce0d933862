//! What operators do with signing keys: list, rotate, retire.

use chrono::{DateTime, Utc};
use relay_store::{Retirement, SigningKeyRow};

use super::keys;
use crate::{Engine, EngineError, EngineResult};

/// Keys that live at once. Every gateway holds them all.
pub(super) const MAX_LIVING_KEYS: i64 = 16;

/// A key as operators see it.
#[derive(Debug, Clone)]
pub struct SigningKey {
    /// Its name in token headers.
    pub kid: String,
    /// Ed25519, 32 bytes.
    pub public_key: Vec<u8>,
    /// Whether its private half is sealed at rest.
    pub sealed: bool,
    /// Whether this gateway signs with it.
    pub signs: bool,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it was retired.
    pub retired_at: Option<DateTime<Utc>>,
}

impl Engine {
    /// All signing keys, newest first.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn signing_keys(&self) -> EngineResult<Vec<SigningKey>> {
        let rows = self.store().signing_keys().await?;
        Ok(rows.into_iter().map(|row| self.described(row)).collect())
    }

    /// Makes a new key: from now on tokens are signed with it. Tokens signed by older keys stay alive.
    ///
    /// # Errors
    /// When as many keys live as may, or storage is away.
    pub async fn rotate_signing_key(&self) -> EngineResult<SigningKey> {
        let row = keys::generate(self.inner.observers.refresher.secret(), self.now())?;
        if !self.store().add_signing_key(&row, false, MAX_LIVING_KEYS).await? {
            return Err(EngineError::TooManySigningKeys);
        }
        self.observers_are_changed().await;
        Ok(self.described(row))
    }

    /// Retires a key: every token that it signed is dead.
    ///
    /// # Errors
    /// When there is no such key, it is the newest, or storage is away.
    pub async fn retire_signing_key(&self, kid: &str) -> EngineResult<()> {
        match self.store().retire_signing_key(kid, self.now()).await? {
            Retirement::Retired => {
                self.observers_are_changed().await;
                Ok(())
            }
            Retirement::InUse => Err(EngineError::SigningKeyInUse),
            Retirement::Missing => Err(EngineError::SigningKeyNotFound),
        }
    }

    /// Something about observer tokens was committed: this process knows it when this returns, the others
    /// soon.
    pub(crate) async fn observers_are_changed(&self) {
        self.hints().observers_changed();
        if let Err(error) = self.refresh_observers().await {
            // The loop tries again within a second.
            tracing::warn!(error = &error as &dyn std::error::Error, "a change of observer tokens is not known yet");
        }
    }

    fn described(&self, row: SigningKeyRow) -> SigningKey {
        SigningKey {
            signs: self.inner.observers.ring().signing().is_some_and(|(kid, _)| *kid == row.kid),
            kid: row.kid,
            public_key: row.public_key,
            sealed: row.sealed_with.is_some(),
            created_at: row.created_at,
            retired_at: row.retired_at,
        }
    }
}
