//! Event log of a workspace: appended by the transactions that cause events, read by observers and subscriptions.
//!
//! The main types are [`Event`] and [`RecordedEvents`]. Seqs are contiguous from 1 per workspace. The counter stays
//! locked until the commit, so a reader that sees event n can read all before it. Every transaction of the workspace
//! contends for the counter; it is therefore the last lock that a transaction takes.

use std::borrow::Cow;

use chrono::{DateTime, Utc};
use const_format::formatcp;
pub use relay_domain::events::{Event, EventBody, EventSeq};
use relay_domain::{AgentId, ChannelId, MessageId, WorkspaceId, WorkspaceScope, agents::AgentStatus, ids::as_number};
use relay_wire::{
    events::recorded_data::{AgentStatusChanged, NamedAgent},
    field::ToValue as _,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::{
    FromRow, Postgres,
    postgres::{PgArguments, PgRow},
    query::Query,
    types::Json,
};

use crate::{
    Store, StoreError, StoreResult, connections::DatabaseSession, decode::decode_rows, messages::days::day_of,
    sizes::RECORD_BYTES,
};

/// Records per read at most. A record holds all events of one transaction, so a page of events needs few.
const MAX_BATCH_RECORDS: i64 = 500;
/// A read ends before the record that exceeds this.
const MAX_BATCH_BYTES: i64 = 1024 * 1024;

/// Events of one transaction and workspace, with their seqs.
#[derive(Debug, Clone)]
pub struct RecordedEvents {
    pub scope: WorkspaceScope,
    /// Seq of the first event; the others follow without a gap.
    pub first_seq: EventSeq,
    pub created_at: DateTime<Utc>,
    pub events: Vec<Event>,
    /// True if the workspace has observers.
    pub watched: bool,
}

/// Builds the event of a changed agent status.
pub(crate) fn status_event(agent: AgentId, name: &str, status: AgentStatus) -> Event {
    let agent_ref = NamedAgent { name, id: agent };
    let status = status.as_str();
    let data = AgentStatusChanged { agent_id: agent, agent_name: name, status, agent: agent_ref };
    Event::new(format!("agent.status.{status}"), data.to_value()).by_agent(agent)
}

/// Stored form of an event. Short keys, because every event of a workspace is stored.
#[derive(Serialize, Deserialize)]
struct StoredEvent {
    #[serde(rename = "t")]
    kind: Cow<'static, str>,
    #[serde(rename = "c", default, skip_serializing_if = "Option::is_none", with = "as_number::option")]
    channel_id: Option<ChannelId>,
    #[serde(rename = "n", default, skip_serializing_if = "Option::is_none")]
    channel_name: Option<String>,
    #[serde(rename = "v", default, skip_serializing_if = "Option::is_none")]
    conversation_id: Option<String>,
    #[serde(rename = "a", default, skip_serializing_if = "Option::is_none", with = "as_number::option")]
    agent_id: Option<AgentId>,
    #[serde(rename = "m", default, skip_serializing_if = "Option::is_none", with = "as_number::option")]
    message_id: Option<MessageId>,
    #[serde(rename = "d", default, skip_serializing_if = "Option::is_none")]
    data: Option<Value>,
}

impl From<&Event> for StoredEvent {
    fn from(event: &Event) -> Self {
        let (message_id, data) = match &event.body {
            EventBody::Message(id) => (Some(*id), None),
            EventBody::Data(data) => (None, Some(data.clone())),
        };
        Self {
            kind: event.kind.clone(),
            channel_id: event.channel_id,
            channel_name: event.channel_name.clone(),
            conversation_id: event.conversation_id.clone(),
            agent_id: event.agent_id,
            message_id,
            data,
        }
    }
}

/// Event as it is read back.
#[derive(Deserialize)]
#[serde(try_from = "StoredEvent")]
struct LoggedEvent(Event);

impl TryFrom<StoredEvent> for LoggedEvent {
    type Error = &'static str;

    fn try_from(stored: StoredEvent) -> Result<Self, Self::Error> {
        let body = match (stored.message_id, stored.data) {
            (Some(id), _) => EventBody::Message(id),
            (None, Some(data)) => EventBody::Data(data),
            (None, None) => return Err("an event has neither a message nor data"),
        };
        Ok(Self(Event {
            kind: stored.kind,
            channel_id: stored.channel_id,
            channel_name: stored.channel_name,
            conversation_id: stored.conversation_id,
            agent_id: stored.agent_id,
            body,
        }))
    }
}

/// Appends the events of one workspace. Must be the last statement before COMMIT, because it locks the workspace's
/// counter. Without events it does nothing and returns an empty record.
pub(crate) async fn append(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    at: DateTime<Utc>,
    events: Vec<Event>,
) -> StoreResult<RecordedEvents> {
    if events.is_empty() {
        return Ok(RecordedEvents { scope, first_seq: 0, created_at: at, events, watched: false });
    }
    let mut recorded = append_mixed(tx, at, events.into_iter().map(|event| (scope, event)).collect()).await?;
    // There were events, so there is a record.
    recorded.pop().ok_or_else(|| StoreError::unavailable("recording events"))
}

/// CTEs that number the events of `made` (workspace_id, event_count, events), which the caller defines, and store them.
/// `raised` has the counters, which stay locked until the commit.
// The insert is for the first record of a workspace, from seq 1. A later one adds `event_count` to the counter.
macro_rules! appended_events {
    ($at:literal, $day:literal) => {
        const_format::concatcp!(
            "raised AS (
    INSERT INTO event_heads AS h (workspace_id, next_seq)
    SELECT workspace_id, 1 + event_count FROM made ORDER BY workspace_id
    ON CONFLICT (workspace_id) DO UPDATE SET next_seq = h.next_seq + excluded.next_seq - 1
    RETURNING workspace_id, next_seq, watched_until > relay_now() AS watched
), logged AS (
    INSERT INTO event_log (workspace_id, last_seq, created_on, first_seq, created_at, events)
    SELECT workspace_id, r.next_seq - 1, ",
            $day,
            ", r.next_seq - m.event_count, ",
            $at,
            ", m.events::json
      FROM made m JOIN raised r USING (workspace_id)
)"
        )
    };
}
pub(crate) use appended_events;

/// End of a statement with [`appended_events!`]: the first seq of each workspace, and whether it is watched.
pub(crate) const NUMBERED: &str =
    " SELECT workspace_id, next_seq - event_count, watched FROM made JOIN raised USING (workspace_id)";

const APPEND: &str = const_format::concatcp!(
    "WITH made AS (
         SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS e (workspace_id, event_count, events)
     ), ",
    appended_events!("$4", "$5"),
    NUMBERED
);

/// Events of one transaction, as columns with a row for each workspace.
pub(crate) struct EventColumns {
    at: DateTime<Utc>,
    events: Vec<(WorkspaceScope, Vec<Event>)>,
    workspaces: Vec<WorkspaceId>,
    counts: Vec<i64>,
    bodies: Vec<String>,
}

impl EventColumns {
    /// Collects events of any workspaces in any order.
    pub(crate) fn collect(at: DateTime<Utc>, events: Vec<(WorkspaceScope, Event)>) -> Self {
        let made = group_by_workspace(events);
        let mut columns =
            Self { at, events: Vec::new(), workspaces: Vec::new(), counts: Vec::new(), bodies: Vec::new() };
        for (scope, events) in &made {
            let kept: Vec<StoredEvent> = events.iter().map(StoredEvent::from).collect();
            columns.workspaces.push(scope.workspace_id());
            // A length always fits.
            columns.counts.push(i64::try_from(events.len()).unwrap_or(0));
            // Strings, numbers and JSON values always encode.
            columns.bodies.push(serde_json::to_string(&kept).unwrap_or_default());
        }
        columns.events = made;
        columns
    }

    /// Binds the columns of `made`, the time and the day.
    pub(crate) fn bind<'q>(&'q self, query: Query<'q, Postgres, PgArguments>) -> Query<'q, Postgres, PgArguments> {
        query.bind(&self.workspaces).bind(&self.counts).bind(&self.bodies).bind(self.at).bind(day_of(self.at))
    }

    /// Returns the events with their seqs, given the first seq of each workspace and whether it is watched.
    pub(crate) fn recorded(self, numbered: &[(WorkspaceId, EventSeq, bool)]) -> Vec<RecordedEvents> {
        number_events(self.at, self.events, numbered)
    }

    /// Returns the events with their seqs, given the rows of [`NUMBERED`].
    pub(crate) fn recorded_by(self, rows: &[PgRow]) -> StoreResult<Vec<RecordedEvents>> {
        let numbered: Result<Vec<_>, _> = rows.iter().map(FromRow::from_row).collect();
        Ok(self.recorded(&numbered.map_err(StoreError::from_sqlx("recording events"))?))
    }
}

/// Groups events by their workspaces. The events of a workspace keep their order.
pub(crate) fn group_by_workspace(events: Vec<(WorkspaceScope, Event)>) -> Vec<(WorkspaceScope, Vec<Event>)> {
    let mut groups: Vec<(WorkspaceScope, Vec<Event>)> = Vec::new();
    for (scope, event) in events {
        match groups.iter_mut().find(|(known, _)| *known == scope) {
            Some((_, all)) => all.push(event),
            None => groups.push((scope, vec![event])),
        }
    }
    groups
}

/// Adds their seqs to events that were stored, given the first seq of each workspace and whether it is watched.
pub(crate) fn number_events(
    at: DateTime<Utc>,
    events: Vec<(WorkspaceScope, Vec<Event>)>,
    numbered: &[(WorkspaceId, EventSeq, bool)],
) -> Vec<RecordedEvents> {
    let mut recorded = Vec::with_capacity(numbered.len());
    for (scope, events) in events {
        let workspace = scope.workspace_id();
        let Some((_, first_seq, watched)) = numbered.iter().find(|(id, _, _)| *id == workspace) else { continue };
        recorded.push(RecordedEvents { scope, first_seq: *first_seq, created_at: at, events, watched: *watched });
    }
    recorded
}

/// Appends events of any workspaces in any order. Counters are locked in the order of the workspaces.
pub(crate) async fn append_mixed(
    tx: &mut DatabaseSession,
    at: DateTime<Utc>,
    events: Vec<(WorkspaceScope, Event)>,
) -> StoreResult<Vec<RecordedEvents>> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let doing = "recording events";
    let columns = EventColumns::collect(at, events);
    let rows = columns.bind(sqlx::query(APPEND)).fetch_all(tx).await.map_err(StoreError::from_sqlx(doing))?;
    columns.recorded_by(&rows)
}

/// Head of a workspace's event log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventHead {
    pub scope: WorkspaceScope,
    pub next_seq: EventSeq,
}

#[derive(sqlx::FromRow)]
struct RecordRow {
    first_seq: EventSeq,
    created_at: DateTime<Utc>,
    events: Json<Vec<LoggedEvent>>,
}

impl Store {
    /// Records an event that no other change causes.
    pub async fn record_event(
        &self,
        scope: WorkspaceScope,
        event: Event,
        at: DateTime<Utc>,
    ) -> StoreResult<RecordedEvents> {
        let doing = "recording an event";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let recorded = append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(recorded)
    }

    /// Reads the heads of event logs; a log without events has head 1.
    pub async fn event_heads(&self, scopes: &[WorkspaceScope]) -> StoreResult<Vec<EventHead>> {
        let workspaces: Vec<WorkspaceId> = scopes.iter().map(|scope| scope.workspace_id()).collect();
        let rows: Vec<(WorkspaceScope, EventSeq)> = sqlx::query_as(
            "SELECT k.workspace_id, coalesce(h.next_seq, 1)
               FROM unnest($1::bigint[]) AS k (workspace_id)
               LEFT JOIN event_heads h USING (workspace_id)",
        )
        .bind(workspaces)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading event heads"))?;
        Ok(rows.into_iter().map(|(scope, next_seq)| EventHead { scope, next_seq }).collect())
    }

    /// Marks these workspaces as observed for the next `minutes`.
    pub async fn watch_events(&self, scopes: &[WorkspaceScope], minutes: i32) -> StoreResult<()> {
        let mut workspaces: Vec<WorkspaceId> = scopes.iter().map(|scope| scope.workspace_id()).collect();
        workspaces.sort_unstable();
        workspaces.dedup();
        // A workspace with half of the time left is skipped, so that few renewals wait for the lock of its counter.
        // Sorted, because several counters are locked.
        sqlx::query(
            "INSERT INTO event_heads AS h (workspace_id, watched_until)
             SELECT k.workspace_id, relay_now() + make_interval(mins => $2)
               FROM unnest($1::bigint[]) AS k (workspace_id)
               LEFT JOIN event_heads e USING (workspace_id)
              WHERE coalesce(e.watched_until, '-infinity') < relay_now() + make_interval(mins => $2) / 2
              ORDER BY 1
             ON CONFLICT (workspace_id)
             DO UPDATE SET watched_until = greatest(h.watched_until, excluded.watched_until)",
        )
        .bind(workspaces)
        .bind(minutes)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("marking workspaces as observed"))?;
        Ok(())
    }

    /// Reads whole records with events above `since`, oldest first: at least `events` events, if the next 500 records
    /// hold that many.
    pub async fn events_since(
        &self,
        scope: WorkspaceScope,
        since: EventSeq,
        events: i64,
    ) -> StoreResult<Vec<RecordedEvents>> {
        // The small columns decide how many records are needed, before any body is read.
        let rows = sqlx::query(formatcp!(
            "WITH next AS (
                 SELECT last_seq, created_on, first_seq,
                        sum(bytes) OVER (ORDER BY last_seq) - bytes AS before
                   FROM (SELECT last_seq, created_on, first_seq, {RECORD_BYTES} AS bytes FROM event_log
                          WHERE workspace_id = $1 AND last_seq > $2
                          ORDER BY last_seq LIMIT $4) AS small
             )
             SELECT l.workspace_id, l.first_seq, l.created_at, l.events
               FROM next n
               JOIN event_log l ON l.workspace_id = $1 AND l.last_seq = n.last_seq AND l.created_on = n.created_on
              WHERE n.first_seq <= $2 + $3 AND n.before < $5
              ORDER BY n.last_seq"
        ))
        .bind(scope.workspace_id())
        .bind(since)
        .bind(events.max(1))
        .bind(MAX_BATCH_RECORDS)
        .bind(MAX_BATCH_BYTES)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading events"))?;
        Ok(decode_rows::<RecordRow>("event_log", &rows)?
            .into_iter()
            .map(|row| RecordedEvents {
                scope,
                first_seq: row.first_seq,
                created_at: row.created_at,
                events: row.events.0.into_iter().map(|event| event.0).collect(),
                watched: true,
            })
            .collect())
    }

    /// Returns the seq of the oldest stored event and that of the next one. Both are equal if none is stored.
    pub async fn event_range(&self, scope: WorkspaceScope) -> StoreResult<(EventSeq, EventSeq)> {
        sqlx::query_as(
            "SELECT coalesce((SELECT first_seq FROM event_log WHERE workspace_id = $1 ORDER BY last_seq LIMIT 1),
                             h.next_seq, 1),
                    coalesce(h.next_seq, 1)
               FROM (SELECT) AS one LEFT JOIN event_heads h ON h.workspace_id = $1",
        )
        .bind(scope.workspace_id())
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the range of an event log"))
    }

    /// Removes up to `at_once` of the oldest records of workspaces whose log holds more than `kept` events. Returns the
    /// count of removed records.
    pub async fn prune_events(&self, kept: i64, at_once: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "WITH long AS (
                 SELECT h.workspace_id, h.next_seq - 1 - $1 AS last_dropped FROM event_heads h WHERE h.next_seq > $1
             ), old AS (
                 SELECT l.workspace_id, l.last_seq, l.created_on
                   FROM long CROSS JOIN LATERAL (
                        SELECT e.workspace_id, e.last_seq, e.created_on FROM event_log e
                         WHERE e.workspace_id = long.workspace_id AND e.last_seq <= long.last_dropped
                         ORDER BY e.last_seq LIMIT $2) AS l
                  LIMIT $2
             )
             DELETE FROM event_log e USING old
              WHERE e.workspace_id = old.workspace_id AND e.last_seq = old.last_seq AND e.created_on = old.created_on",
        )
        .bind(kept)
        .bind(at_once)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning events"))?;
        Ok(done.rows_affected())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn events_are_read_back_as_they_were_stored() {
        let data = Event::new("member.joined", json!({ "agent_name": "bob" }));
        for event in [
            data.clone().in_channel(ChannelId::new(3), "general").by_agent(AgentId::new(2)),
            data.in_conversation(Some("77".to_owned())),
            Event { body: EventBody::Message(MessageId::new(5)), ..Event::new("message.created", Value::Null) },
        ] {
            let stored = serde_json::to_string(&StoredEvent::from(&event)).unwrap();
            assert_eq!(serde_json::from_str::<LoggedEvent>(&stored).unwrap().0, event, "{stored}");
        }
        assert!(serde_json::from_str::<LoggedEvent>(r#"{"t":"message.created"}"#).is_err(), "it has no content");
    }
}
