//! [`AgentTask`]: the one task of an agent. It runs the agent's programs, one after the other, feeds the pipeline with
//! what happens, and performs the pipeline's effects.

mod ack_search;
mod arrivals;
mod event_handlers;
mod run;

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::StreamExt as _;
use relay_pty::{Exit, Terminal};
use relay_verification::strategy::Learned;
use serde_json::json;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{sleep_until, timeout},
};

use self::event_handlers::count_dropped_answers;
pub(super) use self::{
    arrivals::reference,
    run::{JobResult, ProgramRun, Works},
};
use super::{
    AgentCommand, AgentInfo, AgentState,
    process::{Launch, StartedProcess},
    spawner::process_facts,
    spec::RestartCount,
};
use crate::{
    api::types::Event,
    clock,
    injection::{DeliveryMode, Pipeline, Profile, Readiness},
    linux::folder_changed,
    mailbox::{Author, Message, Origin, SharedMailbox, Urgency},
    metric_names,
};

/// Time between the polite signals to a released agent and SIGKILL.
const RELEASE_GRACE: Duration = Duration::from_secs(2);
/// Maximum wait for outcomes that are not written when a program ends. The agent's next program takes over those that
/// are left; with the agent's end they are given up, and the engine repeats their messages to the next agent.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);

/// End of one program.
pub(in crate::agents) enum ProcessEnd {
    /// It ended by itself, or printed `/exit`.
    Exited {
        exit: Exit,
        was_requested: bool,
    },
    Released {
        reason: Option<String>,
        reply: Option<oneshot::Sender<()>>,
    },
}

/// Task of one agent.
pub(super) struct AgentTask {
    pub(super) launch: Launch,
    pub(super) profile: Profile,
    pub(super) mailbox: Arc<SharedMailbox>,
    pub(super) info: watch::Sender<AgentInfo>,
    pub(super) commands: mpsc::Receiver<AgentCommand>,
    restarts: RestartCount,
}

impl AgentTask {
    pub(super) fn new(
        launch: Launch,
        profile: Profile,
        mailbox: Arc<SharedMailbox>,
        info: watch::Sender<AgentInfo>,
        commands: mpsc::Receiver<AgentCommand>,
    ) -> Self {
        Self { launch, profile, mailbox, info, commands, restarts: RestartCount::default() }
    }

    pub(super) async fn run(mut self, first: StartedProcess) {
        let mut process = Some(first);
        let mut left = VecDeque::from_iter(self.announced_task());
        let (mut learned, mut mode) = (self.known_of_program(), DeliveryMode::default());
        let mut outcomes = Works::new();
        while let Some(started) = process.take() {
            let mut running = self.begin(started, left, learned, mode);
            running.outcomes = outcomes;
            let mut end = self.drive(&mut running).await;
            // First: after it no process is left that could write an ack file.
            self.end_program(running.process.terminal.clone(), &mut end).await;
            count_dropped_answers(&mut running);
            self.read_last_acks(&mut running).await;
            self.end_continuity(&mut running);
            self.finish_works(&mut running).await;
            outcomes = std::mem::take(&mut running.outcomes);
            let life = running.process.started_at.elapsed();
            self.note_cancelled(&running);
            // After the last acks and works: what they did not settle is left for the next program.
            let unfinished = running.pipeline.end();
            for typed in unfinished.typed.iter().filter(|typed| typed.is_in_mailbox()) {
                self.mailbox.on_requeued(typed);
            }
            left = unfinished.typed.into_iter().chain(unfinished.waiting).collect();
            (learned, mode) = (unfinished.learned, unfinished.mode);
            self.info.send_modify(|info| info.terminal = None);
            process = self.conclude(end, life, left.len()).await;
            // A session that was resumed has its task already.
            let has_task = left.iter().any(|message| message.origin == Origin::Task);
            if process.is_some() && !has_task && !self.launch.handle.spec.is_resumable {
                left.extend(self.announced_task());
            }
        }
    }

    /// Returns the conclusions about the program. A program without an entry starts without any.
    fn known_of_program(&self) -> Learned {
        let launch = &self.launch;
        if launch.harness.is_some() { launch.services.verification.learned(&launch.program) } else { Learned::new() }
    }

    fn begin(
        &self,
        process: StartedProcess,
        left: VecDeque<Message>,
        learned: Learned,
        mode: DeliveryMode,
    ) -> ProgramRun {
        let mut pipeline = Pipeline::new(self.profile.clone(), learned);
        pipeline.set_mode(mode);
        left.into_iter().for_each(|message| pipeline.enqueue(message));
        let now = clock::now();
        let payload = json!({ "pid": process.terminal.identity().pid, "restarts": self.restarts.restarts });
        self.report("session.starting", payload, None);
        let rule = self.launch.harness.as_ref().and_then(|harness| harness.ready.clone());
        ProgramRun::new(process, pipeline, Readiness::new(now, rule), now)
    }

    /// Serves the program until its end.
    async fn drive(&mut self, running: &mut ProgramRun) -> ProcessEnd {
        loop {
            let now = running.tick();
            self.advance(running, now);
            if let Some(end) = self.check_end(running, now) {
                return end;
            }
            self.show(running);
            let deadline = clock::instant(self.next_deadline(running, now));
            tokio::select! {
                event = running.process.events.next() => {
                    if let Some(end) = self.on_terminal_event(running, event) {
                        return end;
                    }
                }
                command = self.commands.recv() => {
                    let Some(command) = command else { return ProcessEnd::Released { reason: None, reply: None } };
                    if let Some(end) = self.on_command(running, command) {
                        return end;
                    }
                }
                () = self.mailbox.arrived.notified() => self.on_arrived(running),
                () = folder_changed(self.launch.ack_watch.as_ref()) => running.ack_files_due = running.latest,
                // An empty set yields `None` at once, which switches the arm off for this round.
                Some(done) = running.works.next() => self.on_done(running, done),
                Some(done) = running.outcomes.next() => self.on_done(running, done),
                () = sleep_until(deadline) => {}
            }
        }
    }

    /// Ends the program, if it still runs, and its descendants. A program that has asked for its end may run until
    /// then, so `end` gets its exit status here.
    async fn end_program(&self, terminal: Terminal, end: &mut ProcessEnd) {
        let grace = match end {
            ProcessEnd::Exited { was_requested: false, .. } => Duration::ZERO,
            ProcessEnd::Exited { was_requested: true, .. } | ProcessEnd::Released { .. } => RELEASE_GRACE,
        };
        match terminal.end(grace).await {
            Ok(report) => {
                if let ProcessEnd::Exited { exit, was_requested: true } = end {
                    *exit = report.exit.unwrap_or(Exit::Unknown);
                }
                if !report.survivors.is_empty() {
                    let survivors = report.survivors;
                    tracing::error!(agent.name = self.name(), ?survivors, "failed to end all processes of an agent");
                }
            }
            Err(error) => tracing::error!(agent.name = self.name(), %error, "an agent's processes could not be ended"),
        }
    }

    /// Waits for work that was begun, and for outcomes that are being stored.
    async fn finish_works(&mut self, running: &mut ProgramRun) {
        let finish = async {
            loop {
                let done = tokio::select! {
                    Some(done) = running.works.next() => done,
                    Some(done) = running.outcomes.next() => done,
                    // Both sets are empty.
                    else => break,
                };
                self.on_done(running, done);
            }
        };
        if timeout(SETTLE_TIMEOUT, finish).await.is_err() {
            tracing::warn!(
                agent.name = self.name(),
                count = running.outcomes.len(),
                "storing outcomes timed out, the next program takes them over or their messages are repeated"
            );
        }
    }

    /// Reports the end, and starts the program again if the policy says so.
    async fn conclude(&mut self, end: ProcessEnd, life: Duration, left: usize) -> Option<StartedProcess> {
        match end {
            ProcessEnd::Released { reason, reply } => {
                self.conclude_release(left, reason).await;
                if let Some(reply) = reply {
                    // The caller may have given up.
                    let _ = reply.send(());
                }
                None
            }
            ProcessEnd::Exited { exit, was_requested } => {
                let (code, signal) = code_and_signal(exit);
                // A status that was lost counts as a failure: nothing says that the end was on purpose.
                let is_failure = !was_requested && exit != Exit::Code(0);
                if is_failure {
                    let crashes = &self.launch.services.crashes;
                    crashes.record(self.name(), code, signal, life.as_secs(), clock::unix_ms());
                    let crashes = crashes.clone();
                    self.launch.services.tasks.spawn_blocking(move || {
                        if let Err(error) = crashes.write() {
                            tracing::warn!(
                                error = format!("{error:#}"),
                                "failed to store a crash, it is missing after a restart"
                            );
                        }
                    });
                }
                let policy = self.launch.handle.spec.restart_policy.filter(|policy| policy.enabled && is_failure);
                let decision = policy.map(|policy| self.restarts.on_failure(&policy, life));
                let signal = signal.map(|signal| signal.to_string());
                let kind = if is_failure { "session.failed" } else { "session.released" };
                self.report(kind, json!({ "code": code, "signal": signal }), None);
                // Published after `leave`, which frees the name: a driver that reads the event may use it at once.
                let exited = Event::AgentExited { code, signal: signal.clone(), reason: "child_exited" };
                match decision {
                    None => {
                        self.leave().await;
                        self.report_left(left, "agent_exited");
                        self.publish(&exited);
                        None
                    }
                    Some(Err(reason)) => {
                        self.leave().await;
                        self.report_left(left, "agent_exited");
                        self.publish(&exited);
                        self.publish(&Event::AgentPermanentlyDead { reason });
                        None
                    }
                    Some(Ok(pause)) => self.restart(code, signal, pause, left).await,
                }
            }
        }
    }

    async fn restart(
        &mut self,
        code: Option<i32>,
        signal: Option<String>,
        pause: Duration,
        left: usize,
    ) -> Option<StartedProcess> {
        let restart_count = self.restarts.restarts;
        let delay_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
        self.publish(&Event::AgentRestarting { code, signal: signal.clone(), restart_count, delay_ms });
        // A fixed instant: commands during the pause do not begin it again.
        let due = tokio::time::Instant::now() + pause;
        loop {
            tokio::select! {
                () = sleep_until(due) => break,
                command = self.commands.recv() => match command {
                    Some(AgentCommand::Release { reason, reply }) => {
                        self.conclude_release(left, reason).await;
                        let _ = reply.send(());
                        return None;
                    }
                    // Answered with an error by dropping its reply: no program runs.
                    Some(_) => {}
                    None => return None,
                },
            }
        }
        match StartedProcess::start(&self.launch, true).await {
            Ok(process) => {
                let pid = process.terminal.identity().pid;
                let terminal = process.terminal.clone();
                self.info.send_modify(|info| {
                    *info = AgentInfo {
                        terminal: Some(terminal),
                        // The counts stay, since the gauge of all agents is moved by differences to them.
                        mode: info.mode,
                        pending_count: info.pending_count,
                        unsettled_count: info.unsettled_count,
                        ..AgentInfo::starting(clock::unix_ms())
                    };
                });
                self.launch.services.counters.restarts.fetch_add(1, Ordering::Relaxed);
                self.publish(&Event::AgentRestarted { restart_count, pid });
                Some(process)
            }
            Err(error) => {
                self.leave().await;
                self.report_left(left, "agent_exited");
                self.publish(&Event::AgentExited { code, signal, reason: "child_exited" });
                self.publish(&Event::AgentPermanentlyDead { reason: error.to_string() });
                None
            }
        }
    }

    /// The agent's first task, as a message that has come.
    fn announced_task(&self) -> Option<Message> {
        // It does not wait in manual mode.
        self.task_message().inspect(|task| self.publish_arrival(task, DeliveryMode::AutoInject))
    }

    /// The agent's first task as a message, unless its arguments contain it.
    pub(super) fn task_message(&self) -> Option<Message> {
        let spec = &self.launch.handle.spec;
        let task = spec.task.as_deref().filter(|task| !task.trim().is_empty())?;
        if spec.args.iter().any(|arg| arg == task) {
            return None;
        }
        let id = format!("init_{}", uuid::Uuid::new_v4().simple());
        Some(Message {
            delivery_id: id.clone(),
            event_id: id,
            seq: None,
            author: Author { name: "broker".to_owned(), agent_id: None },
            target: spec.name.clone(),
            body: task.to_owned(),
            thread_id: None,
            priority: 2,
            urgency: Urgency::Wait,
            origin: Origin::Task,
            queued_at_ms: clock::unix_ms(),
        })
    }

    fn show(&self, running: &ProgramRun) {
        self.show_counts(running.pipeline.mode(), running.pipeline.pending().len(), running.pipeline.unsettled_count());
    }

    pub(super) fn show_counts(&self, mode: DeliveryMode, pending: usize, unsettled: usize) {
        self.info.send_if_modified(|info| {
            let changed = info.mode != mode || info.pending_count != pending || info.unsettled_count != unsettled;
            if info.unsettled_count != unsettled {
                // By the difference: the gauge is the sum over all agents of the harness.
                let gauge = metrics::gauge!(metric_names::UNSETTLED, "harness" => self.launch.handle.harness.clone());
                gauge.increment(unsettled as f64 - info.unsettled_count as f64);
            }
            (info.mode, info.pending_count, info.unsettled_count) = (mode, pending, unsettled);
            changed
        });
    }

    /// Messages that were typed into a program that has ended: the next one gets them.
    fn note_cancelled(&self, running: &ProgramRun) {
        let labels = [("harness", self.launch.handle.harness.clone()), ("outcome", "cancelled".to_owned())];
        let count = running.pipeline.unsettled_count() as u64;
        metrics::counter!(metric_names::DELIVERIES, &labels).increment(count);
        self.show_counts(running.pipeline.mode(), running.pipeline.pending().len(), 0);
    }

    pub(super) fn note_activity(&self) {
        self.info.send_modify(|info| {
            info.state = AgentState::Working;
            info.last_activity_ms = clock::unix_ms();
        });
    }

    pub(super) fn publish_ready(&self, running: &ProgramRun) {
        let process = process_facts(&self.launch.handle.spec, Some(running.process.terminal.identity().pid));
        self.publish(&Event::WorkerReady { process });
    }

    pub(super) fn name(&self) -> &str {
        &self.launch.handle.spec.name
    }

    pub(super) fn publish(&self, event: &Event) {
        self.launch.services.hub.publish(self.name(), event);
    }
}

fn code_and_signal(exit: Exit) -> (Option<i32>, Option<i32>) {
    match exit {
        Exit::Code(code) => (Some(code), None),
        Exit::Signal(signal) => (None, Some(signal)),
        Exit::Unknown => (None, None),
    }
}
