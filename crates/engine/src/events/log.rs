//! Reading what has happened, in order.

use relay_domain::{WorkspaceScope, observer::ObserverView};

use super::{LogEvent, announce::told, frame::frame};
use crate::{Engine, EngineResult};

/// Events that one page of the log scans at most: those hidden from the reader count too (contract: rest.md 4.3).
const SCANNED: i64 = 2000;
/// Events that one step of the scan reads.
const STEP: i64 = 500;
/// Events of one page at most.
pub const MAX_EVENTS_PAGE: i64 = 500;
/// Records whose messages are read at once.
const RECORDS_AT_ONCE: usize = 100;
/// A page ends once its events have this many bytes.
const PAGE_BYTES: usize = 4 * 1024 * 1024;

/// A page of a workspace's log.
#[derive(Debug, Clone)]
pub struct EventPage {
    /// What the reader may see, oldest first.
    pub events: Vec<LogEvent>,
    /// The number of the newest event of the workspace, seen or not.
    pub latest_seq: i64,
    /// Where the next page begins: the number of the last event that was looked at.
    pub next_since: i64,
}

impl Engine {
    /// Events above `since` that a view shows. A cursor older than what is kept starts at the oldest.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn event_page(
        &self,
        scope: WorkspaceScope,
        view: &ObserverView,
        since: i64,
        limit: i64,
    ) -> EngineResult<EventPage> {
        self.watch_events(&[scope]).await?;
        let (_, next_seq) = self.store().event_range(scope).await?;
        let mut page = EventPage { events: Vec::new(), latest_seq: next_seq - 1, next_since: since };
        let (mut scanned, mut bytes) = (0, 0);
        while scanned < SCANNED {
            let events = self.events_after(scope, page.next_since, STEP).await?;
            if events.is_empty() {
                break;
            }
            for event in events {
                scanned += 1;
                page.next_since = event.seq;
                if view.sees(&event.facts()) {
                    bytes += event.payload.as_ref().map_or(0, |payload| payload.get().len());
                    page.events.push(event);
                    if i64::try_from(page.events.len()).is_ok_and(|found| found >= limit) || bytes >= PAGE_BYTES {
                        page.latest_seq = page.latest_seq.max(page.next_since);
                        return Ok(page);
                    }
                }
            }
        }
        // A position ahead of the log shows as such.
        if scanned > 0 {
            page.latest_seq = page.latest_seq.max(page.next_since);
        }
        Ok(page)
    }

    /// The next events above `since`, about `events` of them, with their frames.
    pub(super) async fn events_after(
        &self,
        scope: WorkspaceScope,
        since: i64,
        events: i64,
    ) -> EngineResult<Vec<LogEvent>> {
        let mut found = Vec::new();
        let mut records = self.store().events_since(scope, since, events).await?;
        for some in records.chunks_mut(RECORDS_AT_ONCE) {
            let messages = self.store().messages_of_events(scope, &told(some, |seq, _| seq > since)).await?;
            for record in some {
                for (seq, event) in (record.first_seq..).zip(std::mem::take(&mut record.events)) {
                    if seq > since {
                        let frame = frame(&event, messages.get(&seq), record.created_at);
                        found.push(LogEvent::new(seq, record.created_at, event, frame));
                    }
                }
            }
        }
        Ok(found)
    }
}
