//! Repair of a restored database: it raises sequence numbers above those already sent, then reinserts the deliveries
//! that the log still holds.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, WorkspaceScope,
    mailboxes::stream::Seq,
    metric_names,
    recovery::{CLOCK_SLACK_MS, LogCoverage, LogMark, LogMarks, covers_restore},
};
use relay_store::{
    Store,
    events::RecordedEvents,
    mailboxes::expiry::DeadLetteredDelivery,
    recovery::{BEFORE_ALL_MAILBOXES, DatabaseState},
};
use relay_stream::{LogKind, LogState, Stream};
use relay_wire::field::ToValue as _;
use serde::Serialize;

use super::frames;
use crate::{Engine, EngineResult, IdSource};

/// Number of the newest log frames that are compared with mailbox heads: if the database lacks any of them, it is older
/// than the log.
const COMPARED_FRAMES: u64 = 64;
const PAGE: u64 = 500;
const MAILBOX_BATCH: usize = 500;
/// Partitions are created this many days ahead: today's may be missing in an old state.
const DAYS_AHEAD: i32 = 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Frames of the log read so far.
    pub looked_at: u64,
    pub of: u64,
}

/// Amount by which numbers are raised when the log cannot prove which ones were used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Margin {
    pub numbers: i64,
    /// True to raise even where the log seems complete: NATS was unavailable before Postgres was lost.
    pub always: bool,
    /// True if NATS is unavailable: the log is not read, so nothing is recovered from it.
    pub without_log: bool,
}

/// Necessary steps and their reasons.
#[derive(Debug, Clone, Serialize)]
pub struct RepairPlan {
    /// The database is not the one that the engine knew.
    pub database_is_another: bool,
    /// The newest frames of the log are ahead of their mailboxes.
    pub log_is_ahead: bool,
    /// Time at which the database was last seen as the known one.
    pub restored_to: DateTime<Utc>,
    /// True if the log holds everything published since.
    pub log_reaches_back: bool,
    /// Frames of the log that were published since.
    pub frames: u64,
}

/// Result of a repair.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RepairReport {
    /// Time at which the database was last seen as the known one.
    pub restored_to: DateTime<Utc>,
    /// True if the log held everything published since.
    pub log_reached_back: bool,
    /// Deliveries that were reinserted.
    pub recovered: u64,
    /// Deliveries that became dead letters, reason `lost_in_restore`.
    pub lost: u64,
    /// Mailboxes whose numbers were raised above those in the log.
    pub raised: u64,
    /// Mailboxes whose numbers were raised by the margin.
    pub jumped: u64,
    /// The margin; 0 when it was not needed.
    pub margin: i64,
}

/// Repair of the database, by an engine or by relayctl.
pub struct DatabaseRepair<'a> {
    store: &'a Store,
    stream: &'a Stream,
    ids: &'a IdSource,
    engine: Option<&'a Engine>,
}

impl<'a> DatabaseRepair<'a> {
    /// Creates a repair that announces to senders through an engine.
    #[must_use]
    pub fn with_engine(engine: &'a Engine) -> Self {
        let store = &engine.inner.recovery.state.store;
        Self { store, stream: &engine.inner.stream, ids: &engine.inner.core.ids, engine: Some(engine) }
    }

    /// Creates a repair for a terminal: it records, but announces nothing.
    #[must_use]
    pub const fn without_engine(store: &'a Store, stream: &'a Stream, ids: &'a IdSource) -> Self {
        Self { store, stream, ids, engine: None }
    }

    /// Returns true if the log has numbers that mailboxes have not assigned yet, or unknown mailboxes. The log is read
    /// first: its frames were committed before, so in a database that was not restored they are below the head.
    /// Mailboxes that an earlier repair could not restore are known to be missing.
    pub async fn log_is_ahead(&self, database: &DatabaseState) -> EngineResult<bool> {
        let Some(state) = self.stream.log_state(LogKind::Deliveries).await? else { return Ok(false) };
        if state.last == 0 {
            return Ok(false);
        }
        // Retention may have dropped frames, so the log may begin later.
        let from = state.last.saturating_sub(COMPARED_FRAMES - 1).max(state.first);
        let newest = self.stream.read_frames(from, state.last).await?.verified;
        let places: Vec<_> = newest.iter().map(|frame| (frame.scope, frame.agent_id, frame.seq)).collect();
        let recovered_ms = database.recovered_at.map_or(i64::MIN, |at| at.timestamp_millis() + CLOCK_SLACK_MS);
        let count_missing: Vec<bool> = newest.iter().map(|frame| frame.stored_at_ms > recovered_ms).collect();
        Ok(!places.is_empty() && self.store.count_ahead_of_heads(&places, &count_missing).await? > 0)
    }

    /// Returns true if the delivery log that belongs to the database is lost, and no process has confirmed the database
    /// since the present log was created. The clocks of NATS and Postgres may differ.
    pub async fn log_is_lost(&self, database: &DatabaseState) -> EngineResult<bool> {
        let Some(known) = database.log_marks.and_then(|marks| marks.deliveries) else { return Ok(false) };
        let found = self.stream.log_state(LogKind::Deliveries).await?.map(|state| state.created_at_ms);
        let seen_ms = database.seen_at.timestamp_millis();
        Ok(found.is_none_or(|found| found != known.created_at_ms && found + CLOCK_SLACK_MS > seen_ms))
    }

    /// Returns the present ends of the logs.
    pub async fn log_marks(&self) -> EngineResult<LogMarks> {
        let mark = async |kind| {
            let state = self.stream.log_state(kind).await?;
            EngineResult::Ok(state.map(|state| LogMark {
                created_at_ms: state.created_at_ms,
                position: state.last,
                stored_at_ms: state.last_at_ms,
            }))
        };
        Ok(LogMarks { deliveries: mark(LogKind::Deliveries).await?, events: mark(LogKind::Events).await? })
    }

    /// Records the present logs as those of the database.
    pub async fn record_logs(&self) -> EngineResult<()> {
        Ok(self.store.record_logs(self.log_marks().await?).await?)
    }

    /// Determines the necessary steps of [`Self::repair`].
    pub async fn examine(&self, database: &DatabaseState) -> EngineResult<RepairPlan> {
        let log_is_ahead = self.log_is_ahead(database).await?;
        let (from, to, log_reaches_back) = self.span(LogKind::Deliveries, database).await?;
        Ok(RepairPlan {
            database_is_another: database.is_replaced(),
            log_is_ahead,
            restored_to: database.seen_at,
            log_reaches_back,
            frames: (to + 1).saturating_sub(from),
        })
    }

    /// Returns the positions of the log that were published since the restored state, and true if none are missing.
    ///
    /// The mark in the database says where they begin. Without it, or if the log is not the marked one, times do, with
    /// a tolerance for the difference between the clocks.
    async fn span(&self, kind: LogKind, database: &DatabaseState) -> EngineResult<(u64, u64, bool)> {
        let Some(state) = self.stream.log_state(kind).await? else { return Ok((1, 0, false)) };
        let mark = database.log_marks.and_then(|marks| match kind {
            LogKind::Deliveries => marks.deliveries,
            LogKind::Events => marks.events,
        });
        if let Some(mark) = mark.filter(|mark| mark.created_at_ms == state.created_at_ms)
            && (mark.position == 0 || self.stream.is_stored_at(kind, mark.position, mark.stored_at_ms).await?)
        {
            let from = mark.position + 1;
            return Ok((from.max(state.first), state.last, state.first <= from));
        }
        let restored_to_ms = database.seen_at.timestamp_millis();
        let from = self.stream.position_at(kind, &state, restored_to_ms - CLOCK_SLACK_MS).await?;
        Ok((from, state.last, covers_restore(Some(reach(&state)), restored_to_ms)))
    }

    /// Returns the same; nothing if the log cannot be read.
    async fn readable_span(
        &self,
        kind: LogKind,
        database: &DatabaseState,
        margin: Margin,
    ) -> EngineResult<(u64, u64, bool)> {
        if margin.without_log { Ok((1, 0, false)) } else { self.span(kind, database).await }
    }

    /// Raises numbers above all assigned ones, and reinserts lost deliveries that the log still holds. The caller holds
    /// the recovery lock, and no client is served. An interrupted repair is repeated from the start, which assigns no
    /// number twice.
    pub async fn repair(
        &self,
        database: &DatabaseState,
        margin: Margin,
        mut progress: impl FnMut(Progress) + Send,
    ) -> EngineResult<RepairReport> {
        // From here on no transaction of a process that does not know this recovery commits a number.
        self.store.begin_recovery().await?;
        self.store.ensure_partitions(DAYS_AHEAD).await?;
        // Events first: later records must not reuse a number that observers have seen. Unwatched events were not
        // published, so the log never shows all of them.
        let (from, to, _) = self.readable_span(LogKind::Events, database, margin).await?;
        self.store.jump_event_heads(margin.numbers).await?;
        for (first, last) in pages(from, to) {
            // Unverified records prove nothing; the jump above covers them.
            self.store.raise_event_heads(&self.stream.read_event_marks(first, last).await?.verified).await?;
        }
        let (from, to, mut log_reached_back) = self.readable_span(LogKind::Deliveries, database, margin).await?;
        let mut report = RepairReport { restored_to: database.seen_at, ..RepairReport::default() };
        let mut highest: HashMap<(WorkspaceScope, AgentId), Seq> = HashMap::new();
        for (first, last) in pages(from, to) {
            let page = self.stream.read_frames(first, last).await?;
            // A frame without a valid code may be forged, or published by a version that did not sign: the log then
            // does not prove which numbers were used.
            log_reached_back &= page.unverified == 0;
            let logged: Vec<_> = page.verified.into_iter().filter_map(frames::read_delivery).collect();
            let done = self.store.reinsert_logged(&logged, self.ids.now()).await?;
            for (scope, agent, seq) in done.ahead {
                let known = highest.entry((scope, agent)).or_insert(seq);
                *known = (*known).max(seq);
            }
            report.recovered += done.recovered;
            report.lost += done.dead_lettered.len() as u64;
            self.announce(&done.dead_lettered, done.recorded);
            progress(Progress { looked_at: last + 1 - from, of: to + 1 - from });
        }
        let mut raised: Vec<_> = highest.into_iter().map(|((scope, agent), seq)| (scope, agent, seq)).collect();
        // In the order in which every transaction locks heads.
        raised.sort_unstable_by_key(|(scope, agent, _)| (scope.workspace_id(), *agent));
        report.raised = raised.len() as u64;
        // After all pages: a head is raised once, above the highest number of its mailbox in the log.
        for some in raised.chunks(MAILBOX_BATCH) {
            report.lost += self.store.raise_heads(some, self.ids.now(), || self.ids.next_id()).await?;
        }
        report.log_reached_back = log_reached_back;
        if !log_reached_back || margin.always {
            report.margin = margin.numbers;
            let mut after = BEFORE_ALL_MAILBOXES;
            loop {
                let limit = i64::try_from(MAILBOX_BATCH).unwrap_or(i64::MAX);
                let ids = || self.ids.next_id();
                let jumped = self.store.jump_heads(after, limit, margin.numbers, self.ids.now(), ids).await?;
                report.jumped += jumped.mailboxes;
                report.lost += jumped.lost;
                let Some(last) = jumped.last else { break };
                after = last;
            }
        }
        // Before the adoption: an adopted database must name the log that belongs to it.
        if !margin.without_log {
            self.record_logs().await?;
        }
        // Last: until then, a process that takes over after a crash repeats the repair.
        self.store.adopt_database(Some(&report.to_value())).await?;
        metrics::counter!(metric_names::RECOVERIES).increment(1);
        metrics::counter!(metric_names::DELIVERIES_RECOVERED).increment(report.recovered);
        Ok(report)
    }

    fn announce(&self, dead_lettered: &[DeadLetteredDelivery], recorded: Vec<RecordedEvents>) {
        if let Some(engine) = self.engine {
            engine.mailboxes().announce_dead_letters(dead_lettered, recorded);
        }
    }
}

fn reach(state: &LogState) -> LogCoverage {
    LogCoverage { created_at_ms: state.created_at_ms, is_complete: state.first <= 1, oldest_at_ms: state.first_at_ms }
}

fn pages(from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut next = from;
    std::iter::from_fn(move || {
        (next <= to).then(|| {
            let first = next;
            next = first.saturating_add(PAGE);
            (first, to.min(next - 1))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_cover_the_span_once() {
        assert_eq!(pages(1, 0).count(), 0);
        assert_eq!(pages(7, 7).collect::<Vec<_>>(), [(7, 7)]);
        assert_eq!(pages(1, 1001).collect::<Vec<_>>(), [(1, 500), (501, 1000), (1001, 1001)]);
    }
}
