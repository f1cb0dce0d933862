//! [`Pipeline`]: the injections of one agent and the start of the next. The messages that wait are in `queue`, the
//! write of an injection is in `writing`, the verdicts on typed messages in `verdict`.

use std::{collections::VecDeque, time::Duration};

use relay_verification::{
    Level, Timestamp,
    cleaning::Cleaner,
    delivery::{Delivery, DeliveryState},
    echo::EchoMonitor,
    pacing::{HoldRule, InjectionGate, InjectionStart, OutputHold},
    sanitise::TypingMode,
    strategy::{DeliveryRecord, Learned},
};

use super::{
    effect::{Effect, Lead, TypeRequest},
    keyboard::Keyboard,
    line::TypedLine,
    outstanding::OutstandingMessage,
    profile::Profile,
    queue::{DeliveryMode, MessageQueue},
    reminder::Reminder,
    verdict::FinishedDelivery,
    writing::CurrentInjection,
};
use crate::mailbox::{Message, Origin, Urgency};

/// Messages of this priority or a higher one may demand a higher level.
const HIGH_PRIORITY: u8 = 3;
/// Time after which a suggestion in the input line is dismissed.
const SUGGESTION_PATIENCE: Duration = Duration::from_secs(10);
/// Text of messages that were typed and have no outcome; above it the next one waits. As much as may wait for an agent.
const MAX_OUTSTANDING_BYTES: usize = 32 << 20;
/// Interval of screen reads while a suggestion shows.
const SUGGESTION_POLL: Duration = Duration::from_millis(500);

/// The visible state of the terminal.
#[derive(Debug, Clone, Default)]
pub(crate) struct ScreenFacts {
    /// Since when the program rests at its prompt.
    pub(crate) at_prompt_since: Option<Timestamp>,
    /// Text of the screen, squashed; read only while [`Pipeline::wants_screen`].
    pub(crate) squashed: String,
    /// The screen shows a folded paste.
    pub(crate) is_folded: bool,
    pub(crate) is_write_stalled: bool,
    pub(crate) bracketed_paste: bool,
    /// The input line shows a suggestion.
    pub(crate) has_suggestion: bool,
    /// A question of the program is on the screen; checked only while [`Pipeline::watches_gates`].
    pub(crate) is_gated: bool,
}

/// Messages and settings that a process leaves to the next one.
#[derive(Debug)]
pub(crate) struct UnfinishedMessages {
    /// Messages that were typed, in their order. They come before those that wait.
    pub(crate) typed: Vec<Message>,
    pub(crate) waiting: Vec<Message>,
    pub(crate) learned: Learned,
    pub(crate) mode: DeliveryMode,
}

/// Queue and injections of one agent.
#[derive(Debug)]
pub(crate) struct Pipeline {
    pub(super) profile: Profile,
    pub(super) learned: Learned,
    pub(super) queue: MessageQueue,
    is_ready: bool,
    pub(super) outstanding: Vec<OutstandingMessage>,
    /// The last deliveries that are over.
    pub(super) finished: VecDeque<FinishedDelivery>,
    /// The injection that is not written yet.
    pub(super) writing: Option<CurrentInjection>,
    /// The injection that the terminal had no room for, and the instant at which it is handed over again.
    pub(super) refused: Option<(Timestamp, TypeRequest)>,
    next_key: u64,
    /// A message has had its verdict.
    pub(super) has_verdict: bool,
    pub(super) gate: InjectionGate,
    pub(super) hold: OutputHold,
    pub(super) cleaner: Cleaner,
    pub(super) echo: EchoMonitor,
    keyboard: Keyboard,
    reminder: Option<Reminder>,
    pub(super) output_bytes: u64,
    /// Instant at which the next injection may start.
    pub(super) starts_at: Option<Timestamp>,
    /// Since when the output rate holds the next message back.
    held_since: Option<Timestamp>,
    /// Since when a message waits to be typed, or is being typed.
    pub(super) typing_since: Option<Timestamp>,
}

impl Pipeline {
    /// For a process that was just started; messages wait until [`Self::set_ready`].
    pub(crate) fn new(profile: Profile, learned: Learned) -> Self {
        let reminder = profile.tool_prefix.as_deref().map(|prefix| Reminder::new(prefix, profile.usable.file));
        Self {
            profile,
            learned,
            queue: MessageQueue::default(),
            is_ready: false,
            outstanding: Vec::new(),
            finished: VecDeque::new(),
            writing: None,
            refused: None,
            next_key: 0,
            has_verdict: false,
            gate: InjectionGate::new(),
            hold: OutputHold::new(),
            cleaner: Cleaner::new(),
            echo: EchoMonitor::new(),
            keyboard: Keyboard::default(),
            reminder,
            output_bytes: 0,
            starts_at: None,
            held_since: None,
            typing_since: None,
        }
    }

    /// Queues a message behind the others of its kind.
    pub(crate) fn enqueue(&mut self, message: Message) {
        self.queue.enqueue(message);
    }

    /// Returns whether notes of an earlier session wait to be typed.
    pub(crate) fn has_waiting_notes(&self) -> bool {
        self.queue.has_notes()
    }

    /// The program takes input from now on.
    pub(crate) fn set_ready(&mut self) {
        self.is_ready = true;
    }

    /// Since when a message that may be typed is not.
    pub(crate) fn typing_since(&self) -> Option<Timestamp> {
        self.typing_since
    }

    /// Takes what is known of the program from all its agents.
    pub(crate) fn set_learned(&mut self, learned: Learned) {
        self.learned = learned;
    }

    /// Messages of the engine that wait, oldest first.
    pub(crate) fn pending(&self) -> impl ExactSizeIterator<Item = &Message> {
        self.queue.pending()
    }

    /// Messages that were typed and have no outcome.
    pub(crate) fn unsettled_count(&self) -> usize {
        self.outstanding.iter().filter(|outstanding| !outstanding.delivery.state().is_final()).count()
    }

    /// Messages that were typed and have no outcome, with the number of attempts.
    pub(crate) fn unsettled(&self) -> impl Iterator<Item = (&Message, u32)> {
        let unsettled = self.outstanding.iter().filter(|outstanding| !outstanding.delivery.state().is_final());
        unsettled.map(|outstanding| (&outstanding.message, outstanding.delivery.attempt_count()))
    }

    pub(crate) fn mode(&self) -> DeliveryMode {
        self.queue.mode()
    }

    /// Sets the mode and returns the former one and the number of messages that this lets through.
    pub(crate) fn set_mode(&mut self, mode: DeliveryMode) -> (DeliveryMode, usize) {
        self.queue.set_mode(mode)
    }

    /// Lets the messages through that wait now, and returns their number.
    pub(crate) fn flush(&mut self) -> usize {
        self.queue.flush()
    }

    /// Types nothing more, neither a message that waits nor another copy of one. Messages that were typed get their
    /// verdicts, and the others stay.
    pub(crate) fn close(&mut self) {
        self.queue.close();
    }

    /// Returns whether a message that was typed can get its verdict without being typed again.
    pub(crate) fn awaits_verdict(&self) -> bool {
        self.writing.is_some()
            || self.outstanding.iter().any(|outstanding| match outstanding.delivery.state() {
                // Without an Enter nothing was submitted.
                DeliveryState::Injected => outstanding.is_written,
                DeliveryState::Unverified { .. } => true,
                DeliveryState::Queued
                | DeliveryState::ReinjectionDue { .. }
                | DeliveryState::Verified
                | DeliveryState::Closed
                | DeliveryState::Failed
                | DeliveryState::Cancelled => false,
            })
    }

    /// A person has typed.
    pub(crate) fn on_keys(&mut self, at: Timestamp, keys: &[u8]) {
        self.keyboard.on_keys(at, keys);
    }

    /// Does everything that is due, with the terminal as it is now.
    pub(crate) fn poll(&mut self, now: Timestamp, screen: &ScreenFacts) -> Vec<Effect> {
        // Verdicts first: they open the gate for the next message, and make an injection needless that has not begun.
        let mut effects = self.check_due(now, screen);
        effects.extend(self.withdraw_needless(now));
        effects.extend(self.take_refused(now).map(Effect::Type));
        self.start_next(now, screen, &mut effects);
        effects
    }

    /// Returns whether [`Self::poll`] depends on the screen now.
    pub(crate) fn wants_screen(&self, now: Timestamp) -> bool {
        let may_start = self.profile.has_suggestions && self.writing.is_none() && self.queue.head().is_some();
        may_start
            || self.outstanding.iter().any(|outstanding| match outstanding.delivery.state() {
                DeliveryState::Injected => outstanding.delivery.next_deadline().is_some_and(|deadline| deadline <= now),
                DeliveryState::ReinjectionDue { .. } | DeliveryState::Unverified { .. } => true,
                DeliveryState::Queued
                | DeliveryState::Verified
                | DeliveryState::Closed
                | DeliveryState::Failed
                | DeliveryState::Cancelled => false,
            })
    }

    /// Returns whether a question on the screen would get the Enter of a message that is about to be typed. Only up to
    /// the first verdict: later a question cannot be distinguished from a quoted one, with which any sender could
    /// keep the agent from its messages.
    pub(crate) fn watches_gates(&self) -> bool {
        let is_due = |outstanding: &OutstandingMessage| {
            matches!(outstanding.delivery.state(), DeliveryState::ReinjectionDue { .. })
        };
        let has_next = self.queue.head().is_some() || self.outstanding.iter().any(is_due);
        self.is_ready && !self.queue.is_closed() && !self.has_verdict && self.writing.is_none() && has_next
    }

    /// Returns whether anything was typed.
    pub(crate) fn has_typed(&self) -> bool {
        self.next_key > 0
    }

    /// Instant at which [`Self::poll`] has work again, if nothing happens before.
    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        let ends = self.outstanding.iter().filter_map(|outstanding| {
            let end = outstanding.delivery.attempt().map(relay_verification::attempt::Attempt::signals_end_at);
            let is_being_written = self.is_being_written(outstanding.key);
            match outstanding.delivery.state().is_final() {
                // It is over only when its write has ended. Its instant may lie in the past until then, and the task
                // would spin.
                true => end.filter(|_| !is_being_written),
                false => outstanding.delivery.next_deadline(),
            }
        });
        ends.chain(self.starts_at).chain(self.refused.as_ref().map(|(due, _)| *due)).min()
    }

    /// Returns whether a delivery waits for a condition of the screen, which has to be looked at from time to time.
    pub(crate) fn watches_screen(&self) -> bool {
        self.outstanding.iter().any(|outstanding| {
            let state = outstanding.delivery.state();
            matches!(state, DeliveryState::Unverified { .. } | DeliveryState::ReinjectionDue { .. })
        })
    }

    fn start_next(&mut self, now: Timestamp, screen: &ScreenFacts, effects: &mut Vec<Effect>) {
        self.starts_at = None;
        let is_due = self.writing.is_some() || self.queue.head().is_some();
        // Before the checks below: a message that any of them holds back counts as not typed.
        self.typing_since = is_due.then(|| self.typing_since.unwrap_or(now));
        if !self.is_ready || self.writing.is_some() || screen.is_gated || self.queue.is_closed() {
            return;
        }
        let again = self
            .outstanding
            .iter()
            .position(|outstanding| matches!(outstanding.delivery.state(), DeliveryState::ReinjectionDue { .. }));
        let is_steer = again.is_none() && self.queue.head().is_some_and(|head| head.urgency == Urgency::Steer);
        // The bound holds for new messages only: a copy adds no text.
        if again.is_none() && (self.queue.head().is_none() || self.outstanding_bytes() > MAX_OUTSTANDING_BYTES) {
            return;
        }
        let waits_for_verdict = self.profile.strategy.waits_for_verdict(&self.learned);
        match self.gate.next_start(
            now,
            // A message that is typed again has its place among them already.
            self.unsettled_count().saturating_sub(usize::from(again.is_some())),
            waits_for_verdict,
        ) {
            InjectionStart::Now => {}
            InjectionStart::At(instant) => {
                self.starts_at = Some(instant);
                return;
            }
            // Either comes as an event, after which the pipeline is polled.
            InjectionStart::AfterEnter | InjectionStart::AfterVerdict => return,
        }
        let ready_at = match again {
            Some(_) => now,
            None => self.queue.head_ready_at(now),
        };
        let rule = if is_steer { HoldRule::Skip } else { HoldRule::Wait };
        let flushes = self.queue.is_flushing();
        let held = self.hold.opens_at(now, ready_at, rule);
        self.note_hold(now, held.is_some(), effects);
        let typed_on = if is_steer || flushes { None } else { self.keyboard.opens_at(now, ready_at) };
        let suggested = screen.has_suggestion && !is_steer && again.is_none() && now < ready_at + SUGGESTION_PATIENCE;
        let suggested = suggested.then(|| now + SUGGESTION_POLL);
        // `None` is the least value: the latest of the instants that are given.
        if let Some(opens_at) = held.max(typed_on).max(suggested) {
            self.starts_at = Some(opens_at);
            return;
        }
        match again {
            Some(index) => effects.push(Effect::Type(self.type_again(index, screen))),
            // No instant is set: the quoted delivery has a deadline of its own.
            None if !is_steer && self.head_quotes_attempt() => {}
            None => {
                self.end_quoted_echoes();
                self.type_head(now, screen, effects);
            }
        }
    }

    fn outstanding_bytes(&self) -> usize {
        self.outstanding.iter().map(OutstandingMessage::text_bytes).sum()
    }

    fn note_hold(&mut self, now: Timestamp, is_held: bool, effects: &mut Vec<Effect>) {
        if is_held {
            self.held_since.get_or_insert(now);
        } else if let Some(since) = self.held_since.take() {
            effects.push(Effect::Held(now.duration_since(since)));
        }
    }

    fn type_again(&mut self, index: usize, screen: &ScreenFacts) -> TypeRequest {
        let outstanding = &self.outstanding[index];
        let (key, attempt) = (outstanding.key, outstanding.delivery.attempt_count() + 1);
        self.writing = Some(CurrentInjection::new(key, attempt));
        TypeRequest {
            key,
            text: outstanding.typed.line.clone(),
            lead: lead(Urgency::Wait, screen),
            attempt,
            may_echo_exit: outstanding.typed.may_echo_exit(outstanding.message.origin),
        }
    }

    fn type_head(&mut self, now: Timestamp, screen: &ScreenFacts, effects: &mut Vec<Effect>) {
        let Some(message) = self.queue.take_head() else { return };
        if matches!(message.origin, Origin::Engine | Origin::ActionResult | Origin::Redelivered) {
            effects.push(Effect::Dequeued(Box::new(message.clone())));
        }
        let mode = if screen.bracketed_paste { TypingMode::BracketedPaste } else { TypingMode::Keys };
        let typed = TypedLine::new(&message, self.profile.workspace_alias.as_deref(), mode);
        let reminder = self.reminder.as_mut().map(|reminder| reminder.text(&message, now, self.output_bytes));
        // Only for messages of the engine: a task or notes have no sender who demands a confirmation.
        let minimum = if message.priority >= HIGH_PRIORITY && message.origin == Origin::Engine {
            self.profile.minimum_high
        } else {
            Level::Echoed
        };
        let rules = self.profile.strategy.rules(self.profile.usable, &self.learned, minimum);
        let key = self.next_key;
        self.next_key += 1;
        self.writing = Some(CurrentInjection::new(key, 1));
        effects.push(Effect::Type(TypeRequest {
            key,
            text: format!("{}{}", reminder.unwrap_or_default(), typed.line),
            lead: lead(message.urgency, screen),
            attempt: 1,
            may_echo_exit: typed.may_echo_exit(message.origin),
        }));
        self.outstanding.push(OutstandingMessage {
            key,
            message,
            delivery: Delivery::new(rules),
            typed,
            watch: None,
            detail: None,
            activity: None,
            record: DeliveryRecord::default(),
            written_at: None,
            is_written: false,
            held_back: Vec::new(),
        });
    }

    /// The process has ended. Returns its messages without an outcome.
    pub(crate) fn end(mut self) -> UnfinishedMessages {
        let mut typed = Vec::new();
        for outstanding in &mut self.outstanding {
            // A message that was echoed and not submitted did not reach the program.
            if outstanding.delivery.agent_ended().is_some() || !outstanding.held_back.is_empty() {
                typed.push(outstanding.message.clone());
            }
        }
        let mode = self.queue.mode();
        UnfinishedMessages { typed, waiting: self.queue.into_messages(), learned: self.learned, mode }
    }
}

fn lead(urgency: Urgency, screen: &ScreenFacts) -> Lead {
    match urgency {
        Urgency::Steer => Lead::Interrupt,
        Urgency::Wait if screen.has_suggestion => Lead::Dismiss,
        Urgency::Wait => Lead::Nothing,
    }
}
