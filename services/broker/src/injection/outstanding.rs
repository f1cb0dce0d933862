//! [`OutstandingMessage`]: one message that was handed to the terminal, until no signal can count any more.

use relay_verification::{
    Channel, Timestamp,
    activity::ActivitySearch,
    channel::INJECTED_METHOD,
    delivery::{Delivery, DeliveryState},
    echo::{MatchDetail, WatchId},
    strategy::DeliveryRecord,
};

use super::{effect::Effect, line::TypedLine};
use crate::{
    api::types::{DeliveryProof, DeliveryRef},
    mailbox::Message,
};

/// A message on its way through the terminal.
#[derive(Debug)]
pub(super) struct OutstandingMessage {
    pub(super) key: u64,
    pub(super) message: Message,
    pub(super) delivery: Delivery,
    pub(super) typed: TypedLine,
    pub(super) watch: Option<WatchId>,
    pub(super) detail: Option<MatchDetail>,
    pub(super) activity: Option<ActivitySearch>,
    pub(super) record: DeliveryRecord,
    /// Text and Enter were written before the beginning was reported.
    pub(super) written_at: Option<Timestamp>,
    /// Text and Enter were written at least once.
    pub(super) is_written: bool,
    /// Consequences of signals that came before Enter was written: an echo shows the text, not that it was submitted.
    pub(super) held_back: Vec<Effect>,
}

impl OutstandingMessage {
    /// Names the delivery in events.
    pub(super) fn reference(&self) -> DeliveryRef {
        DeliveryRef { delivery_id: self.message.delivery_id.clone(), event_id: self.message.event_id.clone() }
    }

    /// Returns the progress proven so far.
    pub(super) fn proven(&self) -> DeliveryProof {
        let strongest = self.delivery.strongest();
        DeliveryProof {
            attempt: self.delivery.attempt_count(),
            level: self.delivery.level(),
            confidence: strongest.map_or(INJECTED_METHOD, |proof| proof.channel.confidence()),
            method: strongest.map_or(INJECTED_METHOD, |proof| proof.channel.method()),
        }
    }

    /// Remembers a signal for what is learned about the program.
    pub(super) fn note_signal(&mut self, at: Timestamp, channel: Channel) {
        let Some(started_at) = self.delivery.attempt().map(relay_verification::attempt::Attempt::started_at) else {
            return;
        };
        match channel {
            Channel::Echo => {
                self.record.echo_after.get_or_insert(at.duration_since(started_at));
            }
            Channel::File => self.record.has_file_ack = true,
            Channel::Mcp | Channel::Api => self.record.has_api_ack = true,
            Channel::Activity => {}
        }
    }

    /// Holds consequences back until Enter is written. A failure needs no Enter.
    pub(super) fn hold_back(&mut self, effects: Vec<Effect>) -> Vec<Effect> {
        if self.is_written || self.delivery.state() == DeliveryState::Failed {
            return effects;
        }
        self.held_back.extend(effects);
        Vec::new()
    }

    /// Bytes of its texts: the body, and the line as it was typed and as its echo is expected.
    pub(super) fn text_bytes(&self) -> usize {
        self.message.body.len() + 2 * self.typed.line.len()
    }

    /// Frees its texts once it has its outcome. Its ids are enough for signals that still come.
    pub(super) fn release_texts(&mut self) {
        // Consequences that are held back are not those of an outcome yet.
        if self.delivery.state().is_final() && self.held_back.is_empty() {
            self.message.body = String::new();
            self.typed = TypedLine::empty();
        }
    }

    /// Returns whether no signal counts any more.
    pub(super) fn is_over(&self, now: Timestamp) -> bool {
        if !self.held_back.is_empty() {
            return false;
        }
        let state = self.delivery.state();
        match state {
            DeliveryState::Failed | DeliveryState::Cancelled => true,
            DeliveryState::Verified | DeliveryState::Closed => {
                self.delivery.attempt().is_none_or(|attempt| now >= attempt.signals_end_at())
            }
            DeliveryState::Queued
            | DeliveryState::Injected
            | DeliveryState::ReinjectionDue { .. }
            | DeliveryState::Unverified { .. } => false,
        }
    }
}
