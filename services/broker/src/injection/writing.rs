//! The write of an injection: its beginning, its end, and what the terminal does not take.

use std::time::Duration;

use relay_verification::{Timestamp, attempt::Attempt, delivery::DeliveryState, echo::MAX_WATCHES};

use super::{
    effect::{Effect, TypeRequest},
    pipeline::Pipeline,
};
use crate::{
    api::types::{DeliveryProof, Event},
    mailbox::Origin,
};

/// Pause before an injection that the terminal had no room for is handed over again.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// The injection that was handed to the terminal.
#[derive(Debug, Clone, Copy)]
pub(super) struct CurrentInjection {
    pub(super) key: u64,
    pub(super) attempt: u32,
    /// Its beginning was reported.
    pub(super) has_begun: bool,
    /// The terminal was asked to give it back.
    pub(super) is_withdrawn: bool,
}

impl CurrentInjection {
    pub(super) fn new(key: u64, attempt: u32) -> Self {
        Self { key, attempt, has_begun: false, is_withdrawn: false }
    }
}

impl Pipeline {
    pub(super) fn is_being_written(&self, key: u64) -> bool {
        self.writing.is_some_and(|writing| writing.key == key)
    }

    /// The first byte of an injection was written.
    pub(crate) fn on_began(&mut self, key: u64, at: Timestamp) {
        let Some(index) = self.index_of(key) else { return };
        if let Some(writing) = self.writing.as_mut().filter(|writing| writing.key == key) {
            writing.has_begun = true;
        }
        let outstanding = &mut self.outstanding[index];
        // If an ack came between the request and the write, the text is typed all the same and changes nothing.
        if outstanding.delivery.begin_attempt(at) {
            let ends_at = outstanding.delivery.attempt().map_or(at, Attempt::echo_ends_at);
            // Of the attempt before: a watch looks only at the output after the beginning of its own attempt.
            if let Some(watch) = outstanding.watch.take() {
                self.echo.end(watch);
            }
            self.make_room_for_a_watch();
            let outstanding = &mut self.outstanding[index];
            outstanding.watch = self.echo.begin(&outstanding.typed.expected, at, ends_at);
            self.gate.started(at);
            self.hold.injected(at);
        }
        let outstanding = &mut self.outstanding[index];
        // The end of the write comes by its ticket and the beginning as an event of the terminal, in any order.
        if let Some(written_at) = outstanding.written_at.take() {
            outstanding.delivery.enter_written(written_at);
            self.gate.on_entered(written_at.max(at));
            self.writing = None;
        }
    }

    /// Ends the oldest watch for an echo that could only raise a level. A message without its verdict needs its own,
    /// and there are as many watches as such messages.
    fn make_room_for_a_watch(&mut self) {
        let mut judged = self.outstanding.iter_mut().filter(|outstanding| outstanding.delivery.state().is_final());
        // A watch that has ended by its time frees nothing, so the next one ends as well.
        while self.echo.watch_count() >= MAX_WATCHES
            && let Some(watch) = judged.find_map(|outstanding| outstanding.watch.take())
        {
            self.echo.end(watch);
        }
    }

    /// The terminal has no room for an injection now: it is handed over again later.
    pub(crate) fn on_refused(&mut self, now: Timestamp, request: TypeRequest) {
        self.refused = Some((now + REFUSED_PAUSE, request));
    }

    /// The terminal has failed to write an injection, which is handed over again later. A part of it may be there, but
    /// the program has not received it: its Enter was not written.
    pub(crate) fn on_write_failed(&mut self, now: Timestamp, request: TypeRequest) {
        // After `/exit` no copy is typed.
        let is_closed = self.queue.is_closed();
        let Some(writing) = self.writing.as_mut().filter(|writing| writing.key == request.key) else { return };
        if is_closed {
            return self.end_writing(now);
        }
        writing.has_begun = false;
        self.on_refused(now, request);
    }

    /// The terminal has given back an injection of which nothing was written.
    pub(crate) fn on_withdrawn(&mut self, key: u64, now: Timestamp) {
        if self.is_being_written(key) {
            self.end_writing(now);
        }
    }

    /// Lets the next injection start.
    fn end_writing(&mut self, now: Timestamp) {
        self.writing = None;
        self.typing_since = None;
        self.starts_at = Some(now);
    }

    /// Withdraws an injection that is not to be typed any more, as long as it has not begun: its delivery has an
    /// outcome, the agent began to work before another copy could be typed, or it has asked for its end. A verdict on a
    /// message whose Enter was never written is none yet: its consequences are held back until the copy is written.
    pub(super) fn withdraw_needless(&mut self, now: Timestamp) -> Option<Effect> {
        let writing = self.writing.filter(|writing| !writing.has_begun && !writing.is_withdrawn)?;
        let outstanding = &self.outstanding[self.index_of(writing.key)?];
        let delivery = &outstanding.delivery;
        let is_needless = self.queue.is_closed()
            || match delivery.state() {
                DeliveryState::Verified | DeliveryState::Closed => outstanding.is_written,
                DeliveryState::Failed | DeliveryState::Cancelled => true,
                DeliveryState::Unverified { .. } => delivery.attempt_count() < writing.attempt,
                DeliveryState::Queued | DeliveryState::Injected | DeliveryState::ReinjectionDue { .. } => false,
            };
        if !is_needless {
            return None;
        }
        // The terminal does not have it, so there is nothing to take back.
        if self.refused.take().is_some() {
            self.end_writing(now);
            return None;
        }
        self.writing = Some(CurrentInjection { is_withdrawn: true, ..writing });
        Some(Effect::Withdraw(writing.key))
    }

    /// Takes the refused injection whose pause is over.
    pub(super) fn take_refused(&mut self, now: Timestamp) -> Option<TypeRequest> {
        self.refused.take_if(|(due, _)| *due <= now).map(|(_, request)| request)
    }

    /// Text and Enter of an injection were taken by the terminal.
    pub(crate) fn on_written(&mut self, key: u64, at: Timestamp) -> Vec<Effect> {
        self.typing_since = None;
        let Some(index) = self.index_of(key) else { return Vec::new() };
        let has_begun = self.writing.is_none_or(|writing| writing.key != key || writing.has_begun);
        let outstanding = &mut self.outstanding[index];
        let attempt = outstanding.delivery.attempt_count();
        if !has_begun {
            // The event about its beginning is still on the way.
            outstanding.written_at = Some(at);
        } else {
            outstanding.delivery.enter_written(at);
            self.gate.on_entered(at);
            self.writing = None;
        }
        outstanding.is_written = true;
        let held_back = std::mem::take(&mut outstanding.held_back);
        outstanding.release_texts();
        let delivery = outstanding.reference();
        let is_task = outstanding.message.origin == Origin::Task;
        // The count is 0 as long as the beginning is not reported.
        let proven = DeliveryProof { attempt: attempt.max(1), ..outstanding.proven() };
        let mut effects = vec![Effect::Publish(Box::new(Event::DeliveryInjected { delivery, proven }))];
        if is_task && attempt <= 1 {
            effects.push(Effect::TaskTyped);
        }
        // After the event of the injection, since they follow from it for drivers.
        effects.extend(held_back);
        effects
    }
}
