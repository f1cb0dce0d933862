//! [`HeadlessTask`]: the one task of a headless agent. It hands over one message after the other and reports the
//! outcome.

use std::{collections::VecDeque, pin::Pin};

use futures::StreamExt as _;
use relay_pty::ProcessIdentity;
use relay_verification::{Channel, Level};
use serde_json::json;
use tokio::time::{Duration, Instant, sleep_until, timeout};

use super::{HandoverError, Headless, program::Run};
use crate::{
    agents::{
        AgentCommand, AgentError, AgentState, ModeChange,
        command::UndeliveredMessage,
        environment::environment,
        session_status::{Activity, SessionStatus},
        spawner::process_facts,
        task::{AgentTask, JobResult, Works, reference},
    },
    api::types::{DeliveryProof, Event},
    clock,
    harness::RUN_TIMEOUT,
    injection::{AckAnswer, DeliveryMode, Failure, Settlement, plain_line},
    mailbox::{Message, Origin},
    process_group::end_marked,
};

/// Maximum wait for outcomes that are being stored when the agent is released.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);

/// Task of one agent without a terminal.
pub(in crate::agents) struct HeadlessTask {
    base: AgentTask,
    headless: Headless,
    /// Marks all processes of the agent.
    marker: String,
    http: reqwest::Client,
    mode: DeliveryMode,
    /// Messages of the broker itself, which do not wait for a driver.
    own: VecDeque<Message>,
    waiting: VecDeque<Message>,
    /// Number of `waiting` messages that may be handed over in manual mode.
    released: usize,
    works: Works,
    status: SessionStatus,
}

/// A message that is being handed over.
struct Handover {
    message: Message,
    began: Instant,
    outcome: Pin<Box<dyn Future<Output = Result<(), HandoverError>> + Send>>,
}

impl HeadlessTask {
    /// Makes the task and writes down who runs, so that a later broker can end it.
    pub(in crate::agents) async fn prepare(base: AgentTask, headless: Headless) -> Result<Self, AgentError> {
        // Credentials of a session are for its server: no proxy of the environment and no other host gets them.
        let http = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).build();
        let http = http.map_err(|error| AgentError::State(error.to_string()))?;
        let marker = uuid::Uuid::new_v4().simple().to_string();
        // After everything that may fail: only the end of an agent that runs takes it out of the roster. No process
        // runs yet: its processes are found by the marker.
        base.launch.write_down(marker.clone(), ProcessIdentity::NONE).await?;
        let own = base.task_message().into_iter().collect();
        Ok(Self {
            base,
            headless,
            marker,
            http,
            mode: DeliveryMode::default(),
            own,
            waiting: VecDeque::new(),
            released: 0,
            works: Works::new(),
            status: SessionStatus::new(clock::now()),
        })
    }

    pub(in crate::agents) async fn run(mut self) {
        self.base.report("session.starting", json!({ "pid": null, "restarts": 0 }), None);
        self.base.publish(&Event::WorkerReady { process: process_facts(&self.base.launch.handle.spec, None) });
        self.own.iter().for_each(|own| self.base.publish_arrival(own, DeliveryMode::AutoInject));
        let mut current: Option<Handover> = None;
        loop {
            if current.is_none() {
                current = self.next();
            }
            self.base.show_counts(self.mode, self.waiting.len(), usize::from(current.is_some()));
            for (kind, payload) in self.status.poll(clock::now()) {
                self.base.report(kind, payload, None);
            }
            let report_due = self.status.next_report().map(clock::instant);
            // The run itself is kept in `current`: another arm that is ready first does not cancel it.
            let handing_over = async {
                match &mut current {
                    Some(handover) => handover.outcome.as_mut().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                outcome = handing_over => {
                    if let Some(handover) = current.take() {
                        self.conclude(handover, outcome);
                    }
                }
                command = self.base.commands.recv() => match command {
                    Some(AgentCommand::Release { reason, reply }) => {
                        self.leave(current, reason).await;
                        // The caller may have given up.
                        let _ = reply.send(());
                        return;
                    }
                    Some(command) => self.on_command(command, current.as_ref()),
                    None => return self.leave(current, None).await,
                },
                () = self.base.mailbox.arrived.notified() => {
                    for message in self.base.mailbox.fetch() {
                        self.base.publish_arrival(&message, self.mode);
                        self.waiting.push_back(message);
                    }
                    // The answer of the program or the server counts. Receipts that stayed would be counted as dropped.
                    self.base.mailbox.fetch_read();
                }
                Some(done) = self.works.next() => self.on_done(done),
                () = sleep_until(report_due.unwrap_or_else(Instant::now)), if report_due.is_some() => {}
            }
        }
    }

    /// Begins to hand over the next message.
    fn next(&mut self) -> Option<Handover> {
        let message = match self.own.pop_front() {
            Some(own) => own,
            None if self.mode == DeliveryMode::AutoInject || self.released > 0 => {
                let message = self.waiting.pop_front()?;
                // In `auto_inject` it is 0 and counts nothing.
                self.released = self.released.saturating_sub(1);
                if message.is_in_mailbox() && self.base.mailbox.on_typed(&message) {
                    self.base.launch.services.link.fetch_refused();
                }
                message
            }
            None => return None,
        };
        let text = plain_line(&message, self.base.launch.services.workspace_label().as_deref());
        let outcome: Pin<Box<dyn Future<Output = _> + Send>> = match &self.headless {
            Headless::Program(args) => Box::pin(self.program_run(args, text).finish()),
            Headless::AppServer(server) => {
                let (server, http) = (server.clone(), self.http.clone());
                Box::pin(async move { server.prompt(&http, &text).await })
            }
        };
        self.base.note_activity();
        self.status.set(Activity::Thinking, "message");
        self.base
            .publish(&Event::DeliveryInjected { delivery: reference(&message), proven: DeliveryProof::injected(1) });
        Some(Handover { message, began: Instant::now(), outcome })
    }

    fn program_run(&self, args: &[String], text: String) -> Run {
        let launch = &self.base.launch;
        let spec = &launch.handle.spec;
        let own = spec.args.iter().cloned();
        Run {
            agent: spec.name.clone(),
            program: spec.program.clone(),
            args: args.iter().cloned().chain(own).chain([text]).collect(),
            environment: environment(&launch.services, spec, &launch.handle, None),
            working_directory: launch.working_directory.clone(),
            account: launch.services.settings.account.clone(),
            marker: self.marker.clone(),
            limit: launch.harness.as_ref().map_or(RUN_TIMEOUT, |harness| harness.run_timeout()),
            host: launch.services.host.clone(),
            hub: launch.services.hub.clone(),
        }
    }

    fn conclude(&mut self, handover: Handover, outcome: Result<(), HandoverError>) {
        let Handover { message, began, .. } = handover;
        self.base.note_activity();
        self.base.info.send_modify(|info| info.state = AgentState::Idle);
        self.status.set(Activity::Idle, "run_ended");
        if let Err(error) = outcome {
            tracing::warn!(agent.name = self.base.name(), %error, "a headless agent has not taken a message");
            let failure = Failure { message, reason: error.reason, attempts: 1 };
            return self.base.on_failure(&self.works, Box::new(failure));
        }
        if message.origin == Origin::Task {
            self.base.note_task_typed();
        }
        let latency_ms = clock::millis(began.elapsed());
        let (delivery, channel) = (reference(&message), Channel::Api);
        let (method, confidence) = (channel.method(), channel.confidence());
        let proven = DeliveryProof { attempt: 1, level: Level::InContext, confidence, method };
        self.base.publish(&Event::DeliveryAck { delivery: delivery.clone(), verified: true, proven: proven.clone() });
        self.base.publish(&Event::DeliveryVerified {
            delivery,
            verification: method,
            verified: true,
            detail: None,
            reason: None,
            latency_ms,
            proven,
        });
        let settlement = Settlement {
            message,
            level: Level::InContext,
            method,
            confidence,
            is_verified: true,
            latency_ms,
            attempts: 1,
        };
        self.base.on_settlement(&self.works, Box::new(settlement));
    }

    fn on_done(&mut self, done: JobResult) {
        match done {
            JobResult::Recorded { settlement, is_written } => {
                self.base.on_recorded(&self.works, settlement, is_written)
            }
            JobResult::FailureReported(failure) => self.base.acknowledge(failure.message.seq),
            // Works of terminals.
            JobResult::Written { .. }
            | JobResult::KeysTyped
            | JobResult::AckFiles(_)
            | JobResult::AckFileRemoved
            | JobResult::Notes(_) => {}
        }
    }

    fn on_command(&mut self, command: AgentCommand, current: Option<&Handover>) {
        // A caller that has given up does not read its answer.
        match command {
            AgentCommand::SetMode { mode, reply } => {
                let before = std::mem::replace(&mut self.mode, mode);
                let is_drained = (before, mode) == (DeliveryMode::ManualFlush, DeliveryMode::AutoInject);
                let count = if is_drained { self.waiting.len() - self.released } else { 0 };
                self.released = 0;
                self.base.publish_mode(before, mode, count);
                let _ = reply.send(ModeChange { mode, count });
            }
            AgentCommand::Flush { reply } => {
                let is_manual = self.mode == DeliveryMode::ManualFlush;
                let count = if is_manual { self.waiting.len() - self.released } else { 0 };
                if is_manual {
                    self.released = self.waiting.len();
                    self.base.publish(&Event::AgentPendingDrained { count, reason: "explicit_flush" });
                }
                let _ = reply.send(count);
            }
            AgentCommand::Pending { reply } => {
                let _ = reply.send(self.waiting.iter().map(|message| self.base.to_pending(message)).collect());
            }
            AgentCommand::Undelivered { reply } => {
                let current = current.map(|handover| UndeliveredMessage::new(&handover.message, 1));
                let waiting = self.waiting.iter().map(|message| UndeliveredMessage::new(message, 0));
                let _ = reply.send(current.into_iter().chain(waiting).collect());
            }
            // The answer of the program or the server counts, nothing else.
            AgentCommand::Ack { reply, .. } => {
                let _ = reply.send(AckAnswer::NotFound);
            }
            AgentCommand::Redeliver { delivery_id, reply } => {
                let message = self.base.take_dead_letter(&delivery_id);
                let _ = reply.send(message.is_some());
                self.waiting.extend(message);
            }
            // Keys have no terminal, and a release ends the loop before it comes here.
            AgentCommand::Keys(_) | AgentCommand::Release { .. } => {}
        }
    }

    /// Ends the agent. What it has not taken is sent again by the engine.
    async fn leave(mut self, current: Option<Handover>, reason: Option<String>) {
        let left = self.waiting.len() + self.own.len() + usize::from(current.is_some());
        // Ends the program.
        drop(current);
        if matches!(self.headless, Headless::Program(_)) {
            end_marked(&self.base.launch.services.host, &self.marker).await;
        }
        // Before the end of the agent, after which nothing settles its messages.
        let finish = async {
            while let Some(done) = self.works.next().await {
                self.on_done(done);
            }
        };
        if timeout(SETTLE_TIMEOUT, finish).await.is_err() {
            tracing::warn!("storing outcomes timed out, their messages are repeated");
        }
        if let Headless::AppServer(server) = &self.headless
            && let Err(error) = server.release(&self.http).await
        {
            tracing::warn!(agent.name = self.base.name(), %error, "a session was not released as asked for");
        }
        self.base.show_counts(self.mode, 0, 0);
        self.base.conclude_release(left, reason).await;
    }
}
