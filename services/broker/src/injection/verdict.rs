//! Judgement of what was typed: output, signals and time.

use std::time::Duration;

use relay_verification::{
    Channel, Timestamp,
    ack_file::{AckFile, AckFileRejection},
    activity::ActivitySearch,
    attempt::IgnoredSignal,
    delivery::{AgentCondition, DeliveryEffect, DeliveryState},
    echo::{MatchDetail, squash},
};

use super::{
    effect::{Effect, Failure, Settlement},
    outstanding::OutstandingMessage,
    pipeline::{Pipeline, ScreenFacts},
};
use crate::{
    api::types::{DeliveryProof, Event},
    metric_names,
};

/// Maximum number of finished deliveries that are remembered for late acks.
const MAX_FINISHED: usize = 512;
/// A delivery for which no signal counts any more.
#[derive(Debug)]
pub(super) struct FinishedDelivery {
    delivery_id: String,
    event_id: String,
    has_failed: bool,
}

/// A delivery that was looked up by an agent's ack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AckAnswer {
    /// It counts, or has counted.
    Accepted,
    /// No such delivery is outstanding or was verified lately.
    NotFound,
    /// It has failed permanently.
    Failed,
}

impl Pipeline {
    /// Takes output of the program. Returns its visible text and the consequences.
    pub(crate) fn on_output(&mut self, at: Timestamp, bytes: &[u8]) -> (String, Vec<Effect>) {
        let mut text = String::new();
        self.cleaner.clean(bytes, &mut text);
        self.output_bytes += text.len() as u64;
        self.hold.on_output(at, text.len());
        // Before the search, which ends overdue watches.
        if self.hold.is_held(at) {
            self.extend_echoes(at);
        }
        let mut effects = Vec::new();
        // Before the echoes: the output that completes an echo is no sign of work on its message.
        let active: Vec<(u64, String)> = self.outstanding.iter_mut().filter_map(found_activity(&text)).collect();
        for (key, pattern) in active {
            effects.extend(self.on_activity(key, at, pattern));
        }
        for found in self.echo.on_text(&text, at) {
            if let Some(index) = self.outstanding.iter().position(|candidate| candidate.watch == Some(found.watch)) {
                self.outstanding[index].watch = None;
                self.outstanding[index].detail = Some(found.detail);
                effects.extend(self.signal(index, found.at, Channel::Echo));
            }
        }
        (text, effects)
    }

    /// An agent has confirmed a delivery through MCP, named by either of its ids.
    pub(crate) fn on_ack(
        &mut self,
        at: Timestamp,
        delivery_id: Option<&str>,
        event_id: Option<&str>,
    ) -> (AckAnswer, Vec<Effect>) {
        // At least one id is given: the route refuses an ack without.
        let is_named = |outstanding: &OutstandingMessage| {
            delivery_id.is_none_or(|id| outstanding.message.delivery_id == id)
                && event_id.is_none_or(|id| outstanding.message.event_id == id)
        };
        match self.outstanding.iter().position(is_named) {
            Some(index) => {
                let has_failed = self.outstanding[index].delivery.state() == DeliveryState::Failed;
                let answer = if has_failed { AckAnswer::Failed } else { AckAnswer::Accepted };
                (answer, self.signal(index, at, Channel::Mcp))
            }
            None => (self.answer_finished(delivery_id, event_id), Vec::new()),
        }
    }

    fn answer_finished(&self, delivery_id: Option<&str>, event_id: Option<&str>) -> AckAnswer {
        let is_named = |finished: &&FinishedDelivery| {
            delivery_id.is_none_or(|id| id == finished.delivery_id) && event_id.is_none_or(|id| id == finished.event_id)
        };
        match self.finished.iter().rev().find(is_named) {
            None => return AckAnswer::NotFound,
            Some(finished) if !finished.has_failed => return AckAnswer::Accepted,
            Some(_) => {}
        }
        let reason = IgnoredSignal::AfterFailure.as_str();
        metrics::counter!(metric_names::SIGNALS_IGNORED, "reason" => reason).increment(1);
        AckAnswer::Failed
    }

    /// The engine says that the agent has read a message. After the first signal the broker itself reports messages as
    /// read, so only a message without one counts.
    pub(crate) fn on_read(&mut self, at: Timestamp, event_id: &str) -> Vec<Effect> {
        let is_read = |outstanding: &OutstandingMessage| {
            outstanding.message.event_id == event_id && outstanding.delivery.strongest().is_none()
        };
        let Some(index) = self.outstanding.iter().position(is_read) else { return Vec::new() };
        self.signal(index, at, Channel::Mcp)
    }

    /// Ack files that are looked for, relative to the agent's working directory.
    pub(crate) fn awaited_files(&self) -> impl Iterator<Item = (u64, AckFile)> {
        self.outstanding.iter().filter(|outstanding| !outstanding.record.has_file_ack).map(|outstanding| {
            let message = &outstanding.message;
            (outstanding.key, AckFile::new(&self.profile.agent, &message.delivery_id, &message.event_id))
        })
    }

    /// Judges the content of an ack file.
    pub(crate) fn on_ack_file(
        &mut self,
        key: u64,
        at: Timestamp,
        path: &str,
        content: &[u8],
    ) -> Result<Vec<Effect>, AckFileRejection> {
        let Some(index) = self.index_of(key) else { return Ok(Vec::new()) };
        let message = &self.outstanding[index].message;
        AckFile::new(&self.profile.agent, &message.delivery_id, &message.event_id).judge(path, content)?;
        Ok(self.signal(index, at, Channel::File))
    }

    /// Takes everything that time decides.
    pub(super) fn check_due(&mut self, now: Timestamp, screen: &ScreenFacts) -> Vec<Effect> {
        let mut effects = Vec::new();
        for index in 0..self.outstanding.len() {
            let delivery = &self.outstanding[index].delivery;
            let is_due = delivery.next_deadline().is_some_and(|deadline| deadline <= now);
            let waits =
                matches!(delivery.state(), DeliveryState::Unverified { .. } | DeliveryState::ReinjectionDue { .. });
            if !is_due && !waits {
                continue;
            }
            // After the attempt of a program that need not show anything, an echo still raises the level.
            let is_echo_over = delivery.attempt().is_none_or(|attempt| now >= attempt.echo_ends_at());
            // Before the tick, which would judge the attempt as silent.
            if is_due
                && let Some(watch) = self.outstanding[index].watch
                && let Some(found) = if is_echo_over { self.echo.end(watch) } else { self.echo.end_if_found(watch) }
            {
                self.outstanding[index].watch = None;
                self.outstanding[index].detail = Some(found.detail);
                effects.extend(self.signal(index, found.at, Channel::Echo));
            }
            let condition = self.condition(index, now, screen);
            let due = self.outstanding[index].delivery.tick(now, &condition);
            if due.contains(&DeliveryEffect::Held) {
                effects.push(Effect::Suppressed(self.suppression_reason(&condition)));
            }
            effects.extend(self.apply(index, now, due));
        }
        effects.extend(self.forget_finished(now));
        effects
    }

    fn condition(&self, index: usize, now: Timestamp, screen: &ScreenFacts) -> AgentCondition {
        let event_id = squash(&self.outstanding[index].message.event_id);
        AgentCondition {
            is_echo_reliable: self.learned.is_echo_reliable(),
            at_prompt_since: screen.at_prompt_since,
            is_output_held: self.hold.is_held(now),
            is_message_visible: screen.is_folded || (!event_id.is_empty() && screen.squashed.contains(&event_id)),
            is_write_stalled: screen.is_write_stalled,
        }
    }

    /// The first condition that forbids to type a message again.
    fn suppression_reason(&self, condition: &AgentCondition) -> &'static str {
        if self.profile.strategy.max_reinjections == 0 {
            "never_for_program"
        } else if !condition.is_echo_reliable {
            "echo_unreliable"
        } else if condition.is_write_stalled {
            "write_stalled"
        } else if condition.is_output_held {
            "output_rate"
        } else if condition.is_message_visible {
            "message_visible"
        } else {
            "not_at_prompt"
        }
    }

    fn forget_finished(&mut self, now: Timestamp) -> Vec<Effect> {
        let mut effects = Vec::new();
        // The one that is being written stays: the end of its write opens the way for the next.
        let writing = self.writing.map(|writing| writing.key);
        let is_over =
            |outstanding: &mut OutstandingMessage| Some(outstanding.key) != writing && outstanding.is_over(now);
        for outstanding in self.outstanding.extract_if(.., is_over) {
            if let Some(watch) = outstanding.watch {
                self.echo.end(watch);
            }
            if self.finished.len() == MAX_FINISHED {
                self.finished.pop_front();
            }
            self.finished.push_back(FinishedDelivery {
                delivery_id: outstanding.message.delivery_id,
                event_id: outstanding.message.event_id,
                has_failed: outstanding.delivery.state() == DeliveryState::Failed,
            });
            // A program without an entry learns here only. The others get the conclusions of all their agents by the
            // effect.
            self.learned.record(outstanding.record);
            effects.push(Effect::Record(outstanding.record));
        }
        effects
    }

    fn extend_echoes(&mut self, at: Timestamp) {
        for outstanding in &mut self.outstanding {
            if let Some(ends_at) = outstanding.delivery.extend_echo(at)
                && let Some(watch) = outstanding.watch
            {
                self.echo.set_deadline(watch, ends_at);
            }
        }
    }

    fn on_activity(&mut self, key: u64, at: Timestamp, pattern: String) -> Vec<Effect> {
        let Some(index) = self.index_of(key) else { return Vec::new() };
        let mut effects = self.signal(index, at, Channel::Activity);
        let (delivery, proven) = (self.outstanding[index].reference(), self.outstanding[index].proven());
        let active = Effect::Publish(Box::new(Event::DeliveryActive { delivery, pattern, proven }));
        effects.extend(self.outstanding[index].hold_back(vec![active]));
        effects
    }

    fn signal(&mut self, index: usize, at: Timestamp, channel: Channel) -> Vec<Effect> {
        self.outstanding[index].note_signal(at, channel);
        let effects = self.outstanding[index].delivery.signal(at, channel);
        self.apply(index, at, effects)
    }

    fn apply(&mut self, index: usize, at: Timestamp, delivery_effects: Vec<DeliveryEffect>) -> Vec<Effect> {
        let effects = delivery_effects.into_iter().flat_map(|effect| self.apply_one(index, at, effect)).collect();
        let effects = self.outstanding[index].hold_back(effects);
        self.outstanding[index].release_texts();
        effects
    }

    fn apply_one(&mut self, index: usize, at: Timestamp, effect: DeliveryEffect) -> Vec<Effect> {
        let is_last = index + 1 == self.outstanding.len();
        match effect {
            DeliveryEffect::Verified { proof, .. } => {
                self.gate.pause.verified();
                self.has_verdict = true;
                self.on_verdict(is_last);
                let outstanding = &mut self.outstanding[index];
                let patterns = self.profile.activity.iter().map(String::as_str);
                // Now, since the line is freed with the outcome.
                outstanding.activity = Some(ActivitySearch::new(patterns, &outstanding.typed.line));
                let latency_ms = millis(proof.elapsed);
                settle(outstanding, true, proof.channel.method(), latency_ms, None)
            }
            DeliveryEffect::Closed { reason, proof } => {
                self.gate.pause.unverified();
                self.has_verdict = true;
                self.on_verdict(is_last);
                let outstanding = &self.outstanding[index];
                // Without a proof, the time since the attempt began.
                let waited = || outstanding.delivery.attempt().map(|attempt| at.duration_since(attempt.started_at()));
                let elapsed = proof.map(|proof| proof.elapsed).or_else(waited).unwrap_or_default();
                let latency_ms = millis(elapsed);
                settle(outstanding, false, "timeout_fallback", latency_ms, Some(reason.as_str()))
            }
            DeliveryEffect::Upgraded { proof, .. } => {
                let outstanding = &self.outstanding[index];
                let (delivery, proven) = (outstanding.reference(), outstanding.proven());
                let latency_ms = millis(proof.elapsed);
                vec![Effect::Publish(Box::new(Event::DeliveryUpgraded { delivery, latency_ms, proven }))]
            }
            DeliveryEffect::Reinject { attempt } => {
                self.gate.pause.attempt_failed();
                self.on_verdict(is_last);
                let (delivery, proven) = (self.outstanding[index].reference(), self.outstanding[index].proven());
                let proven = DeliveryProof { attempt, ..proven };
                vec![Effect::Publish(Box::new(Event::DeliveryRetry { delivery, attempts: attempt, proven }))]
            }
            DeliveryEffect::Held => {
                self.gate.pause.unverified();
                self.on_verdict(is_last);
                Vec::new()
            }
            DeliveryEffect::Failed(reason) => {
                self.gate.pause.attempt_failed();
                self.has_verdict = true;
                self.on_verdict(is_last);
                let outstanding = &self.outstanding[index];
                let attempts = outstanding.delivery.attempt_count();
                vec![Effect::Fail(Box::new(Failure { message: outstanding.message.clone(), reason, attempts }))]
            }
            DeliveryEffect::Cancelled => Vec::new(),
            DeliveryEffect::Ignored { channel, reason } => {
                tracing::debug!(method = channel.method(), reason = reason.as_str(), "a signal does not count");
                metrics::counter!(metric_names::SIGNALS_IGNORED, "reason" => reason.as_str()).increment(1);
                Vec::new()
            }
        }
    }

    /// The verdict on the newest injection opens the gate for the next.
    fn on_verdict(&mut self, is_last: bool) {
        if is_last {
            self.gate.on_verdict();
        }
    }

    pub(super) fn index_of(&self, key: u64) -> Option<usize> {
        self.outstanding.iter().position(|outstanding| outstanding.key == key)
    }
}

fn found_activity(text: &str) -> impl FnMut(&mut OutstandingMessage) -> Option<(u64, String)> {
    move |outstanding| {
        let pattern = outstanding.activity.as_mut()?.on_text(text)?.to_owned();
        outstanding.activity = None;
        Some((outstanding.key, pattern))
    }
}

fn settle(
    outstanding: &OutstandingMessage,
    is_verified: bool,
    verification: &'static str,
    latency_ms: u64,
    reason: Option<&'static str>,
) -> Vec<Effect> {
    let proven = outstanding.proven();
    let detail = outstanding.detail.filter(|_| verification == Channel::Echo.method()).map(|detail| match detail {
        MatchDetail::Exact => "exact",
        MatchDetail::Tokens => "tokens",
    });
    let settlement = Settlement {
        message: outstanding.message.without_body(),
        level: proven.level,
        method: proven.method,
        confidence: proven.confidence,
        is_verified,
        latency_ms,
        attempts: outstanding.delivery.attempt_count(),
    };
    let ack = Event::DeliveryAck { delivery: outstanding.reference(), verified: is_verified, proven: proven.clone() };
    let verdict = Event::DeliveryVerified {
        delivery: outstanding.reference(),
        verification,
        verified: is_verified,
        detail,
        reason,
        latency_ms,
        proven,
    };
    vec![Effect::Publish(Box::new(ack)), Effect::Publish(Box::new(verdict)), Effect::Settle(Box::new(settlement))]
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
