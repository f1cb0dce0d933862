//! What a tenant may know of its own deliveries: numbers of the workspace, and every step of one message's way.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, MessageId,
    delivery::{DeliveryState, Exception, Reason, state_of},
};
use relay_store::attempts::AttemptRow;
pub use relay_store::insight::{TracedDelivery, WorkspaceNumbers};

use crate::{Engine, EngineError, EngineResult, auth::Credential, history::facts};

/// Deliveries of one message that are traced: the lowest agents' ids first.
const TRACED: i64 = 1000;
/// Tries of each that are shown: the newest.
const TRIES: i64 = 10;

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
    /// accepted, sent, attempted, acked, failed, deferred or dead_lettered.
    pub step: &'static str,
    /// When; `None` where the engine keeps no time.
    pub at: Option<DateTime<Utc>>,
    /// Why.
    pub reason: Option<String>,
    /// Of a try to hand it to an endpoint: the HTTP status; none when no answer came.
    pub status: Option<i16>,
    /// Of such a try: how long it took.
    pub latency_ms: Option<i32>,
}

impl Step {
    const fn new(step: &'static str, at: Option<DateTime<Utc>>, reason: Option<String>) -> Self {
        Self { step, at, reason, status: None, latency_ms: None }
    }
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
        let places: Vec<_> = rows.iter().map(|row| (AgentId::new(row.agent_id), row.seq)).collect();
        let tries = self.store().attempts_of(caller.scope(), &places, message.created_at, TRIES).await?;
        let mut tries_of: HashMap<_, Vec<AttemptRow>> = HashMap::new();
        for (agent, seq, attempt) in tries {
            tries_of.entry((agent, seq)).or_default().push(attempt);
        }
        let deliveries = rows
            .into_iter()
            .zip(places)
            .map(|(row, place)| traced(row, tries_of.remove(&place).unwrap_or_default()))
            .collect();
        Ok(MessageTrace { message_id: id, accepted_at: message.created_at, deliveries })
    }
}

fn traced(row: TracedDelivery, tries: Vec<AttemptRow>) -> DeliveryTrace {
    let exception = row.exception_state.and_then(|code| Exception::from_code(code).ok());
    let state = state_of(row.seq, row.sent_seq, row.ack_floor, exception);
    let reason = Reason::from_code(row.reason).ok().map(|reason| reason.as_str().to_owned());
    let mut steps = vec![Step::new("accepted", Some(row.created_at), reason)];
    // What an endpoint took was not sent besides.
    let was_taken = tries.iter().any(|one| one.error.is_none());
    if row.seq <= row.sent_seq.max(row.ack_floor) && !was_taken {
        steps.push(Step::new("sent", None, None));
    }
    let mut timed: Vec<Step> = tries
        .into_iter()
        .map(|one| Step {
            status: one.status,
            latency_ms: Some(one.latency_ms),
            ..Step::new("attempted", Some(one.attempted_at), one.error)
        })
        .collect();
    if let Some(exception) = exception {
        let step = match exception {
            Exception::Acked => "acked",
            Exception::Failed => "failed",
            Exception::Deferred => "deferred",
            Exception::DeadLettered => "dead_lettered",
        };
        let reason = row.exception_reason.clone().or_else(|| row.error.clone());
        timed.push(Step::new(step, row.exception_at, reason));
    }
    timed.sort_by_key(|step| step.at);
    steps.append(&mut timed);
    // The floor may pass a row that failed before; a REST ack and a dead letter stay what they are.
    if state == DeliveryState::Acked && exception != Some(Exception::Acked) {
        steps.push(Step::new("acked", row.floor_acked_at, None));
    }
    DeliveryTrace { row, state, steps }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_700_000_000 + seconds, 0).unwrap()
    }

    fn steps(
        sent_seq: i64,
        ack_floor: i64,
        exception: Option<Exception>,
        tries: Vec<AttemptRow>,
    ) -> (DeliveryState, Vec<Step>) {
        let row = TracedDelivery {
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
        };
        let traced = traced(row, tries);
        (traced.state, traced.steps)
    }

    fn names(steps: &[Step]) -> Vec<&'static str> {
        steps.iter().map(|step| step.step).collect()
    }

    fn tried(seconds: i64, status: Option<i16>, error: Option<&str>) -> AttemptRow {
        AttemptRow {
            attempt_id: seconds,
            node_id: "node_hook".into(),
            attempted_at: at(seconds),
            latency_ms: 12,
            status,
            answer: None,
            error: error.map(str::to_owned),
        }
    }

    #[test]
    fn each_try_is_a_step_at_its_time() {
        let reset = tried(0, None, Some("connection reset"));
        let (_, found) = steps(4, 4, Some(Exception::Deferred), vec![reset.clone()]);
        assert_eq!(names(&found), ["accepted", "attempted", "deferred"]);
        assert_eq!((found[1].at, found[1].status, found[1].latency_ms), (Some(at(0)), None, Some(12)));
        assert_eq!(found[1].reason.as_deref(), Some("connection reset"));
        // It was put off after the first try.
        let taken = tried(2, Some(200), None);
        let (_, found) = steps(5, 5, Some(Exception::Deferred), vec![reset, taken]);
        assert_eq!(names(&found)[..4], ["accepted", "attempted", "deferred", "attempted"]);
        assert_eq!((found[3].status, &found[3].reason), (Some(200), &None));
        assert!(!names(&found).contains(&"sent"), "{found:?}");
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
            let (state, found) = steps(sent, acked, exception, Vec::new());
            assert_eq!((state, names(&found)), expected);
        }
    }
}
