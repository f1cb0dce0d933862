//! Access of an observer, checked again while its connection is open. Used by `socket`, `sse` and `log`.

use std::{sync::Arc, time::Duration};

use axum::http::HeaderMap;
use relay_engine::{
    Engine, EngineError,
    error::Missing,
    events::LogEvent,
    observers::{AccessEndReason, ObserverAccess},
};
use relay_tasks::byte_budget::ByteLease;
use serde::Deserialize;
use tokio::time::Instant;

use crate::{
    caller::{find_bearer, find_socket_token},
    connections::Client,
    error::ApiError,
    state::AppState,
};

/// Interval at which an open observer is checked; a revocation closes it within this time.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The token may be in the query, because browsers cannot set headers here. It is never logged.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ObserverCredentials {
    /// A token, where no header can be set. It wins over the header.
    #[serde(default)]
    pub(super) token: Option<String>,
}

impl ObserverCredentials {
    /// Returns the token of a socket, which may also be in a subprotocol.
    pub(super) fn socket_token(self, headers: &HeaderMap) -> Result<String, ApiError> {
        find_socket_token(self.token, headers).ok_or_else(ApiError::missing_token)
    }

    /// Returns the token. The query takes precedence over the header.
    pub(super) fn token(self, headers: &HeaderMap) -> Result<String, ApiError> {
        self.token
            .filter(|token| !token.is_empty())
            .or_else(|| find_bearer(headers).map(ToOwned::to_owned))
            .ok_or_else(ApiError::missing_token)
    }
}

/// Authorizes an observer. An unknown token is charged to the client's address.
pub(super) async fn authorize(state: &AppState, token: &str, client: &Client) -> Result<ObserverAccess, EngineError> {
    let authorization = state.engine.observers().authorize(token);
    state.engine.access().limit_unknown(token, client.address.limited_ip(), authorization).await
}

/// Access of one observer while its connection is open.
pub(super) struct ObserverWatch {
    engine: Engine,
    access: ObserverAccess,
    recheck_at: Instant,
}

impl ObserverWatch {
    pub(super) fn new(engine: Engine, access: ObserverAccess) -> Self {
        Self { engine, access, recheck_at: Instant::now() + RECHECK_INTERVAL }
    }

    pub(super) const fn access(&self) -> &ObserverAccess {
        &self.access
    }

    /// Resolves when the next check is due.
    pub(super) async fn wait_recheck(&self) {
        tokio::time::sleep_until(self.recheck_at).await;
    }

    /// Checks the access again: applies changed scopes and filters, or returns why it ended.
    pub(super) async fn recheck(&mut self) -> Result<(), AccessEndReason> {
        self.recheck_at = Instant::now() + RECHECK_INTERVAL;
        if let Some(changed) = self.engine.observers().recheck(&self.access).await? {
            self.access = changed;
        }
        Ok(())
    }

    pub(super) fn can_see(&self, event: &LogEvent) -> bool {
        self.access.view.sees_event(&event.facts())
    }

    /// Waits for the memory of a large event, which is held until the event is written.
    ///
    /// # Errors
    /// If other observers, above all of the same workspace, take too long.
    pub(super) async fn reserve_large(&self, event: &LogEvent) -> Result<Option<ByteLease>, EngineError> {
        self.engine.events().reserve_large(self.access.scope, event).await
    }

    /// Renders an event for the observer; `None` if retention has removed the message it refers to.
    ///
    /// # Errors
    /// If the message cannot be read now. Skipping the event would leave a gap that the observer never notices.
    pub(super) async fn render(&self, event: &Arc<LogEvent>) -> Result<Option<axum::body::Bytes>, EngineError> {
        match self.engine.events().text(self.access.scope, event).await {
            Ok(text) => Ok(Some(text)),
            Err(EngineError::NotFound(Missing::Message)) => Ok(None),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, event.seq, "event not readable");
                Err(error)
            }
        }
    }
}
