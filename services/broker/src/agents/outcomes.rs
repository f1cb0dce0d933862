//! Outcomes of deliveries: the ledger, the ack, the receipt, the report of a failure.

use relay_verification::Level;
use serde_json::json;
use tokio::time::{Duration, Instant, sleep};

use super::{
    Receipt,
    task::{AgentTask, JobResult, Works, reference},
};
use crate::{
    api::types::{DeliveryProof, Event},
    clock,
    engine::{Engine, Request},
    injection::{Failure, Settlement},
    insight::{DeadLetter, Outcome},
    mailbox::{Message, Origin},
    metric_names,
    state::LedgerEntry,
};

/// A ledger that cannot be written is tried again after this pause.
const LEDGER_RETRY: Duration = Duration::from_secs(1);
/// Time after which the ack passes a failure that could not be reported to the engine.
const REPORT_LIMIT: Duration = Duration::from_secs(60);
const REPORT_RETRY: Duration = Duration::from_secs(2);

impl AgentTask {
    pub(super) fn on_settlement(&self, works: &Works, settlement: Box<Settlement>) {
        let outcome = if settlement.is_verified { "verified" } else { "unverified" };
        let harness = self.launch.handle.harness.clone();
        let labels = [("harness", harness.clone()), ("outcome", outcome.to_owned())];
        metrics::counter!(metric_names::DELIVERIES, &labels).increment(1);
        let labels = [
            ("harness", harness.clone()),
            ("method", settlement.method.to_owned()),
            ("level", settlement.level.as_str().to_owned()),
        ];
        metrics::counter!(metric_names::VERIFICATIONS, &labels).increment(1);
        let verdict = if settlement.is_verified {
            Outcome::Verified { method: settlement.method, latency_ms: settlement.latency_ms }
        } else {
            Outcome::Unverified
        };
        self.note_outcome(verdict, settlement.attempts);
        if settlement.is_verified {
            let labels = [("harness", harness), ("method", settlement.method.to_owned())];
            metrics::histogram!(metric_names::VERIFY_SECONDS, &labels).record(settlement.latency_ms as f64 / 1000.0);
        }
        // At L0 a resumed session may lack the message and gets it again after a crash. Without a seq the engine
        // repeats nothing.
        if settlement.level >= Level::Echoed && settlement.message.seq.is_some() {
            works.push(Box::pin(self.record(settlement, Duration::ZERO)));
        } else {
            self.settle(&settlement);
        }
    }

    fn note_outcome(&self, outcome: Outcome, attempts: u32) {
        let launch = &self.launch;
        launch.services.verification.on_outcome(self.name(), &launch.program, outcome, attempts);
    }

    /// Writes the level down before the ack that rests on it is sent.
    pub(super) fn record(
        &self,
        settlement: Box<Settlement>,
        pause: Duration,
    ) -> impl Future<Output = JobResult> + Send + use<> {
        let ledger = self.launch.services.ledger.clone();
        let entry = LedgerEntry {
            // Only bound agents get messages of the engine.
            agent_id: self.launch.handle.binding.agent_id().unwrap_or_default(),
            msg_id: settlement.message.event_id.clone(),
            level: settlement.level,
            session_ref: self.launch.handle.spec.session_id.clone(),
        };
        async move {
            sleep(pause).await;
            JobResult::Recorded { is_written: ledger.record(entry).await, settlement }
        }
    }

    /// The ledger has a settlement, or is tried again.
    pub(super) fn on_recorded(&self, works: &Works, settlement: Box<Settlement>, is_written: bool) {
        if is_written {
            self.settle(&settlement);
        } else {
            works.push(Box::pin(self.record(settlement, LEDGER_RETRY)));
        }
    }

    pub(super) fn settle(&self, settlement: &Settlement) {
        let message = &settlement.message;
        if let Some(seq) = message.seq {
            self.mailbox.note(seq, settlement.level.as_str(), settlement.method);
        }
        self.acknowledge(message.seq);
        self.report_settlement(settlement);
        let (delivery, from, to) = (reference(message), message.author.name.clone(), message.target.clone());
        self.publish(&Event::MessageDeliveryConfirmed { delivery: delivery.clone(), from, to });
        if !settlement.is_verified {
            return;
        }
        if !message.has_receipt() {
            self.publish(&Event::DeliveryReadAck { delivery, status: "skipped_synthetic", reason: None });
            return;
        }
        let receipt = Receipt { agent: self.name().to_owned(), token: self.launch.handle.token.clone(), delivery };
        if self.launch.services.receipts.try_send(receipt).is_err() {
            metrics::counter!(metric_names::RECEIPTS_DROPPED).increment(1);
        }
    }

    pub(super) fn acknowledge(&self, seq: Option<u64>) {
        if let Some(position) = seq.and_then(|seq| self.mailbox.settle(seq)) {
            self.launch.services.link.ack(self.name(), position);
        }
    }

    pub(super) fn on_failure(&self, works: &Works, mut failure: Box<Failure>) {
        let labels = [("harness", self.launch.handle.harness.clone()), ("outcome", "failed".to_owned())];
        metrics::counter!(metric_names::DELIVERIES, &labels).increment(1);
        let (message, reason) = (&failure.message, failure.reason.as_str());
        self.note_outcome(Outcome::Failed, failure.attempts);
        self.report_failure_event(&failure);
        // Its place in the mailbox is settled by this failure.
        let kept = Message { seq: None, origin: Origin::Redelivered, ..message.clone() };
        self.launch.services.dead_letters.add(DeadLetter {
            agent: self.name().to_owned(),
            message: kept,
            reason,
            attempts: failure.attempts,
            failed_at_ms: clock::unix_ms(),
        });
        self.publish(&Event::DeliveryFailed {
            delivery: reference(message),
            reason,
            proven: DeliveryProof::injected(failure.attempts),
        });
        self.publish(&Event::MessageDeliveryFailed {
            delivery: reference(message),
            from: message.author.name.clone(),
            to: message.target.clone(),
            attempts: failure.attempts,
            last_error: reason,
        });
        let (engine, token) = (self.launch.services.engine.clone(), self.launch.handle.token.clone());
        // The report needs no text, and may wait for the engine.
        failure.message.body = String::new();
        works.push(Box::pin(async move {
            if failure.message.seq.is_some() {
                report_failure(&engine, &token, &failure).await;
            }
            JobResult::FailureReported(failure)
        }));
    }
}

/// Reports a failure before the ack passes it: behind the floor it has no effect. After a minute without an engine the
/// local record is all that is left.
async fn report_failure(engine: &Engine, token: &str, failure: &Failure) {
    let deadline = Instant::now() + REPORT_LIMIT;
    let path = ["deliveries", failure.message.delivery_id.as_str(), "fail"];
    loop {
        let body = json!({ "error": failure.reason.as_str(), "retryable": false });
        match engine.call(Request::post(&path, token, body)).await {
            Ok(_) => return,
            Err(error) if error.is_transient() && Instant::now() + REPORT_RETRY < deadline => sleep(REPORT_RETRY).await,
            Err(error) => {
                tracing::warn!(%error, delivery.id = failure.message.delivery_id, "a failure could not be reported");
                return;
            }
        }
    }
}
