//! What a tenant may know of its own deliveries: numbers of the workspace, and every step of one message's way.

use chrono::{DateTime, Utc};
use relay_domain::{
    MessageId,
    delivery::{DeliveryState, Exception, Reason, state_of},
};
pub use relay_store::insight::{TracedDelivery, WorkspaceNumbers};

use crate::{Engine, EngineError, EngineResult, auth::Credential, history::facts};

/// Deliveries of one message that are traced: the lowest agents' ids first.
const TRACED: i64 = 1000;

/// The way of a message.
#[derive(Debug)]
pub struct MessageTrace {
    /// The message.
    pub message_id: MessageId,
    /// When it was accepted.
    pub accepted_at: DateTime<Utc>,
    /// Its deliveries, by recipient.
    pub deliveries: Vec<DeliveryTrace>,
}

/// The way of one delivery.
#[derive(Debug)]
pub struct DeliveryTrace {
    /// What it follows from.
    pub row: TracedDelivery,
    /// Its state.
    pub state: DeliveryState,
    /// What happened, in order.
    pub steps: Vec<Step>,
}

/// Something that happened to a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// accepted, sent, acked, failed, deferred or dead_lettered.
    pub step: &'static str,
    /// When; `None` where the engine keeps no time.
    pub at: Option<DateTime<Utc>>,
    /// Why.
    pub reason: Option<String>,
}

impl Engine {
    /// Numbers of the caller's workspace. An observer whose token names agents gets those of their mailboxes.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn workspace_numbers(&self, caller: &Credential) -> EngineResult<WorkspaceNumbers> {
        let only = caller.view().filters.agent_ids.as_deref();
        Ok(self.store().workspace_numbers(caller.scope(), only).await?)
    }

    /// Every step of every delivery of a message, of up to 1000. An observer whose token names agents gets the deliveries to those.
    ///
    /// # Errors
    /// When there is no such message for this caller.
    pub async fn message_trace(&self, caller: &Credential, id: &str) -> EngineResult<MessageTrace> {
        let id: MessageId = id.parse().map_err(|_| EngineError::MessageNotFound)?;
        let message = self.store().message(caller.scope(), id).await?.ok_or(EngineError::MessageNotFound)?.message;
        if !caller.view().sees_message(&facts(&message)) {
            return Err(EngineError::MessageNotFound);
        }
        let only = caller.view().filters.agent_ids.as_deref();
        let rows = self.store().deliveries_of_message(caller.scope(), id, only, TRACED).await?;
        let deliveries = rows.into_iter().map(traced).collect();
        Ok(MessageTrace { message_id: id, accepted_at: message.created_at, deliveries })
    }
}

fn traced(row: TracedDelivery) -> DeliveryTrace {
    let exception = row.exception_state.and_then(|code| Exception::from_code(code).ok());
    let state = state_of(row.seq, row.sent_seq, row.ack_floor, exception);
    let reason = Reason::from_code(row.reason).ok().map(|reason| reason.as_str().to_owned());
    let mut steps = vec![Step { step: "accepted", at: Some(row.created_at), reason }];
    if row.seq <= row.sent_seq.max(row.ack_floor) {
        steps.push(Step { step: "sent", at: None, reason: None });
    }
    if let Some(exception) = exception {
        let step = match exception {
            Exception::Acked => "acked",
            Exception::Failed => "failed",
            Exception::Deferred => "deferred",
            Exception::DeadLettered => "dead_lettered",
        };
        let reason = row.exception_reason.clone().or_else(|| row.error.clone());
        steps.push(Step { step, at: row.exception_at, reason });
    }
    // The floor may pass a row that failed before; a REST ack and a dead letter stay what they are.
    if state == DeliveryState::Acked && exception != Some(Exception::Acked) {
        steps.push(Step { step: "acked", at: row.floor_acked_at, reason: None });
    }
    DeliveryTrace { row, state, steps }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(sent_seq: i64, ack_floor: i64, exception: Option<Exception>) -> (DeliveryState, Vec<&'static str>) {
        let at = |seconds: i64| DateTime::from_timestamp(1_700_000_000 + seconds, 0).unwrap();
        let traced = traced(TracedDelivery {
            agent_id: 1,
            agent_name: "bob".into(),
            seq: 5,
            redrive_no: 0,
            node_id: "node_direct_1".into(),
            reason: 2,
            created_at: at(0),
            expires_at: at(3600),
            sent_seq,
            ack_floor,
            floor_acked_at: (ack_floor >= 5).then(|| at(2)),
            exception_state: exception.map(Exception::code),
            exception_reason: None,
            error: None,
            available_at: None,
            exception_at: exception.map(|_| at(1)),
        });
        (traced.state, traced.steps.iter().map(|step| step.step).collect())
    }

    #[test]
    fn steps_follow_from_the_floors_and_the_exception() {
        use DeliveryState as S;
        for (sent, acked, exception, expected) in [
            (4, 4, None, (S::Queued, vec!["accepted"])),
            (5, 4, None, (S::Delivered, vec!["accepted", "sent"])),
            (5, 5, None, (S::Acked, vec!["accepted", "sent", "acked"])),
            (4, 4, Some(Exception::Acked), (S::Acked, vec!["accepted", "acked"])),
            (5, 4, Some(Exception::Failed), (S::Failed, vec!["accepted", "sent", "failed"])),
            (5, 5, Some(Exception::Failed), (S::Acked, vec!["accepted", "sent", "failed", "acked"])),
            (4, 4, Some(Exception::Deferred), (S::Queued, vec!["accepted", "deferred"])),
            (4, 4, Some(Exception::DeadLettered), (S::DeadLettered, vec!["accepted", "dead_lettered"])),
        ] {
            assert_eq!(steps(sent, acked, exception), expected);
        }
    }
}
