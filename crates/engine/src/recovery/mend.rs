//! Bringing a restored database into line with what had been sent: numbers first, then what the log still holds.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, WorkspaceScope, metric_names,
    recovery::{Reach, SLACK_MS, reaches},
    session::Seq,
};
use relay_store::{Store, events::Recorded, expiry::DeadLettered, recovery::DatabaseState};
use relay_stream::{LogKind, LogState, Stream};
use serde::Serialize;
use serde_json::json;

use super::frames;
use crate::{Engine, EngineResult, IdSource};

/// The newest frames of the log that are compared with mailbox heads: were any of them lost, the database is older.
const NEWEST: u64 = 64;
/// Frames of the log that are read and written at once.
const PAGE: u64 = 500;
/// Mailboxes that one transaction raises.
const MAILBOXES: usize = 500;
/// Days that partitions are made ahead: those of today may be missing in an old state.
const DAYS_AHEAD: i32 = 7;

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Frames of the log that were looked at.
    pub looked_at: u64,
    /// Frames to look at.
    pub of: u64,
}

/// By how much numbers are raised that nobody can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Margin {
    /// By how much.
    pub numbers: i64,
    /// Even where the log seems to tell: NATS was away before Postgres was lost.
    pub always: bool,
}

/// What is to be done, and why.
#[derive(Debug, Clone, Serialize)]
pub struct Examined {
    /// The database is another one than the engine knew.
    pub database_is_another: bool,
    /// The newest frames of the log are ahead of their mailboxes.
    pub log_is_ahead: bool,
    /// When the database was last seen to be the known one.
    pub restored_to: DateTime<Utc>,
    /// Whether the log holds all that was published since.
    pub log_reaches_back: bool,
    /// Frames of the log that were published since.
    pub frames: u64,
}

/// What was done.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Mended {
    /// When the database was last seen to be the known one.
    pub restored_to: DateTime<Utc>,
    /// Whether the log held all that was published since.
    pub log_reached_back: bool,
    /// Deliveries that were written again.
    pub recovered: u64,
    /// Deliveries that became dead letters, reason `lost_in_restore`.
    pub lost: u64,
    /// Mailboxes whose numbers were raised above what the log showed.
    pub raised: u64,
    /// Mailboxes whose numbers were raised by the margin.
    pub jumped: u64,
    /// By how much; 0 when none were.
    pub margin: i64,
}

/// Whoever mends.
pub struct Mender<'a> {
    store: &'a Store,
    stream: &'a Stream,
    ids: &'a IdSource,
    engine: Option<&'a Engine>,
}

impl<'a> Mender<'a> {
    /// One that has an engine, which tells senders.
    #[must_use]
    pub fn of(engine: &'a Engine) -> Self {
        Self { store: engine.store(), stream: &engine.inner.stream, ids: &engine.inner.ids, engine: Some(engine) }
    }

    /// One at a terminal. What it does is recorded; nobody is told at once.
    #[must_use]
    pub const fn by_hand(store: &'a Store, stream: &'a Stream, ids: &'a IdSource) -> Self {
        Self { store, stream, ids, engine: None }
    }

    fn now(&self) -> DateTime<Utc> {
        DateTime::from_timestamp_millis(self.ids.now_ms()).unwrap_or_default()
    }

    /// Whether the log shows numbers that mailboxes have not given away yet, or mailboxes that are not there. The log is
    /// read first: what is in it was committed before, so that in a database that was not restored it is below the head.
    /// Mailboxes that a recovery of this database could not bring back are known to be missing.
    ///
    /// # Errors
    /// When Postgres or JetStream is away.
    pub async fn log_is_ahead(&self, database: &DatabaseState) -> EngineResult<bool> {
        let Some(state) = self.stream.log_state(LogKind::Deliveries).await? else { return Ok(false) };
        if state.last == 0 {
            return Ok(false);
        }
        let from = state.last.saturating_sub(NEWEST - 1).max(state.first);
        let newest = self.stream.logged(from, state.last).await?;
        let places: Vec<_> = newest.iter().map(|frame| (frame.scope, frame.agent_id, frame.seq)).collect();
        let mended_ms = database.recovered_at.map_or(i64::MIN, |at| at.timestamp_millis() + SLACK_MS);
        let unknown_too: Vec<bool> = newest.iter().map(|frame| frame.stored_at_ms > mended_ms).collect();
        Ok(!places.is_empty() && self.store.ahead_of_heads(&places, &unknown_too).await? > 0)
    }

    /// What [`Self::mend`] would look at.
    ///
    /// # Errors
    /// When Postgres or JetStream is away.
    pub async fn examine(&self, database: &DatabaseState) -> EngineResult<Examined> {
        let log_is_ahead = self.log_is_ahead(database).await?;
        let (from, to, log_reaches_back) = self.span(LogKind::Deliveries, database).await?;
        Ok(Examined {
            database_is_another: database.is_another(),
            log_is_ahead,
            restored_to: database.seen_at,
            log_reaches_back,
            frames: (to + 1).saturating_sub(from),
        })
    }

    /// The places of the log that were published since the restored state, and whether none are missing.
    async fn span(&self, kind: LogKind, database: &DatabaseState) -> EngineResult<(u64, u64, bool)> {
        let Some(state) = self.stream.log_state(kind).await? else { return Ok((1, 0, false)) };
        let restored_to_ms = database.seen_at.timestamp_millis();
        let from = self.stream.place_of(kind, &state, restored_to_ms - SLACK_MS).await?;
        Ok((from, state.last, reaches(Some(reach(&state)), restored_to_ms)))
    }

    /// Raises numbers above all that were given away, and writes again what the log still holds of what was lost.
    /// The caller has the lock, and nobody is served. Interrupted, it is to be done again from the start, which
    /// gives nothing away twice.
    ///
    /// # Errors
    /// When Postgres or JetStream is away.
    pub async fn mend(
        &self,
        database: &DatabaseState,
        margin: Margin,
        mut progress: impl FnMut(Progress) + Send,
    ) -> EngineResult<Mended> {
        self.store.ensure_partitions(DAYS_AHEAD).await?;
        // Events first: what is recorded below must not take a number that observers have seen. Events that nobody
        // watched were not published, so that the log never tells all of them.
        let (from, to, _) = self.span(LogKind::Events, database).await?;
        self.store.jump_event_heads(margin.numbers).await?;
        for (first, last) in pages(from, to) {
            self.store.raise_event_heads(&self.stream.logged_events(first, last).await?).await?;
        }
        let (from, to, log_reached_back) = self.span(LogKind::Deliveries, database).await?;
        let mut mended = Mended { restored_to: database.seen_at, log_reached_back, ..Mended::default() };
        let mut highest: HashMap<(WorkspaceScope, AgentId), Seq> = HashMap::new();
        for (first, last) in pages(from, to) {
            let logged: Vec<_> =
                self.stream.logged(first, last).await?.into_iter().filter_map(frames::delivery).collect();
            let done = self.store.reinsert(&logged, self.now()).await?;
            for (scope, agent, seq) in done.ahead {
                let known = highest.entry((scope, agent)).or_insert(seq);
                *known = (*known).max(seq);
            }
            mended.recovered += done.recovered;
            mended.lost += done.dead.len() as u64;
            self.tell(&done.dead, done.recorded);
            progress(Progress { looked_at: last + 1 - from, of: to + 1 - from });
        }
        let mut raised: Vec<_> = highest.into_iter().map(|((scope, agent), seq)| (scope, agent, seq)).collect();
        raised.sort_unstable_by_key(|(scope, agent, _)| (scope.workspace_id(), *agent));
        mended.raised = raised.len() as u64;
        for some in raised.chunks(MAILBOXES) {
            mended.lost += self.store.raise_heads(some, self.now(), || self.ids.next_id()).await?;
        }
        if !log_reached_back || margin.always {
            mended.margin = margin.numbers;
            let mut after = (0, 0);
            loop {
                let limit = i64::try_from(MAILBOXES).unwrap_or(i64::MAX);
                let ids = || self.ids.next_id();
                let jumped = self.store.jump_heads(after, limit, margin.numbers, self.now(), ids).await?;
                mended.jumped += jumped.mailboxes;
                mended.lost += jumped.given_up;
                let Some(last) = jumped.last else { break };
                after = last;
            }
        }
        metrics::counter!(metric_names::RECOVERIES).increment(1);
        metrics::counter!(metric_names::DELIVERIES_RECOVERED).increment(mended.recovered);
        self.store.know_database(Some(&json!(mended))).await?;
        Ok(mended)
    }

    fn tell(&self, dead: &[DeadLettered], recorded: Vec<Recorded>) {
        if let Some(engine) = self.engine {
            engine.announce_dead_letters(dead, recorded);
        }
    }
}

fn reach(state: &LogState) -> Reach {
    Reach { created_at_ms: state.created_at_ms, is_whole: state.first <= 1, oldest_at_ms: state.first_at_ms }
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
