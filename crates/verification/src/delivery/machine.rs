//! The state machine of a [`Delivery`].

use super::effect::{DeliveryEffect, FailureReason, UnverifiedReason};
use super::rules::{AgentCondition, DeliveryRules, UNVERIFIED_LIMIT, UnverifiedPolicy};
use crate::attempt::{Attempt, AttemptEffect, IgnoredSignal};
use crate::level::level_of;
use crate::{Channel, Level, Proof, Timestamp};

/// One message for one agent, from the queue to its outcome.
#[derive(Debug, Clone)]
pub struct Delivery {
    rules: DeliveryRules,
    state: DeliveryState,
    attempt: Option<Attempt>,
    attempt_count: u32,
    strongest: Option<Proof>,
    was_extended: bool,
}

/// Stage of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryState {
    /// Not typed yet.
    Queued,
    /// Typed; signals are awaited.
    Injected,
    /// To be typed again.
    ReinjectionDue {
        /// Instant at which the last attempt timed out.
        since: Timestamp,
    },
    /// Written, not confirmed, not failed.
    Unverified {
        /// Instant at which the last attempt timed out.
        since: Timestamp,
    },
    /// Verified and acknowledged.
    Verified,
    /// Acknowledged without being verified.
    Closed,
    /// Failed for good.
    Failed,
    /// The agent ended before an outcome.
    Cancelled,
}

impl DeliveryState {
    /// Returns `true` if the delivery has its outcome. Upgrades may still follow.
    pub fn is_final(self) -> bool {
        match self {
            Self::Queued | Self::Injected | Self::ReinjectionDue { .. } | Self::Unverified { .. } => false,
            Self::Verified | Self::Closed | Self::Failed | Self::Cancelled => true,
        }
    }
}

impl Delivery {
    /// Creates a delivery that waits in its agent's queue.
    pub fn new(rules: DeliveryRules) -> Self {
        Self {
            rules,
            state: DeliveryState::Queued,
            attempt: None,
            attempt_count: 0,
            strongest: None,
            was_extended: false,
        }
    }

    /// Returns the stage of the delivery.
    pub fn state(&self) -> DeliveryState {
        self.state
    }

    /// Returns the highest level so far.
    pub fn level(&self) -> Level {
        level_of(self.strongest)
    }

    /// Returns the signal that proves the level.
    pub fn strongest(&self) -> Option<Proof> {
        self.strongest
    }

    /// Returns the number of attempts so far: the times that the message was typed.
    pub fn attempt_count(&self) -> u32 {
        self.attempt_count
    }

    /// Returns the last attempt; `None` while queued. Its instants are the deadlines of the echo watch.
    pub fn attempt(&self) -> Option<&Attempt> {
        self.attempt.as_ref()
    }

    /// Begins an attempt when the first byte is handed to the terminal. `false` if the text must not be typed: it was
    /// not due, or a signal or the agent's end came first. A re-injection that was called off and could not be taken
    /// back is an attempt as well: it is counted, and its signals are awaited.
    #[must_use]
    pub fn begin_attempt(&mut self, at: Timestamp) -> bool {
        let is_due = match self.state {
            DeliveryState::Queued | DeliveryState::ReinjectionDue { .. } => true,
            DeliveryState::Unverified { .. } => self.attempt_count <= self.rules.max_reinjections,
            DeliveryState::Injected
            | DeliveryState::Verified
            | DeliveryState::Closed
            | DeliveryState::Failed
            | DeliveryState::Cancelled => false,
        };
        if is_due {
            self.attempt = Some(Attempt::new(self.rules.attempt, at));
            self.attempt_count += 1;
            self.state = DeliveryState::Injected;
        }
        is_due
    }

    /// Notes that text and Enter of the last attempt were taken by the terminal.
    pub fn enter_written(&mut self, at: Timestamp) {
        if let Some(attempt) = &mut self.attempt {
            attempt.enter_written(at);
        }
    }

    /// Notes that the agent's output rate is above the threshold of the hold. Once per delivery this gives the echo
    /// more time; returns the new end of the echo window then.
    pub fn extend_echo(&mut self, at: Timestamp) -> Option<Timestamp> {
        let attempt = self.attempt.as_mut().filter(|_| self.state == DeliveryState::Injected)?;
        if self.was_extended || !attempt.extend_echo(at) {
            return None;
        }
        self.was_extended = true;
        Some(attempt.echo_ends_at())
    }

    /// Takes a signal for this delivery. It counts for the running attempt, whichever of the writes caused it.
    pub fn signal(&mut self, at: Timestamp, channel: Channel) -> Vec<DeliveryEffect> {
        let ignored = |reason| vec![DeliveryEffect::Ignored { channel, reason }];
        match self.state {
            DeliveryState::Queued => ignored(IgnoredSignal::BeforeInjection),
            DeliveryState::Failed => ignored(IgnoredSignal::AfterFailure),
            DeliveryState::Cancelled => ignored(IgnoredSignal::AfterAgentEnded),
            DeliveryState::Injected
            | DeliveryState::ReinjectionDue { .. }
            | DeliveryState::Unverified { .. }
            | DeliveryState::Verified
            | DeliveryState::Closed => self.signal_attempt(at, channel),
        }
    }

    fn signal_attempt(&mut self, at: Timestamp, channel: Channel) -> Vec<DeliveryEffect> {
        let Some(attempt) = &mut self.attempt else { return Vec::new() };
        let counted = attempt.check(at, channel);
        let mut effects = Vec::new();
        for effect in attempt.signal(at, channel) {
            match effect {
                AttemptEffect::TimeOut => {
                    // A signal does not tell the agent's condition, so `tick` decides later. The state changes at once,
                    // because the effect of the late signal follows and depends on it.
                    self.state = DeliveryState::Unverified { since: at };
                    effects.push(DeliveryEffect::Held);
                }
                AttemptEffect::Ignore(reason) => match self.close_late(at, channel) {
                    Some(effect) => effects.push(effect),
                    None => effects.push(DeliveryEffect::Ignored { channel, reason }),
                },
                // The delivery may be at a higher level than its last attempt, and demand more.
                AttemptEffect::Acknowledge(_) | AttemptEffect::Upgrade(_) => {}
            }
        }
        if let Ok(proof) = counted {
            effects.extend(self.take_proof(proof));
        }
        effects
    }

    fn take_proof(&mut self, proof: Proof) -> Option<DeliveryEffect> {
        let rises = proof.level() > self.level();
        self.raise(proof);
        if self.state.is_final() {
            return rises.then_some(DeliveryEffect::Upgraded { proof, attempt: self.attempt_count });
        }
        self.verify(proof)
    }

    /// Verifies a delivery without an outcome by a signal that is strong enough. Activity is not: it does not say
    /// which message the agent works on.
    fn verify(&mut self, proof: Proof) -> Option<DeliveryEffect> {
        if !proof.channel.acknowledges() || proof.level() < self.rules.minimum {
            return None;
        }
        self.state = DeliveryState::Verified;
        Some(DeliveryEffect::Verified { proof, attempt: self.attempt_count })
    }

    /// Takes a signal after the window, while the delivery waits. Before a re-injection it verifies, in place of the
    /// attempt that is then needless; in an unverified delivery an ack closes it.
    fn close_late(&mut self, at: Timestamp, channel: Channel) -> Option<DeliveryEffect> {
        let elapsed = at.checked_duration_since(self.attempt.as_ref()?.started_at())?;
        let proof = Proof { channel, elapsed };
        if !channel.acknowledges() {
            return None;
        }
        match self.state {
            DeliveryState::ReinjectionDue { .. } => {
                self.raise(proof);
                self.verify(proof)
            }
            DeliveryState::Unverified { .. } if proof.level() >= self.late_minimum() => {
                self.raise(proof);
                self.state = DeliveryState::Closed;
                Some(DeliveryEffect::Closed { reason: UnverifiedReason::Late, proof: Some(proof) })
            }
            DeliveryState::Unverified { .. }
            | DeliveryState::Queued
            | DeliveryState::Injected
            | DeliveryState::Verified
            | DeliveryState::Closed
            | DeliveryState::Failed
            | DeliveryState::Cancelled => None,
        }
    }

    /// The level of a signal after the window that closes an unverified delivery.
    fn late_minimum(&self) -> Level {
        match self.rules.policy {
            UnverifiedPolicy::Strict => self.rules.minimum,
            UnverifiedPolicy::Written | UnverifiedPolicy::Settled | UnverifiedPolicy::Failed => Level::InContext,
        }
    }

    fn raise(&mut self, proof: Proof) {
        if proof.level() > self.level() {
            self.strongest = Some(proof);
        }
    }

    /// Notes that time has passed, with the agent's condition now.
    pub fn tick(&mut self, at: Timestamp, condition: &AgentCondition) -> Vec<DeliveryEffect> {
        match self.state {
            DeliveryState::Injected => self.tick_attempt(at, condition),
            DeliveryState::Unverified { since } => self.reconsider(at, since, condition).into_iter().collect(),
            // The agent began to work before the text could be typed.
            DeliveryState::ReinjectionDue { since } if !condition.allows_reinjection() => {
                self.state = DeliveryState::Unverified { since };
                vec![self.reconsider(at, since, condition).unwrap_or(DeliveryEffect::Held)]
            }
            DeliveryState::ReinjectionDue { .. }
            | DeliveryState::Queued
            | DeliveryState::Verified
            | DeliveryState::Closed
            | DeliveryState::Failed
            | DeliveryState::Cancelled => Vec::new(),
        }
    }

    fn tick_attempt(&mut self, at: Timestamp, condition: &AgentCondition) -> Vec<DeliveryEffect> {
        let Some(attempt) = &mut self.attempt else { return Vec::new() };
        if attempt.tick(at).is_some() {
            self.state = DeliveryState::Unverified { since: at };
            let next = self.reconsider(at, at, condition);
            return vec![next.unwrap_or(DeliveryEffect::Held)];
        }
        // Acknowledged, but below the level that this message demands. It arrived, so it is not typed again.
        if !attempt.is_pending() && at >= attempt.signals_end_at() {
            return vec![self.fail(FailureReason::VerificationFailed)];
        }
        Vec::new()
    }

    /// Decides about a delivery whose last attempt timed out; `None` while it has to wait.
    fn reconsider(&mut self, at: Timestamp, since: Timestamp, condition: &AgentCondition) -> Option<DeliveryEffect> {
        // Without re-injections the policy decides, not the number of attempts.
        let can_repeat = self.rules.max_reinjections > 0;
        if can_repeat && self.attempt_count > self.rules.max_reinjections {
            return Some(self.fail(self.failure_reason(condition)));
        }
        // Text that is still in the queue of the terminal would be typed twice.
        if can_repeat && self.was_entered() && condition.allows_reinjection() {
            self.state = DeliveryState::ReinjectionDue { since };
            return Some(DeliveryEffect::Reinject { attempt: self.attempt_count + 1 });
        }
        let is_over = match self.effective_policy() {
            UnverifiedPolicy::Written if self.was_entered() => return Some(self.close(UnverifiedReason::NoChannel)),
            UnverifiedPolicy::Settled if self.is_settled(at, condition) => {
                return Some(self.close(UnverifiedReason::SettledIdle));
            }
            UnverifiedPolicy::Failed => true,
            UnverifiedPolicy::Written | UnverifiedPolicy::Settled | UnverifiedPolicy::Strict => {
                at >= since + UNVERIFIED_LIMIT
            }
        };
        is_over.then(|| self.fail(self.failure_reason(condition)))
    }

    /// The policy for silence now. A message that could be typed again, only not now, does not fail yet; one that
    /// demands more than an echo is not closed without it.
    fn effective_policy(&self) -> UnverifiedPolicy {
        let can_repeat = self.rules.max_reinjections > 0;
        let demands_more = self.rules.minimum > Level::Echoed;
        match self.rules.policy {
            UnverifiedPolicy::Strict => UnverifiedPolicy::Strict,
            UnverifiedPolicy::Written | UnverifiedPolicy::Settled | UnverifiedPolicy::Failed if demands_more => {
                if can_repeat {
                    UnverifiedPolicy::Strict
                } else {
                    UnverifiedPolicy::Failed
                }
            }
            UnverifiedPolicy::Failed if can_repeat => UnverifiedPolicy::Settled,
            UnverifiedPolicy::Failed => UnverifiedPolicy::Failed,
            UnverifiedPolicy::Written => UnverifiedPolicy::Written,
            UnverifiedPolicy::Settled => UnverifiedPolicy::Settled,
        }
    }

    fn is_settled(&self, at: Timestamp, condition: &AgentCondition) -> bool {
        let entered_at = self.attempt.as_ref().and_then(Attempt::entered_at);
        entered_at.and_then(|entered_at| condition.settled_at(entered_at)).is_some_and(|settled_at| at >= settled_at)
    }

    fn was_entered(&self) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| attempt.entered_at().is_some())
    }

    fn failure_reason(&self, condition: &AgentCondition) -> FailureReason {
        if condition.is_write_stalled && !self.was_entered() {
            FailureReason::WriteStalled
        } else {
            FailureReason::VerificationFailed
        }
    }

    fn close(&mut self, reason: UnverifiedReason) -> DeliveryEffect {
        self.state = DeliveryState::Closed;
        DeliveryEffect::Closed { reason, proof: None }
    }

    fn fail(&mut self, reason: FailureReason) -> DeliveryEffect {
        self.state = DeliveryState::Failed;
        DeliveryEffect::Failed(reason)
    }

    /// Notes that the agent's process has ended or was released.
    pub fn agent_ended(&mut self) -> Option<DeliveryEffect> {
        if self.state.is_final() {
            return None;
        }
        self.state = DeliveryState::Cancelled;
        Some(DeliveryEffect::Cancelled)
    }

    /// Returns the instant at which [`tick`](Self::tick) has to be called at the latest, apart from changes of the
    /// agent's condition.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        match self.state {
            DeliveryState::Injected => {
                let attempt = self.attempt.as_ref()?;
                if attempt.is_pending() { attempt.times_out_at() } else { Some(attempt.signals_end_at()) }
            }
            DeliveryState::Unverified { since } => Some(since + UNVERIFIED_LIMIT),
            // These wait for the terminal, or for nothing, but not for an instant.
            DeliveryState::Queued
            | DeliveryState::ReinjectionDue { .. }
            | DeliveryState::Verified
            | DeliveryState::Closed
            | DeliveryState::Failed
            | DeliveryState::Cancelled => None,
        }
    }
}
