//! Event log of a workspace, read in order.

use relay_domain::{WorkspaceScope, observers::ObserverView};
use relay_wire::events::observer_frame;

use super::{Events, LogEvent, announce::message_events};
use crate::EngineResult;

/// Bound of the events that one page scans; those hidden from the reader count too (docs/protocol/rest.md, "Event
/// log").
const MAX_SCANNED: i64 = 2000;
const SCAN_STEP: i64 = 500;
pub const MAX_EVENTS_PAGE: i64 = 500;
const RECORD_BATCH: usize = 100;
/// A page ends once its events have this many bytes.
const MAX_PAGE_BYTES: usize = 4 * 1024 * 1024;

#[derive(Debug, Clone)]
pub struct EventPage {
    /// Visible events, oldest first.
    pub events: Vec<LogEvent>,
    /// Number of the newest event of the workspace, visible or not.
    pub latest_seq: i64,
    /// Cursor of the next page: the number of the last scanned event.
    pub next_since: i64,
}

impl Events {
    /// Returns the events above `since` that a view shows. A cursor older than the kept log starts at the oldest event.
    pub async fn page(
        &self,
        scope: WorkspaceScope,
        view: &ObserverView,
        since: i64,
        limit: i64,
    ) -> EngineResult<EventPage> {
        self.core.watch_events(&[scope]).await?;
        let (_, next_seq) = self.core.store.event_range(scope).await?;
        let mut page = EventPage { events: Vec::new(), latest_seq: next_seq - 1, next_since: since };
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
                        page.latest_seq = page.latest_seq.max(page.next_since);
                        return Ok(page);
                    }
                }
            }
        }
        // A position ahead of the log is reported as it is.
        if scanned > 0 {
            page.latest_seq = page.latest_seq.max(page.next_since);
        }
        Ok(page)
    }

    /// Reads the next events above `since`, about `events` of them, with their frames.
    pub(super) async fn events_after(
        &self,
        scope: WorkspaceScope,
        since: i64,
        events: i64,
    ) -> EngineResult<Vec<LogEvent>> {
        let mut found = Vec::new();
        let mut records = self.core.store.events_since(scope, since, events).await?;
        for some in records.chunks_mut(RECORD_BATCH) {
            let messages =
                self.core.store.messages_of_events(scope, &message_events(some, |seq, _| seq > since)).await?;
            for record in some {
                for (seq, event) in (record.first_seq..).zip(std::mem::take(&mut record.events)) {
                    if seq > since {
                        let frame = observer_frame::encode(&event, messages.get(&seq), record.created_at);
                        found.push(LogEvent::new(seq, record.created_at, event, frame));
                    }
                }
            }
        }
        Ok(found)
    }
}
