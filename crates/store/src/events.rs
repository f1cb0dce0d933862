//! The event log of a workspace: written by the transactions that make events, read by whoever observes.
//!
//! Numbers are contiguous from 1 per workspace. The counter stays locked until the commit, so whoever sees
//! event n can read all before it. It is the last lock that a transaction takes (invariant 8).

use std::borrow::Cow;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, ChannelId, MessageId, WorkspaceId, WorkspaceScope};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::{PgConnection, types::Json};

use crate::{MessageRow, Store, StoreError, StoreResult, commit::day_of};

/// Records of one read at most. With a record holding what one transaction made, a page of events needs few.
const RECORDS_AT_ONCE: i64 = 500;

/// An event, before or after it has its number.
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvent {
    /// Its type, such as `message.created`.
    pub kind: Cow<'static, str>,
    /// The channel that it happened in; none for conversations and whatever has no place.
    pub channel_id: Option<ChannelId>,
    /// The channel's name.
    pub channel_name: Option<String>,
    /// The conversation that it happened in, as clients call it.
    pub conversation_id: Option<String>,
    /// Who did it, or whom it is about.
    pub agent_id: Option<AgentId>,
    /// What it says.
    pub body: EventBody,
}

/// What an event says.
#[derive(Debug, Clone, PartialEq)]
pub enum EventBody {
    /// What the stored message says.
    Message(MessageId),
    /// A flat object, as subscriptions and nodes get it.
    Data(Value),
}

impl NewEvent {
    /// An event without a place and without an author.
    #[must_use]
    pub fn new(kind: impl Into<Cow<'static, str>>, data: Value) -> Self {
        Self {
            kind: kind.into(),
            channel_id: None,
            channel_name: None,
            conversation_id: None,
            agent_id: None,
            body: EventBody::Data(data),
        }
    }

    /// The same event, in a channel.
    #[must_use]
    pub fn in_channel(self, id: ChannelId, name: impl Into<String>) -> Self {
        Self { channel_id: Some(id), channel_name: Some(name.into()), ..self }
    }

    /// The same event, in a conversation if one is given.
    #[must_use]
    pub fn in_conversation(self, id: Option<String>) -> Self {
        Self { conversation_id: id, ..self }
    }

    /// The same event, by or about an agent.
    #[must_use]
    pub fn by(self, agent: AgentId) -> Self {
        Self { agent_id: Some(agent), ..self }
    }

    /// The event of a stored message.
    #[must_use]
    pub fn of_message(kind: &'static str, message: &MessageRow) -> Self {
        let channel = message.conversation_id.is_none();
        Self {
            kind: kind.into(),
            channel_id: channel.then_some(ChannelId::new(message.channel_id)),
            channel_name: channel.then(|| message.channel_name.clone()),
            conversation_id: message.conversation_id.clone(),
            agent_id: Some(AgentId::new(message.agent_id)),
            body: EventBody::Message(MessageId::new(message.message_id)),
        }
    }
}

/// An agent's status is another one now.
#[must_use]
pub fn status_event(agent: AgentId, name: &str, status: &str) -> NewEvent {
    let data = json!({
        "agent_id": agent.to_string(), "agent_name": name, "status": status,
        "agent": { "name": name, "id": agent.to_string() },
    });
    NewEvent::new(format!("agent.status.{status}"), data).by(agent)
}

/// Events of one transaction and workspace, with their numbers.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The number of the first; the others follow without a gap.
    pub first_seq: i64,
    /// When they happened.
    pub created_at: DateTime<Utc>,
    /// In order.
    pub events: Vec<NewEvent>,
    /// Whether somebody may be looking.
    pub watched: bool,
}

/// How an event is kept.
#[derive(Serialize, Deserialize)]
struct Kept {
    t: Cow<'static, str>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    c: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    n: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    v: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    a: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    m: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    d: Option<Value>,
}

impl From<&NewEvent> for Kept {
    fn from(event: &NewEvent) -> Self {
        let (m, d) = match &event.body {
            EventBody::Message(id) => (Some(id.get()), None),
            EventBody::Data(data) => (None, Some(data.clone())),
        };
        Self {
            t: event.kind.clone(),
            c: event.channel_id.map(ChannelId::get),
            n: event.channel_name.clone(),
            v: event.conversation_id.clone(),
            a: event.agent_id.map(AgentId::get),
            m,
            d,
        }
    }
}

impl From<Kept> for NewEvent {
    fn from(kept: Kept) -> Self {
        Self {
            kind: kept.t,
            channel_id: kept.c.map(ChannelId::new),
            channel_name: kept.n,
            conversation_id: kept.v,
            agent_id: kept.a.map(AgentId::new),
            body: match kept.m {
                Some(id) => EventBody::Message(MessageId::new(id)),
                None => EventBody::Data(kept.d.unwrap_or_default()),
            },
        }
    }
}

/// Numbers and records what a transaction did in one workspace. The last statement before its COMMIT;
/// without events it does nothing and answers an empty record.
pub(crate) async fn append(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    at: DateTime<Utc>,
    events: Vec<NewEvent>,
) -> StoreResult<Recorded> {
    if events.is_empty() {
        return Ok(Recorded { scope, first_seq: 0, created_at: at, events, watched: false });
    }
    let mut recorded = append_all(tx, at, vec![(scope, events)]).await?;
    recorded.pop().ok_or_else(|| StoreError::still_away("recording events"))
}

/// The same for several workspaces at once, none of them twice and none without events.
pub(crate) async fn append_all(
    tx: &mut PgConnection,
    at: DateTime<Utc>,
    events: Vec<(WorkspaceScope, Vec<NewEvent>)>,
) -> StoreResult<Vec<Recorded>> {
    let doing = "recording events";
    let workspaces: Vec<i64> = events.iter().map(|(scope, _)| scope.workspace_id().get()).collect();
    let counts: Vec<i64> = events.iter().map(|(_, events)| i64::try_from(events.len()).unwrap_or(0)).collect();
    let mut bodies: Vec<String> = Vec::with_capacity(events.len());
    for (_, events) in &events {
        let kept: Vec<Kept> = events.iter().map(Kept::from).collect();
        // Strings, numbers and JSON values always encode.
        bodies.push(serde_json::to_string(&kept).unwrap_or_default());
    }
    let numbered: Vec<(i64, i64, bool)> = sqlx::query_as(
        "WITH made AS (
             SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS e (workspace_id, n, events)
         ), bumped AS (
             INSERT INTO event_heads AS h (workspace_id, next_seq)
             SELECT workspace_id, 1 + n FROM made ORDER BY workspace_id
             ON CONFLICT (workspace_id) DO UPDATE SET next_seq = h.next_seq + excluded.next_seq - 1
             RETURNING workspace_id, next_seq, watched_until > now() AS watched
         ), logged AS (
             INSERT INTO event_log (workspace_id, last_seq, created_on, first_seq, created_at, events)
             SELECT workspace_id, b.next_seq - 1, $5, b.next_seq - m.n, $4, m.events::json
               FROM made m JOIN bumped b USING (workspace_id)
         )
         SELECT workspace_id, next_seq - n, watched FROM made JOIN bumped USING (workspace_id)",
    )
    .bind(workspaces)
    .bind(counts)
    .bind(bodies)
    .bind(at)
    .bind(day_of(at))
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    let mut recorded = Vec::with_capacity(numbered.len());
    for (scope, events) in events {
        let workspace = scope.workspace_id().get();
        let Some((_, first_seq, watched)) = numbered.iter().find(|(id, _, _)| *id == workspace) else { continue };
        recorded.push(Recorded { scope, first_seq: *first_seq, created_at: at, events, watched: *watched });
    }
    Ok(recorded)
}

/// The same, for events of any workspaces in any order.
pub(crate) async fn append_mixed(
    tx: &mut PgConnection,
    at: DateTime<Utc>,
    events: Vec<(WorkspaceScope, NewEvent)>,
) -> StoreResult<Vec<Recorded>> {
    let mut made: Vec<(WorkspaceScope, Vec<NewEvent>)> = Vec::new();
    for (scope, event) in events {
        match made.iter_mut().find(|(known, _)| *known == scope) {
            Some((_, all)) => all.push(event),
            None => made.push((scope, vec![event])),
        }
    }
    if made.is_empty() { Ok(Vec::new()) } else { append_all(tx, at, made).await }
}

/// Where a workspace's log stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventHead {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The number that the next event gets.
    pub next_seq: i64,
}

#[derive(sqlx::FromRow)]
struct RecordRow {
    first_seq: i64,
    created_at: DateTime<Utc>,
    events: Json<Vec<Kept>>,
}

impl Store {
    /// Where these workspaces' logs stand; one without events stands at 1.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn event_heads(&self, of: &[WorkspaceScope]) -> StoreResult<Vec<EventHead>> {
        let workspaces: Vec<i64> = of.iter().map(|scope| scope.workspace_id().get()).collect();
        let rows: Vec<(i64, i64)> = sqlx::query_as(
            "SELECT k.workspace_id, coalesce(h.next_seq, 1)
               FROM unnest($1::bigint[]) AS k (workspace_id)
               LEFT JOIN event_heads h USING (workspace_id)",
        )
        .bind(workspaces)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading where event logs stand"))?;
        let scope = |id| WorkspaceScope::from_engine_row(WorkspaceId::new(id));
        Ok(rows.into_iter().map(|(id, next_seq)| EventHead { scope: scope(id), next_seq }).collect())
    }

    /// Says that somebody looks at these workspaces' events for the next `minutes`.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn watch_events(&self, of: &[WorkspaceScope], minutes: i32) -> StoreResult<()> {
        let mut workspaces: Vec<i64> = of.iter().map(|scope| scope.workspace_id().get()).collect();
        workspaces.sort_unstable();
        workspaces.dedup();
        // Half of the time is left: no need to wait for the counter's lock.
        sqlx::query(
            "INSERT INTO event_heads AS h (workspace_id, watched_until)
             SELECT k.workspace_id, now() + make_interval(mins => $2)
               FROM unnest($1::bigint[]) AS k (workspace_id)
               LEFT JOIN event_heads e USING (workspace_id)
              WHERE coalesce(e.watched_until, '-infinity') < now() + make_interval(mins => $2) / 2
              ORDER BY 1
             ON CONFLICT (workspace_id)
             DO UPDATE SET watched_until = greatest(h.watched_until, excluded.watched_until)",
        )
        .bind(workspaces)
        .bind(minutes)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("watching events"))?;
        Ok(())
    }

    /// Whole records with events above `since`, oldest first: at least `events` events, if there are that
    /// many in the next 500 records.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn events_since(&self, scope: WorkspaceScope, since: i64, events: i64) -> StoreResult<Vec<Recorded>> {
        // How many records make that many events: read the small columns first.
        let rows: Vec<RecordRow> = sqlx::query_as(
            "WITH next AS (
                 SELECT last_seq, created_on, first_seq FROM event_log
                  WHERE workspace_id = $1 AND last_seq > $2
                  ORDER BY last_seq LIMIT $4
             )
             SELECT l.first_seq, l.created_at, l.events
               FROM next n
               JOIN event_log l ON l.workspace_id = $1 AND l.last_seq = n.last_seq AND l.created_on = n.created_on
              WHERE n.first_seq <= $2 + $3
              ORDER BY n.last_seq",
        )
        .bind(scope.workspace_id().get())
        .bind(since)
        .bind(events.max(1))
        .bind(RECORDS_AT_ONCE)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading events"))?;
        Ok(rows
            .into_iter()
            .map(|row| Recorded {
                scope,
                first_seq: row.first_seq,
                created_at: row.created_at,
                events: row.events.0.into_iter().map(NewEvent::from).collect(),
                watched: true,
            })
            .collect())
    }

    /// The oldest number that is still kept, and the one that the next event gets. With nothing kept both
    /// are the same.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn event_range(&self, scope: WorkspaceScope) -> StoreResult<(i64, i64)> {
        sqlx::query_as(
            "SELECT coalesce((SELECT first_seq FROM event_log WHERE workspace_id = $1 ORDER BY last_seq LIMIT 1),
                             h.next_seq, 1),
                    coalesce(h.next_seq, 1)
               FROM (SELECT) AS one LEFT JOIN event_heads h ON h.workspace_id = $1",
        )
        .bind(scope.workspace_id().get())
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the range of an event log"))
    }

    /// Removes the oldest records of workspaces whose log holds more than `kept` events, a bounded number of
    /// records at a time. Returns how many records went.
    ///
    /// # Errors
    /// When Postgres is away.
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
