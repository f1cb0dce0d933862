//! Insight of a tenant into its own deliveries: totals of the workspace, and the trace of one message.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use relay_domain::{
    MessageId,
    mailboxes::delivery::{DeliveryState, Settlement, derive_state},
    push::attempt::DeliveryAttempt,
    workspaces::usage::WorkspaceMetrics,
};
use relay_store::mailboxes::insight::TracedDelivery;
use relay_wire::mailboxes::insight::{DeliveryTrace, MessageTrace, TraceStep};

use super::Mailboxes;
use crate::{EngineError, EngineResult, access::callers::Credential, error::Missing};

/// Bound of the traced deliveries of one message: the lowest agent ids first.
const MAX_TRACED_DELIVERIES: i64 = 1000;
/// Bound of the attempts per delivery: the newest.
const MAX_ATTEMPTS: i64 = 10;

/// Returns a step that is no attempt.
fn step(step: &'static str, at: Option<DateTime<Utc>>, reason: Option<String>) -> TraceStep {
    TraceStep { step, at: at.map(Into::into), reason, status: None, latency_ms: None }
}

impl Mailboxes {
    /// Returns totals of the caller's workspace. An observer whose token names agents gets those of their mailboxes.
    pub async fn workspace_metrics(&self, caller: &Credential) -> EngineResult<WorkspaceMetrics> {
        let only = caller.view().filters.agent_ids.as_deref();
        let _permit = self.core.acquire_scan_permit(caller.scope()).await?;
        Ok(self.core.store.workspace_metrics(caller.scope(), only).await?)
    }

    /// Traces every delivery of a message, up to 1000. An observer whose token names agents gets the deliveries to
    /// those.
    ///
    /// # Errors
    /// When there is no such message for this caller.
    pub async fn message_trace(&self, caller: &Credential, id: &str) -> EngineResult<MessageTrace> {
        let id: MessageId = id.parse().map_err(|_| EngineError::NotFound(Missing::Message))?;
        let found = self.core.store.message_head(caller.scope(), id).await?;
        let message = found.ok_or(EngineError::NotFound(Missing::Message))?;
        if !caller.view().sees_message(&message.facts()) {
            return Err(EngineError::NotFound(Missing::Message));
        }
        let _permit = self.core.acquire_scan_permit(caller.scope()).await?;
        let only = caller.view().filters.agent_ids.as_deref();
        let rows = self.core.store.deliveries_of_message(caller.scope(), id, only, MAX_TRACED_DELIVERIES).await?;
        let places: Vec<_> = rows.iter().map(|row| (row.agent_id, row.seq)).collect();
        let attempts =
            self.core.store.attempts_of_deliveries(caller.scope(), &places, message.created_at, MAX_ATTEMPTS).await?;
        let mut attempts_by_delivery: HashMap<_, Vec<DeliveryAttempt>> = HashMap::new();
        for (agent, seq, attempt) in attempts {
            attempts_by_delivery.entry((agent, seq)).or_default().push(attempt);
        }
        let deliveries = rows
            .into_iter()
            .zip(places)
            // A delivery without attempts has none to show.
            .map(|(row, place)| trace_delivery(row, attempts_by_delivery.remove(&place).unwrap_or_default()))
            .collect();
        Ok(MessageTrace { message_id: id.to_string(), accepted_at: message.created_at.into(), deliveries })
    }
}

fn trace_delivery(row: TracedDelivery, attempts: Vec<DeliveryAttempt>) -> DeliveryTrace {
    let state = derive_state(row.seq, row.sent_seq, row.ack_floor, row.settlement);
    let mut steps = vec![step("accepted", Some(row.created_at), Some(row.reason.as_str().to_owned()))];
    // A delivery that an endpoint accepted has no separate "sent" step.
    let was_accepted = attempts.iter().any(|one| one.error.is_none());
    if row.seq <= row.sent_seq.max(row.ack_floor) && !was_accepted {
        steps.push(step("sent", None, None));
    }
    let mut timed: Vec<TraceStep> = attempts
        .into_iter()
        .map(|one| TraceStep {
            status: one.status,
            latency_ms: Some(one.latency_ms),
            ..step("attempted", Some(one.attempted_at), one.error)
        })
        .collect();
    if let Some(settlement) = row.settlement {
        let name = match settlement {
            Settlement::Acked => "acked",
            Settlement::Failed => "failed",
            Settlement::Deferred => "deferred",
            Settlement::DeadLettered => "dead_lettered",
        };
        let reason = row.settlement_reason.clone().or_else(|| row.error.clone());
        timed.push(step(name, row.settlement_at, reason));
    }
    timed.sort_by_key(|step| step.at);
    steps.append(&mut timed);
    // The floor may pass a row that failed before; a REST ack and a dead letter stay as they are.
    if state == DeliveryState::Acked && row.settlement != Some(Settlement::Acked) {
        steps.push(step("acked", row.floor_acked_at, None));
    }
    DeliveryTrace {
        agent_id: row.agent_id.to_string(),
        agent_name: row.agent_name,
        seq: row.seq,
        node_id: row.node_id.to_string(),
        status: state.as_str(),
        expires_at: row.expires_at.into(),
        steps,
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::{
        AgentId, AttemptId, NodeId,
        mailboxes::{delivery::Reason, stream::Seq},
    };

    use super::*;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_700_000_000 + seconds, 0).unwrap()
    }

    fn steps(
        sent_seq: Seq,
        ack_floor: Seq,
        settlement: Option<Settlement>,
        attempts: Vec<DeliveryAttempt>,
    ) -> (&'static str, Vec<TraceStep>) {
        let row = TracedDelivery {
            agent_id: AgentId::new(1),
            agent_name: "bob".into(),
            seq: 5,
            redrive_no: 0,
            node_id: NodeId::new("node_direct_1"),
            reason: Reason::Dm,
            created_at: at(0),
            expires_at: at(3600),
            sent_seq,
            ack_floor,
            floor_acked_at: (ack_floor >= 5).then(|| at(2)),
            settlement,
            settlement_reason: None,
            error: None,
            available_at: None,
            settlement_at: settlement.map(|_| at(1)),
        };
        let trace_delivery = trace_delivery(row, attempts);
        (trace_delivery.status, trace_delivery.steps)
    }

    fn names(steps: &[TraceStep]) -> Vec<&'static str> {
        steps.iter().map(|step| step.step).collect()
    }

    fn attempt(seconds: i64, status: Option<i16>, error: Option<&str>) -> DeliveryAttempt {
        DeliveryAttempt {
            attempt_id: AttemptId::new(seconds),
            node_id: NodeId::new("node_hook"),
            attempted_at: at(seconds),
            latency_ms: 12,
            status,
            answer: None,
            error: error.map(str::to_owned),
        }
    }

    #[test]
    fn attempts_are_steps_in_chronological_order() {
        let reset = attempt(0, None, Some("connection reset"));
        let (_, found) = steps(4, 4, Some(Settlement::Deferred), vec![reset.clone()]);
        assert_eq!(names(&found), ["accepted", "attempted", "deferred"]);
        assert_eq!((found[1].at.map(|at| at.0), found[1].status, found[1].latency_ms), (Some(at(0)), None, Some(12)));
        assert_eq!(found[1].reason.as_deref(), Some("connection reset"));
        // It was deferred after the first attempt.
        let taken = attempt(2, Some(200), None);
        let (_, found) = steps(5, 5, Some(Settlement::Deferred), vec![reset, taken]);
        assert_eq!(names(&found)[..4], ["accepted", "attempted", "deferred", "attempted"]);
        assert_eq!((found[3].status, &found[3].reason), (Some(200), &None));
        assert!(!names(&found).contains(&"sent"), "{found:?}");
    }

    #[test]
    fn steps_follow_from_the_floors_and_the_settlement() {
        use DeliveryState as S;
        for (sent, acked, exception, expected) in [
            (4, 4, None, (S::Queued, vec!["accepted"])),
            (5, 4, None, (S::Delivered, vec!["accepted", "sent"])),
            (5, 5, None, (S::Acked, vec!["accepted", "sent", "acked"])),
            (4, 4, Some(Settlement::Acked), (S::Acked, vec!["accepted", "acked"])),
            (5, 4, Some(Settlement::Failed), (S::Failed, vec!["accepted", "sent", "failed"])),
            (5, 5, Some(Settlement::Failed), (S::Acked, vec!["accepted", "sent", "failed", "acked"])),
            (4, 4, Some(Settlement::Deferred), (S::Queued, vec!["accepted", "deferred"])),
            (4, 4, Some(Settlement::DeadLettered), (S::DeadLettered, vec!["accepted", "dead_lettered"])),
        ] {
            let (state, found) = steps(sent, acked, exception, Vec::new());
            assert_eq!((state, names(&found)), (expected.0.as_str(), expected.1));
        }
    }
}
