//! Who observes, and whether it still may.

use std::{sync::Arc, time::Duration};

use axum::http::HeaderMap;
use relay_engine::{
    Engine, EngineError,
    events::LogEvent,
    observers::{GoneReason, ObserverAccess},
};
use serde::Deserialize;
use tokio::time::Instant;

use crate::{caller::bearer_of, error::ApiError};

/// How often an open observer is looked at again; a revocation closes it within this.
const RECHECK_EVERY: Duration = Duration::from_secs(1);

/// The token may travel in the query, since browsers can set no header here; it is never logged.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ObserverCredentials {
    /// A token, where no header can be set. It wins over the header.
    #[serde(default)]
    pub(super) token: Option<String>,
}

impl ObserverCredentials {
    /// The token: that of the query wins over the header's.
    pub(super) fn token(self, headers: &HeaderMap) -> Result<String, ApiError> {
        self.token
            .filter(|token| !token.is_empty())
            .or_else(|| bearer_of(headers).map(ToOwned::to_owned))
            .ok_or_else(|| ApiError::unauthorized("unauthorized", "Missing or invalid Authorization header"))
    }
}

/// An observer's access while its connection is open.
pub(super) struct Watch {
    engine: Engine,
    access: ObserverAccess,
    recheck_at: Instant,
}

impl Watch {
    pub(super) fn new(engine: Engine, access: ObserverAccess) -> Self {
        Self { engine, access, recheck_at: Instant::now() + RECHECK_EVERY }
    }

    pub(super) const fn access(&self) -> &ObserverAccess {
        &self.access
    }

    /// Resolves when it is time to look again.
    pub(super) async fn due(&self) {
        tokio::time::sleep_until(self.recheck_at).await;
    }

    /// Looks again: takes changed scopes and filters over, or tells why it is over.
    pub(super) async fn recheck(&mut self) -> Result<(), GoneReason> {
        self.recheck_at = Instant::now() + RECHECK_EVERY;
        if let Some(changed) = self.engine.observer_still(&self.access).await? {
            self.access = changed;
        }
        Ok(())
    }

    pub(super) fn sees(&self, event: &LogEvent) -> bool {
        self.access.view.sees(&event.facts())
    }

    /// What the observer is sent of it; none when retention has dropped what it tells of.
    ///
    /// # Errors
    /// When it cannot be read back now: to go on would leave a hole that the observer never learns of.
    pub(super) async fn text(&self, event: &Arc<LogEvent>) -> Result<Option<axum::body::Bytes>, EngineError> {
        match self.engine.event_text(self.access.scope, event).await {
            Ok(text) => Ok(Some(text)),
            Err(EngineError::MessageNotFound) => Ok(None),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, event.seq, "an event was not read back");
                Err(error)
            }
        }
    }
}
