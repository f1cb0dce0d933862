//! Statements of a running agent about itself, and events for the engine: activity, receipts, saved notes. None of it
//! is on the way of a delivery.

use relay_verification::Timestamp;
use serde_json::{Value, json};
use tokio::time::Duration;

use super::{
    AgentState, ReceiptPolicy, Report,
    context_budget::ContextBudget,
    continuity::{ContinuityRequest, Notes},
    session_status::Activity,
    task::{AgentTask, JobResult, ProgramRun},
};
use crate::{
    api::types::Event,
    clock,
    injection::{DeliveryMode, Failure, Settlement},
    mailbox::{Author, Message, Origin, Urgency},
    metric_names,
};

/// Output silence after which a prompt counts as idle.
const REST: Duration = Duration::from_secs(2);
/// A block of notes ends with a pause of this length.
const BLOCK_PAUSE: Duration = Duration::from_secs(2);

impl AgentTask {
    /// Tells the engine of an event; dropped while too many wait.
    pub(super) fn report(&self, kind: &'static str, payload: Value, key: Option<String>) {
        let handle = &self.launch.handle;
        let report = Report { agent: handle.spec.name.clone(), token: handle.token.clone(), kind, payload, key };
        // Never waited for: a slow engine must not delay a verdict.
        if self.launch.services.reports.try_send(report).is_err() {
            metrics::counter!(metric_names::REPORTS_DROPPED).increment(1);
        }
    }

    /// Reports a settled message to those who watch the workspace, if the operator wants it.
    pub(super) fn report_settlement(&self, settlement: &Settlement) {
        let is_wanted = match self.launch.services.settings.receipts {
            ReceiptPolicy::All => true,
            ReceiptPolicy::Exceptions => !settlement.is_verified,
            ReceiptPolicy::Off => false,
        };
        // Without a seq it is no delivery of the engine.
        if !is_wanted || settlement.message.seq.is_none() {
            return;
        }
        let (message, level) = (&settlement.message, settlement.level.as_str());
        let payload = json!({
            "delivery_id": message.delivery_id,
            "message_id": message.event_id,
            "level": level,
            "method": settlement.method,
            "confidence": settlement.confidence,
            "attempt": settlement.attempts,
            "latency_ms": settlement.latency_ms,
            "verified": settlement.is_verified,
        });
        self.report("delivery.delivered", payload, Some(format!("{}:{level}", message.delivery_id)));
    }

    /// Reports a message that failed permanently, if the operator wants it.
    pub(super) fn report_failure_event(&self, failure: &Failure) {
        if self.launch.services.settings.receipts == ReceiptPolicy::Off || failure.message.seq.is_none() {
            return;
        }
        let message = &failure.message;
        let payload = json!({
            "delivery_id": message.delivery_id,
            "message_id": message.event_id,
            "level": "L0",
            "confidence": "injected",
            "method": "injected",
            "attempt": failure.attempts,
            "latency_ms": Value::Null,
            "verified": false,
            "error": failure.reason.as_str(),
        });
        self.report("delivery.failed", payload, Some(format!("{}:L0", message.delivery_id)));
    }

    /// Takes visible output.
    pub(super) fn on_visible_text(&self, running: &mut ProgramRun, at: Timestamp, text: &str) {
        running.status.set(Activity::Thinking, "output");
        if let Some(percent) = running.context.on_text(at, text) {
            self.info.send_modify(|info| info.context_left_percent = Some(percent));
            if ContextBudget::is_low(percent) {
                self.publish(&Event::AgentContextLow { pct: percent });
            }
        }
        for request in running.continuity.on_text(at, text) {
            self.on_continuity(running, request);
        }
    }

    /// Does what silence decides.
    pub(super) fn check_rest(&self, running: &mut ProgramRun, now: Timestamp) {
        if now >= running.last_output_at + BLOCK_PAUSE {
            self.end_continuity(running);
        }
        if now >= running.last_output_at + REST && running.rest_checked_for != Some(running.last_output_at) {
            // Once for each pause: without output the screen does not change.
            running.rest_checked_for = Some(running.last_output_at);
            let harness = self.launch.harness.as_ref();
            let before_cursor = running.process.terminal.text_before_cursor();
            if harness.is_some_and(|harness| harness.is_at_prompt(&before_cursor)) {
                running.status.set(Activity::Idle, "prompt");
            }
        }
        self.check_blocked(running, now);
        for (kind, payload) in running.status.poll(now) {
            self.report(kind, payload, None);
        }
    }

    fn check_blocked(&self, running: &mut ProgramRun, now: Timestamp) {
        let Some(blocked) = running.blocked.poll(now, running.pipeline.typing_since()) else { return };
        running.status.set(Activity::Waiting, "blocked");
        self.info.send_modify(|info| info.state = AgentState::BlockedOnSend);
        self.publish(&Event::AgentBlockedOnSend {
            blocked_secs: blocked.as_secs(),
            pending_delivery_count: running.pipeline.pending().len(),
        });
    }

    /// Instant at which [`Self::check_rest`] has work again.
    pub(super) fn next_rest_deadline(&self, running: &ProgramRun) -> Option<Timestamp> {
        let block = running.continuity.is_open().then(|| running.last_output_at + BLOCK_PAUSE);
        let is_checked = running.rest_checked_for == Some(running.last_output_at);
        let rest = (!is_checked && self.launch.harness.is_some()).then(|| running.last_output_at + REST);
        let blocked = running.blocked.next_report(running.pipeline.typing_since());
        [block, rest, blocked, running.status.next_report()].into_iter().flatten().min()
    }

    /// Ends a block of notes behind which nothing comes.
    pub(super) fn end_continuity(&self, running: &mut ProgramRun) {
        if running.continuity.is_open()
            && let Some(request) = running.continuity.finish()
        {
            self.on_continuity(running, request);
        }
    }

    fn on_continuity(&self, running: &mut ProgramRun, request: ContinuityRequest) {
        // Notes that wait to be typed are those that another load would bring.
        let is_repeated = request == ContinuityRequest::Load && running.pipeline.has_waiting_notes();
        let turn = if is_repeated { Err(request) } else { running.continuity_turns.add(request) };
        match turn {
            Ok(Some(request)) => self.begin_continuity(running, request),
            Ok(None) => {}
            Err(_) => metrics::counter!(metric_names::CONTINUITY_DROPPED).increment(1),
        }
    }

    /// The work on a request has ended, with notes to be typed back if it was a load.
    pub(super) fn on_continuity_done(&self, running: &mut ProgramRun, notes: Option<Box<Notes>>) {
        if let Some(notes) = notes {
            self.on_notes(running, &notes);
        }
        if let Some(next) = running.continuity_turns.finish() {
            self.begin_continuity(running, next);
        }
    }

    fn begin_continuity(&self, running: &mut ProgramRun, request: ContinuityRequest) {
        let (folder, agent) = (self.launch.services.settings.continuity.clone(), self.name().to_owned());
        let task = self.launch.handle.spec.task.clone();
        let last_messages = running.notes.last_messages.clone();
        let saved_at_ms = clock::unix_ms();
        running.works.push(Box::pin(async move {
            let work = tokio::task::spawn_blocking(move || {
                // Read before a save as well, so that notes of a newer broker are refused and not replaced.
                let kept = folder.load(&agent)?;
                let notes = match request {
                    ContinuityRequest::Load => return Ok(kept),
                    ContinuityRequest::Save(summary) => {
                        Notes { agent, task, summary, uncertain: Vec::new(), last_messages, saved_at_ms }
                    }
                    ContinuityRequest::Uncertain(question) => {
                        let mut notes = kept.unwrap_or(Notes { agent, task, ..Notes::default() });
                        notes.add_question(question);
                        notes
                    }
                };
                folder.save(&notes).map(|()| None)
            });
            match work.await {
                Ok(Ok(notes)) => JobResult::Notes(notes.map(Box::new)),
                Ok(Err(error)) => {
                    tracing::warn!(error = format!("{error:#}"), "an agent's notes could not be read or written");
                    JobResult::Notes(None)
                }
                // The turn ends all the same, or no further request would be worked on.
                Err(_) => JobResult::Notes(None),
            }
        }));
    }

    /// Types notes back to the agent.
    fn on_notes(&self, running: &mut ProgramRun, notes: &Notes) {
        let id = format!("cont_load_{}", uuid::Uuid::new_v4().simple());
        let message = Message {
            delivery_id: id.clone(),
            event_id: id,
            seq: None,
            author: Author { name: "broker".to_owned(), agent_id: None },
            target: self.name().to_owned(),
            body: notes.text(),
            thread_id: None,
            priority: 2,
            urgency: Urgency::Wait,
            origin: Origin::Continuity,
            queued_at_ms: clock::unix_ms(),
        };
        self.publish_arrival(&message, DeliveryMode::AutoInject);
        running.pipeline.enqueue(message);
    }
}
