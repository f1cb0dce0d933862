//! [`Announcement`]: a committed record on its way to the announcer.

use std::collections::HashMap;

use relay_domain::{MessageId, messages::Message};
use relay_store::events::RecordedEvents;

/// Bound of the queue. Beyond it, feeds find the records in Postgres.
pub(crate) const QUEUE: usize = 4096;

/// Committed record to announce, by default to observers and to agents' sockets.
pub(crate) struct Announcement {
    pub(super) recorded: RecordedEvents,
    /// Messages of its events that are in memory, so that they need not be read.
    pub(super) messages: HashMap<MessageId, Message>,
    pub(super) to_sockets: bool,
}

impl From<RecordedEvents> for Announcement {
    fn from(recorded: RecordedEvents) -> Self {
        Self { recorded, messages: HashMap::new(), to_sockets: true }
    }
}

impl Announcement {
    /// Number of events of the record.
    pub(crate) fn event_count(&self) -> usize {
        self.recorded.events.len()
    }

    pub(crate) fn with_messages(recorded: RecordedEvents, messages: HashMap<MessageId, Message>) -> Self {
        Self { messages, ..Self::from(recorded) }
    }

    /// For changes that the sockets know already.
    pub(crate) fn to_observers_only(recorded: RecordedEvents) -> Self {
        Self { to_sockets: false, ..Self::from(recorded) }
    }
}
