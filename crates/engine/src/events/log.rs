//! Event log of a workspace, read in order.

use relay_domain::{WorkspaceScope, events::EventSeq, observers::ObserverView};
use relay_tasks::byte_budget::ByteLease;
use relay_wire::events::observer_frame;

use super::{Events, LogEvent, announce::message_events};
use crate::EngineResult;

/// Bound of the events that one page scans; those hidden from the reader count too (docs/protocol/rest.md, "Event
/// log").
const MAX_SCANNED: i64 = 2000;
const SCAN_STEP: i64 = 500;
pub const MAX_EVENTS_PAGE: i64 = 500;
/// A page ends once its events have this many bytes.
const MAX_PAGE_BYTES: usize = 1024 * 1024;
/// Bound of the messages of one read of events; a larger one is read alone.
const MESSAGE_BYTES: usize = 1024 * 1024;
/// Memory of a page and of the read that completes it.
pub(super) const PAGE_MEMORY: usize = MAX_PAGE_BYTES + MESSAGE_BYTES;

#[derive(Debug)]
pub struct EventPage {
    /// Visible events, oldest first.
    pub events: Vec<LogEvent>,
    /// Memory that the events take until they are sent.
    pub memory: ByteLease,
    /// Number of the newest event of the workspace, visible or not.
    pub latest_seq: EventSeq,
    /// Cursor of the next page: the number of the last scanned event.
    pub next_since: EventSeq,
}

impl Events {
    /// Returns the events above `since` that a view shows. A cursor older than the kept log starts at the oldest event.
    pub async fn page(
        &self,
        scope: WorkspaceScope,
        view: &ObserverView,
        since: EventSeq,
        limit: i64,
    ) -> EngineResult<EventPage> {
        // A reader of pages counts as an observer: without one, events of single deliveries are not recorded.
        self.core.watch_events(&[scope]).await?;
        let (_, next_seq) = self.core.store.event_range(scope).await?;
        let memory = self.core.reserve_answer(scope, PAGE_MEMORY).await?;
        let mut page = EventPage { events: Vec::new(), memory, latest_seq: next_seq - 1, next_since: since };
        let (mut scanned, mut bytes) = (0, 0);
        while scanned < MAX_SCANNED {
            let events = self.events_after(scope, page.next_since, SCAN_STEP).await?;
            if events.is_empty() {
                break;
            }
            for event in events {
                scanned += 1;
                page.next_since = event.seq;
                if view.sees_event(&event.facts()) {
                    bytes += event.payload.as_ref().map_or(0, |payload| payload.get().len());
                    page.events.push(event);
                    if i64::try_from(page.events.len()).is_ok_and(|found| found >= limit) || bytes >= MAX_PAGE_BYTES {
                        // Events may have been added since the head was read.
                        page.latest_seq = page.latest_seq.max(page.next_since);
                        page.memory.shrink_to(bytes);
                        return Ok(page);
                    }
                }
            }
        }
        // A position ahead of the log is reported as it is.
        if scanned > 0 {
            page.latest_seq = page.latest_seq.max(page.next_since);
        }
        page.memory.shrink_to(bytes);
        Ok(page)
    }

    /// Reads the next events above `since`, about `events` of them, with their frames: fewer if their messages are
    /// large.
    pub(super) async fn events_after(
        &self,
        scope: WorkspaceScope,
        since: EventSeq,
        events: i64,
    ) -> EngineResult<Vec<LogEvent>> {
        let store = &self.core.store;
        let records = store.events_since(scope, since, events).await?;
        let mut wanted = message_events(&records, |seq, _| seq > since);
        let fitting = store.count_fitting_messages(scope, &wanted, MESSAGE_BYTES).await?;
        // The page ends before the first message that does not fit, so that no event is left out.
        let end = wanted.get(fitting).map_or(i64::MAX, |(seq, _)| *seq);
        wanted.truncate(fitting);
        let messages = store.messages_of_events(scope, &wanted).await?;
        let mut found = Vec::new();
        for record in records {
            for (seq, event) in (record.first_seq..).zip(record.events) {
                if seq > since && seq < end {
                    let frame = observer_frame::encode(&event, messages.get(&seq), record.created_at);
                    found.push(LogEvent::new(seq, record.created_at, event, frame));
                }
            }
        }
        Ok(found)
    }
}
