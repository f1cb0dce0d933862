//! Questions that a program asks at its first start, and Enters that it has not taken.

use bytes::Bytes;
use relay_verification::Timestamp;
use tokio::time::Duration;

use super::task::{AgentTask, JobResult, ProgramRun};
use crate::{api::types::Event, harness::Gate, injection::DeliveryMode};

/// Time after which a gate that was answered and still shows is reported.
const ANSWER_TAKES: Duration = Duration::from_secs(5);
/// Time after which an Enter without any output is repeated, for programs that ask for it.
const ENTER_TAKES: Duration = Duration::from_secs(1);

/// The question on the screen, if there is one.
#[derive(Debug, Default)]
pub(super) struct GateWatch {
    open: Option<OpenGate>,
}

#[derive(Debug)]
struct OpenGate {
    name: String,
    answered_at: Option<Timestamp>,
    is_reported: bool,
}

/// Step to take about a question.
#[derive(Debug, PartialEq, Eq)]
enum GateStep {
    Answer,
    Report,
    Wait,
}

impl GateWatch {
    /// Returns whether a question is on the screen. Messages wait meanwhile: their Enter would answer it.
    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Judges the question on the screen. `may_answer` is the operator's decision.
    fn evaluate(&mut self, now: Timestamp, shown: Option<&Gate>, may_answer: bool) -> Option<GateStep> {
        let Some(gate) = shown else {
            self.open = None;
            return None;
        };
        if self.open.as_ref().is_none_or(|open| open.name != gate.name) {
            self.open = Some(OpenGate { name: gate.name.clone(), answered_at: None, is_reported: false });
        }
        let open = self.open.as_mut()?;
        if may_answer && open.answered_at.is_none() {
            open.answered_at = Some(now);
            return Some(GateStep::Answer);
        }
        let is_refused = open.answered_at.is_none_or(|answered_at| now >= answered_at + ANSWER_TAKES);
        if is_refused && !open.is_reported {
            open.is_reported = true;
            return Some(GateStep::Report);
        }
        Some(GateStep::Wait)
    }
}

impl AgentTask {
    /// Returns whether a question of the program is looked for before the next message. Forgets one that is not.
    pub(super) fn watches_gates(&self, running: &mut ProgramRun) -> bool {
        if running.readiness.is_some() {
            // It is looked for with readiness.
            return false;
        }
        let has_gates = self.launch.harness.as_ref().is_some_and(|harness| harness.has_gates());
        let watches = has_gates && running.pipeline.watches_gates();
        if !watches {
            running.gate = GateWatch::default();
        }
        watches
    }

    /// Returns whether a question of the program is on the screen, after answering or reporting it.
    pub(super) fn is_behind_gate(&self, running: &mut ProgramRun, now: Timestamp, screen: &str) -> bool {
        let Some(harness) = &self.launch.harness else { return false };
        let gate = harness.gate_on(screen);
        let may_answer = gate.is_some_and(|gate| {
            let is_allowed = self.launch.services.settings.answered_gates.contains(&gate.name);
            // A message that was typed may quote a question: no sender may have keys pressed.
            let is_own = !running.pipeline.has_typed();
            is_allowed && is_own && gate.keys.is_some() && running.pipeline.mode() == DeliveryMode::AutoInject
        });
        match (running.gate.evaluate(now, gate, may_answer), gate) {
            (Some(GateStep::Answer), Some(gate)) => {
                tracing::info!(agent.name = self.name(), gate = gate.name, "a first-run question is answered");
                self.type_keys(running, gate.keys.clone().unwrap_or_default());
            }
            (Some(GateStep::Report), Some(gate)) => {
                let message = format!("the program waits for an answer to its question {}", gate.name);
                self.publish(&Event::worker_error("gate_open", message, true));
            }
            (Some(_) | None, _) => {}
        }
        running.gate.is_open()
    }

    /// An Enter was written: some programs lose it.
    pub(super) fn expect_effect_of_enter(&self, running: &mut ProgramRun) {
        let repeats = self.launch.harness.as_ref().is_some_and(|harness| harness.auto_enter);
        running.repeat_enter_at = repeats.then(|| running.tick() + ENTER_TAKES);
    }

    /// Repeats an Enter once that has had no effect.
    pub(super) fn repeat_enter(&self, running: &mut ProgramRun, now: Timestamp) {
        if running.repeat_enter_at.is_some_and(|due| now >= due) {
            running.repeat_enter_at = None;
            // After `/exit` nothing is typed.
            if running.wants_end_since.is_none() {
                self.type_keys(running, "\r".to_owned());
            }
        }
    }

    fn type_keys(&self, running: &ProgramRun, keys: String) {
        let terminal = running.process.terminal.clone();
        // Beside the task: it waits for room while the program does not read.
        running.works.push(Box::pin(async move {
            // The program may be ending.
            if let Err(error) = terminal.write_input(Bytes::from(keys)).await {
                tracing::debug!(%error, "keys were not typed");
            }
            JobResult::KeysTyped
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_answered_once_and_reported_when_it_stays() {
        let at = |seconds: i64| Timestamp::from_millis(seconds * 1000);
        let gate = |name: &str| Gate { name: name.into(), screen: vec![], keys: Some("y".into()) };
        let (trust, servers) = (gate("folder-trust"), gate("mcp-servers"));
        let mut watch = GateWatch::default();
        assert_eq!(watch.evaluate(at(0), None, false), None);
        assert_eq!(watch.evaluate(at(1), Some(&trust), false), Some(GateStep::Report));
        assert_eq!(watch.evaluate(at(2), Some(&trust), false), Some(GateStep::Wait));
        assert_eq!(watch.evaluate(at(3), Some(&servers), true), Some(GateStep::Answer));
        assert_eq!(watch.evaluate(at(4), Some(&servers), true), Some(GateStep::Wait));
        assert!(watch.is_open());
        assert_eq!(watch.evaluate(at(8), Some(&servers), true), Some(GateStep::Report));
        assert_eq!(watch.evaluate(at(9), None, true), None);
        assert!(!watch.is_open());
    }
}
