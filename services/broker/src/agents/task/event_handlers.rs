//! Handlers of terminal events, commands and results of one running agent.

use bytes::Bytes;
use relay_pty::{Injection, LeadKeys, OutputChunk, PasteStyle, PtyError, SnapshotFormat, TerminalEvent};
use relay_verification::{Timestamp, echo::squash};
use tokio::time::Duration;

use super::{AgentTask, JobResult, ProcessEnd, ProgramRun};
use crate::{
    agents::{AgentCommand, AgentState, ModeChange, command::UndeliveredMessage, session_status::Activity},
    api::types::Event,
    clock,
    injection::{DeliveryMode, Effect, Lead, ReadySign, ScreenFacts, TypeRequest},
    insight::count_dropped_entries,
    metric_names,
};

/// Keys that interrupt a program, and the pause behind them.
const INTERRUPT: &[u8] = b"\x1b\x1b";
const INTERRUPT_PAUSE: Duration = Duration::from_millis(120);
/// Front of each further piece of a line that the terminal breaks. A program that reads lines would otherwise take a
/// piece of a message for a line of the broker, or its echo for the agent's `/exit`.
const CONTINUATION: &str = "> ";
/// Key that takes a suggestion out of the input line, and the pause behind it.
const DISMISS: &[u8] = b"\x1b";
const DISMISS_PAUSE: Duration = Duration::from_millis(100);
/// Interval of screen reads.
const SCREEN_EVERY: Duration = Duration::from_millis(500);
/// Maximum time for which an end that the agent has asked for waits for verdicts.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// Output silence after which a prompt counts as idle.
const REST: Duration = Duration::from_secs(2);

impl AgentTask {
    /// Does everything that is due now.
    pub(super) fn advance(&self, running: &mut ProgramRun, now: Timestamp) {
        // First, so that the first message can start in the same step.
        self.check_ready(running, now);
        self.repeat_enter(running, now);
        let screen = self.read_screen(running, now);
        let effects = running.pipeline.poll(now, &screen);
        self.perform(running, effects);
        self.look_for_ack_files(running, now);
        self.check_idle(running, now);
        self.check_rest(running, now);
    }

    /// Instant at which [`Self::advance`] has work again.
    pub(super) fn next_deadline(&self, running: &ProgramRun, now: Timestamp) -> Timestamp {
        let readiness = running.readiness.as_ref().map(|readiness| readiness.next_evaluation());
        let readiness = if running.gate.is_open() { Some(now + SCREEN_EVERY) } else { readiness };
        let repeats = running.repeat_enter_at;
        let screen = running.pipeline.watches_screen().then(|| now + SCREEN_EVERY);
        let files = running.pipeline.awaited_files().next().map(|_| running.ack_files_due.max(now));
        let files = files.filter(|_| !running.is_reading_ack_files && self.launch.ack_folder.is_some());
        let idle = (!running.is_idle_reported).then(|| self.idle_at(running)).flatten();
        let rest = self.next_rest_deadline(running);
        let end = running.wants_end_since.map(|since| since + END_PATIENCE);
        let deadlines = [repeats, running.pipeline.next_deadline(), readiness, screen, files, idle, rest, end];
        // An upper bound only: all work has an instant above or begins with an event.
        deadlines.into_iter().flatten().min().unwrap_or(now + Duration::from_secs(60))
    }

    pub(super) fn on_terminal_event(
        &self,
        running: &mut ProgramRun,
        event: Option<TerminalEvent>,
    ) -> Option<ProcessEnd> {
        match event {
            Some(TerminalEvent::Output(chunk)) => {
                self.on_output(running, &chunk);
                None
            }
            Some(TerminalEvent::InjectionBegan { id, .. }) => {
                if let Some(key) = running.keys.remove(&id) {
                    let now = running.tick();
                    running.pipeline.on_began(key, now);
                }
                None
            }
            Some(TerminalEvent::WriteStalled { .. }) => {
                let message = "the program does not take its input".to_owned();
                self.publish(&Event::worker_error("write_stalled", message, true));
                None
            }
            Some(TerminalEvent::Exited(report)) => Some(ProcessEnd::Exited { exit: report.exit, was_requested: false }),
            // The terminal's task has failed.
            None => Some(ProcessEnd::Exited { exit: relay_pty::Exit::Unknown, was_requested: false }),
        }
    }

    fn on_output(&self, running: &mut ProgramRun, chunk: &OutputChunk) {
        // The instant of the read, not of this call: a task that lags must not make echoes look late.
        running.latest = clock::timestamp(chunk.read_at()).max(running.latest);
        let at = running.latest;
        running.last_output_at = at;
        running.repeat_enter_at = None;
        running.is_idle_reported = false;
        self.note_activity();
        metrics::counter!(metric_names::OUTPUT_BYTES).increment(chunk.bytes().len() as u64);
        self.publish(&Event::WorkerStream { stream: "stdout", chunk: chunk.text().into_owned() });
        let (text, effects) = running.pipeline.on_output(at, chunk.bytes());
        if let Some(readiness) = &mut running.readiness {
            readiness.on_output(at, &text);
        }
        self.perform(running, effects);
        self.on_visible_text(running, at, &text);
        if running.exit_line.on_text(at, &text) {
            // After the effects above: verdicts of the same output count before the pipeline is closed.
            running.wants_end_since.get_or_insert(at);
            running.pipeline.close();
        }
        count_dropped_answers(running);
    }

    /// Ends an agent that has asked for it, once no message waits for its verdict.
    pub(super) fn check_end(&self, running: &ProgramRun, now: Timestamp) -> Option<ProcessEnd> {
        let since = running.wants_end_since?;
        if running.pipeline.awaits_verdict() && now < since + END_PATIENCE {
            return None;
        }
        self.publish(&Event::AgentExit { reason: "agent_requested" });
        Some(ProcessEnd::Exited { exit: relay_pty::Exit::Unknown, was_requested: true })
    }

    pub(super) fn on_command(&self, running: &mut ProgramRun, command: AgentCommand) -> Option<ProcessEnd> {
        // A caller that has given up does not read its answer.
        match command {
            AgentCommand::Release { reason, reply } => {
                return Some(ProcessEnd::Released { reason, reply: Some(reply) });
            }
            AgentCommand::SetMode { mode, reply } => {
                let (before, count) = running.pipeline.set_mode(mode);
                self.publish_mode(before, mode, count);
                let _ = reply.send(ModeChange { mode, count });
            }
            AgentCommand::Flush { reply } => {
                let count = running.pipeline.flush();
                if running.pipeline.mode() == DeliveryMode::ManualFlush {
                    self.publish(&Event::AgentPendingDrained { count, reason: "explicit_flush" });
                }
                let _ = reply.send(count);
            }
            AgentCommand::Pending { reply } => {
                let _ = reply.send(running.pipeline.pending().map(|message| self.to_pending(message)).collect());
            }
            AgentCommand::Undelivered { reply } => {
                let waiting = running.pipeline.pending().map(|message| (message, 0));
                let undelivered = running.pipeline.unsettled().chain(waiting);
                let _ = reply
                    .send(undelivered.map(|(message, attempts)| UndeliveredMessage::new(message, attempts)).collect());
            }
            AgentCommand::Ack { delivery_id, event_id, reply } => {
                let now = running.tick();
                let (answer, effects) = running.pipeline.on_ack(now, delivery_id.as_deref(), event_id.as_deref());
                self.perform(running, effects);
                let _ = reply.send(answer);
            }
            // The reply is dropped, and the dead letter stays: nothing is typed any more.
            AgentCommand::Redeliver { .. } if running.wants_end_since.is_some() => {}
            AgentCommand::Redeliver { delivery_id, reply } => {
                let message = self.take_dead_letter(&delivery_id);
                let _ = reply.send(message.is_some());
                if let Some(message) = message {
                    running.pipeline.enqueue(message);
                }
            }
            AgentCommand::Keys(keys) => {
                let now = running.tick();
                running.pipeline.on_keys(now, &keys);
                running.repeat_enter_at = None;
                running.is_idle_reported = false;
                self.note_activity();
            }
        }
        None
    }

    pub(super) fn on_done(&self, running: &mut ProgramRun, done: JobResult) {
        match done {
            JobResult::Written { request, result: Ok(receipt) } => {
                self.expect_effect_of_enter(running);
                let at = clock::timestamp(receipt.finished_at).max(clock::timestamp(receipt.began_at));
                let effects = running.pipeline.on_written(request.key, at);
                self.note_activity();
                running.status.set(Activity::Thinking, "message");
                self.perform(running, effects);
            }
            JobResult::KeysTyped | JobResult::AckFileRemoved => {}
            // The program is ending, and its messages are kept; or the injection was taken back.
            JobResult::Written { result: Err(PtyError::Ended), .. } => {}
            JobResult::Written { request, result: Err(error) } => {
                tracing::warn!(agent.name = self.name(), %error, "a message was not typed");
                running.keys.retain(|_, key| *key != request.key);
                let now = running.tick();
                running.pipeline.on_write_failed(now, request);
            }
            JobResult::Recorded { settlement, is_written } => {
                self.on_recorded(&running.outcomes, settlement, is_written)
            }
            JobResult::FailureReported(failure) => {
                self.acknowledge(failure.message.seq);
            }
            JobResult::Notes(notes) => self.on_continuity_done(running, notes),
            JobResult::AckFiles(files) => self.on_ack_files(running, files),
        }
    }

    pub(super) fn perform(&self, running: &mut ProgramRun, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Type(request) => self.type_text(running, request),
                Effect::Withdraw(key) => withdraw_injection(running, key),
                Effect::Dequeued(message) => {
                    running.notes.add_message(&message.author.name, &message.body);
                    if message.is_in_mailbox() && self.mailbox.on_typed(&message) {
                        self.launch.services.link.fetch_refused();
                    }
                }
                Effect::Publish(event) => self.publish(&event),
                Effect::Settle(settlement) => self.on_settlement(&running.outcomes, settlement),
                Effect::Record(record) => {
                    let launch = &self.launch;
                    let learned = launch.services.verification.on_record(self.name(), &launch.program, record);
                    // Programs without an entry have nothing else in common, so they share no conclusions (ADR 0040).
                    if launch.harness.is_some() {
                        running.pipeline.set_learned(learned);
                    }
                }
                Effect::Suppressed(reason) => {
                    let labels = [("harness", self.launch.handle.harness.clone()), ("reason", reason.to_owned())];
                    metrics::counter!(metric_names::RETRIES_SUPPRESSED, &labels).increment(1);
                    self.launch.services.verification.on_suppressed(self.name(), &self.launch.program, reason);
                }
                Effect::Held(time) => self.launch.services.held.add(&self.launch.handle.harness, time),
                Effect::Fail(failure) => self.on_failure(&running.outcomes, failure),
                Effect::TaskTyped => self.note_task_typed(),
            }
        }
    }

    /// Notes that a restart in the same session does not repeat the task.
    pub(in crate::agents) fn note_task_typed(&self) {
        let (roster, name) = (self.launch.services.roster.clone(), self.name().to_owned());
        self.launch.services.tasks.spawn_blocking(move || {
            if let Err(error) = roster.mark_task_typed(&name) {
                tracing::error!(
                    error = format!("{error:#}"),
                    "failed to store that the task was typed, a restart may type it again"
                );
            }
        });
    }

    fn type_text(&self, running: &mut ProgramRun, request: TypeRequest) {
        let harness = self.launch.harness.as_ref();
        let mut injection = Injection { continuation: CONTINUATION, ..Injection::new(request.text.clone()) };
        injection.lead = match request.lead {
            Lead::Nothing => None,
            Lead::Interrupt => Some(LeadKeys { keys: Bytes::from_static(INTERRUPT), pause: INTERRUPT_PAUSE }),
            Lead::Dismiss => Some(LeadKeys { keys: Bytes::from_static(DISMISS), pause: DISMISS_PAUSE }),
        };
        if let Some(harness) = harness {
            injection.enter_gap = Duration::from_millis(harness.enter_gap_ms);
            injection.paste = if harness.paste { PasteStyle::WhenEnabled } else { PasteStyle::Never };
        }
        // The guards come before the text is handed over: its echo may follow at once.
        if request.may_echo_exit {
            running.exit_line.on_typed(running.latest);
        }
        running.continuity.on_typed(running.latest, &injection.text);
        running.context.on_typed(running.latest, &injection.text);
        match running.process.terminal.inject(injection) {
            Ok(mut ticket) => {
                let labels =
                    [("harness", self.launch.handle.harness.clone()), ("attempt", request.attempt.to_string())];
                metrics::counter!(metric_names::INJECTIONS, &labels).increment(1);
                running.keys.insert(ticket.id(), request.key);
                running
                    .works
                    .push(Box::pin(async move { JobResult::Written { request, result: ticket.written().await } }));
            }
            Err(PtyError::InjectionQueueFull) => running.pipeline.on_refused(running.latest, request),
            // The program is ending; its messages are kept.
            Err(error) => tracing::debug!(agent.name = self.name(), %error, "a message cannot be typed"),
        }
    }

    fn check_ready(&self, running: &mut ProgramRun, now: Timestamp) {
        if running.readiness.is_none() {
            return;
        }
        let screen = running.process.terminal.snapshot(SnapshotFormat::Plain).contents;
        if self.is_behind_gate(running, now, &screen) {
            return;
        }
        let Some(readiness) = &running.readiness else { return };
        let terminal = &running.process.terminal;
        let Some(sign) = readiness.evaluate(now, &screen, &terminal.text_before_cursor()) else { return };
        running.readiness = None;
        running.pipeline.set_ready();
        if sign == ReadySign::GaveUp {
            let message = "the program gave no sign of being ready".to_owned();
            self.publish(&Event::worker_error("not_ready", message, false));
        }
        self.publish_ready(running);
    }

    fn read_screen(&self, running: &mut ProgramRun, now: Timestamp) -> ScreenFacts {
        let terminal = running.process.terminal.clone();
        let modes = terminal.input_modes();
        let bracketed_paste = modes.is_ok_and(|modes| modes.bracketed_paste);
        let watches_gates = self.watches_gates(running);
        if !watches_gates && !running.pipeline.wants_screen(now) {
            return ScreenFacts { bracketed_paste, ..ScreenFacts::default() };
        }
        let screen = terminal.snapshot(SnapshotFormat::Plain).contents;
        let is_gated = watches_gates && self.is_behind_gate(running, now, &screen);
        let harness = self.launch.harness.as_ref();
        let rests = now >= running.last_output_at + REST
            && harness.is_some_and(|harness| harness.is_at_prompt(&terminal.text_before_cursor()));
        ScreenFacts {
            at_prompt_since: rests.then_some(running.last_output_at),
            is_folded: harness
                .and_then(|harness| harness.fold_pattern.as_ref())
                .is_some_and(|pattern| pattern.is_match(&screen)),
            has_suggestion: harness
                .and_then(|harness| harness.ghost_text.as_ref())
                .is_some_and(|pattern| pattern.is_match(&screen)),
            squashed: squash(&screen),
            is_write_stalled: terminal.input_status().stalled_since.is_some(),
            bracketed_paste,
            is_gated,
        }
    }

    fn idle_at(&self, running: &ProgramRun) -> Option<Timestamp> {
        let threshold = self.launch.handle.spec.idle_threshold_secs;
        let is_busy = running.pipeline.unsettled_count() > 0 || running.readiness.is_some();
        (threshold > 0 && !is_busy).then(|| running.last_output_at + Duration::from_secs(threshold))
    }

    fn check_idle(&self, running: &mut ProgramRun, now: Timestamp) {
        if running.is_idle_reported || self.idle_at(running).is_none_or(|idle_at| now < idle_at) {
            return;
        }
        running.is_idle_reported = true;
        let silence = now.duration_since(running.last_output_at);
        // No silence is longer than the milliseconds of an `i64`.
        let since = clock::unix_ms() - i64::try_from(silence.as_millis()).unwrap_or(0);
        self.info.send_modify(|info| info.state = AgentState::Idle);
        running.status.set(Activity::Idle, "silence");
        self.publish(&Event::AgentIdle { idle_secs: silence.as_secs(), since });
    }
}

/// Counts answers to the program's queries that the terminal had no room for since the last call.
pub(super) fn count_dropped_answers(running: &mut ProgramRun) {
    let dropped = running.process.terminal.input_status().dropped_answers;
    let earlier = std::mem::replace(&mut running.dropped_answers, dropped);
    if dropped > earlier {
        count_dropped_entries("terminal_answers", dropped - earlier);
    }
}

/// Takes an injection back, unless it has begun.
fn withdraw_injection(running: &mut ProgramRun, key: u64) {
    let queued = running.keys.iter().find(|(_, candidate)| **candidate == key);
    // Otherwise it has begun, and its events follow.
    if let Some(id) = queued.map(|(id, _)| *id)
        && running.process.terminal.withdraw(id)
    {
        running.keys.remove(&id);
        let now = running.tick();
        running.pipeline.on_withdrawn(key, now);
    }
}
