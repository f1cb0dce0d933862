//! An agent's own deliveries: listing and settling them one by one.

use relay_domain::{
    AgentId, DeliveryId, WorkspaceScope,
    delivery::{DeliveryState, Exception, Mode, Reason, state_of},
    names::{MAX_NOTE_BYTES, check_length},
};
pub use relay_store::{DeliveryReport, DeliveryRow};

use crate::{Engine, EngineError, EngineResult, auth::AgentCaller, render};

/// What a list of deliveries holds unless a limit is given, and at most.
pub const PAGE: (i64, i64) = (100, 200);

/// A delivery with its derived state.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// As stored.
    pub row: DeliveryRow,
    /// Its id.
    pub id: DeliveryId,
    /// Its state.
    pub state: DeliveryState,
    /// How it departs from its mailbox's floors.
    pub exception: Option<Exception>,
}

impl From<DeliveryRow> for Delivery {
    fn from(row: DeliveryRow) -> Self {
        let exception = row.exception_state.and_then(|code| Exception::from_code(code).ok());
        Self {
            id: DeliveryId { source: row.source_id, agent: AgentId::new(row.agent_id), redrive_no: row.redrive_no },
            state: state_of(row.seq, row.sent_seq, row.ack_floor, exception),
            exception,
            row,
        }
    }
}

impl Delivery {
    /// The word for how it asks to be injected.
    #[must_use]
    pub fn mode(&self) -> &'static str {
        Mode::from_code(self.row.mode).unwrap_or_default().row_word()
    }

    /// Why the recipient gets it; a deferred one says why it was deferred.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        if self.state == DeliveryState::Queued && self.exception == Some(Exception::Deferred) {
            return self.row.deferred_reason.as_deref();
        }
        Reason::from_code(self.row.reason).ok().map(Reason::as_str)
    }

    /// The public id of its channel.
    #[must_use]
    pub fn channel_id(&self) -> Option<String> {
        self.row.channel_id.map(|id| render::public_id(id, self.row.conversation_id.as_deref()))
    }
}

impl Engine {
    /// The caller's deliveries, oldest first: those in `state`, or without one the unexpired queued and
    /// delivered ones.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn deliveries(
        &self,
        caller: &AgentCaller,
        state: Option<DeliveryState>,
        limit: i64,
    ) -> EngineResult<Vec<Delivery>> {
        let rows = self.store().deliveries(caller.scope, caller.agent_id, state, limit).await?;
        Ok(rows.into_iter().map(Delivery::from).collect())
    }

    /// Settles or defers one of the caller's deliveries. What cannot change any more stays as it is,
    /// and is answered just the same.
    ///
    /// # Errors
    /// When there is no such delivery of the caller's.
    pub async fn report_delivery(
        &self,
        caller: &AgentCaller,
        id: &str,
        report: &DeliveryReport,
    ) -> EngineResult<Delivery> {
        check_report(report)?;
        let id = own_delivery(caller, id)?;
        let changed =
            self.store().report_delivery(caller.scope, id, report).await?.ok_or(EngineError::DeliveryNotFound)?;
        if changed && !matches!(report, DeliveryReport::Defer { .. }) {
            // The hole is to be filled with a tombstone, so that a broker does not wait for it.
            self.hints().mailbox_changed(caller.scope, caller.agent_id);
        }
        self.delivery_row(caller.scope, id).await
    }

    async fn delivery_row(&self, scope: WorkspaceScope, id: DeliveryId) -> EngineResult<Delivery> {
        self.store().delivery(scope, id).await?.map(Delivery::from).ok_or(EngineError::DeliveryNotFound)
    }
}

fn own_delivery(caller: &AgentCaller, id: &str) -> EngineResult<DeliveryId> {
    let id: DeliveryId = id.parse().map_err(|_| EngineError::DeliveryNotFound)?;
    if id.agent == caller.agent_id { Ok(id) } else { Err(EngineError::DeliveryNotFound) }
}

fn check_report(report: &DeliveryReport) -> EngineResult<()> {
    let (field, text) = match report {
        DeliveryReport::Ack => return Ok(()),
        DeliveryReport::Fail { error, .. } => ("error", error),
        DeliveryReport::Defer { reason, .. } => ("reason", reason),
    };
    check_length(field, text.as_deref().unwrap_or_default(), MAX_NOTE_BYTES)?;
    Ok(())
}
