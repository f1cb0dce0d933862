//! Session events: reports of an agent's session, numbered per agent in commit order. Their effect on the agent's
//! status is written in the same transaction. Called by the engine's session event routes.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, JsonText, SessionEventId, WorkspaceScope,
    agents::{AgentStatus, session_event::SessionEvent},
    events::kind,
    observers::ObserverFilters,
};
use relay_wire::{events::recorded_data::SessionReported, field::ToValue as _};
use serde_json::Value;
use sqlx::{FromRow, Row as _, postgres::PgRow, types::Json};

use crate::{
    Store, StoreError, StoreResult,
    access::idempotency::{IdempotencyKey, SessionEventRecord, claim_key},
    agents::presence,
    events::{self, Event, RecordedEvents},
    messages::contents::decode_sized,
    observers::filters,
};

struct SessionEventRow(SessionEvent);

impl FromRow<'_, PgRow> for SessionEventRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(SessionEvent {
            id: row.try_get("event_id")?,
            agent_id: row.try_get("agent_id")?,
            event_type: row.try_get("type")?,
            // Read apart from the list.
            payload: JsonText::empty_object(),
            sequence: row.try_get("sequence")?,
            created_at: row.try_get("created_at")?,
        }))
    }
}

/// Session event to be recorded.
#[derive(Debug)]
pub struct NewSessionEvent<'a> {
    pub event_id: SessionEventId,
    pub agent_id: AgentId,
    pub agent_name: &'a str,
    pub event_type: &'a str,
    /// JSON object.
    pub payload: &'a Value,
    /// Status that the event sets.
    pub status: Option<AgentStatus>,
    pub at: DateTime<Utc>,
    pub key: Option<IdempotencyKey>,
}

/// Outcome of [`Store::record_session_event`].
#[derive(Debug)]
pub enum SessionEventOutcome {
    Recorded {
        sequence: i64,
        status_changed: bool,
        recorded: RecordedEvents,
    },
    /// The idempotency key was used before. Nothing was written.
    KeyUsed,
}

// The head row is locked by the upsert, which numbers the events of an agent in commit order without gaps.
const APPEND: &str = "
WITH head AS (
    INSERT INTO session_heads AS h (workspace_id, agent_id, next_sequence) VALUES ($1, $2, 2)
    ON CONFLICT (workspace_id, agent_id) DO UPDATE SET next_sequence = h.next_sequence + 1
    RETURNING next_sequence - 1 AS sequence
), event AS (
    INSERT INTO session_events (workspace_id, agent_id, sequence, event_id, type, payload, created_at)
    SELECT $1, $2, sequence, $3, $4, $5, $6 FROM head
)
SELECT sequence FROM head";

impl Store {
    /// Records a session event. The agent's head row stays locked until the commit, so that sequences and their effects
    /// have one order across gateways.
    pub async fn record_session_event(
        &self,
        scope: WorkspaceScope,
        new: &NewSessionEvent<'_>,
    ) -> StoreResult<SessionEventOutcome> {
        let doing = "recording a session event";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Before the key is claimed, because the record of the key contains the sequence.
        let sequence: i64 = sqlx::query_scalar(APPEND)
            .bind(scope.workspace_id())
            .bind(new.agent_id)
            .bind(new.event_id)
            .bind(new.event_type)
            .bind(new.payload)
            .bind(new.at)
            .fetch_one(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let record = SessionEventRecord { event_id: new.event_id, sequence, at: new.at };
        if let Some(key) = &new.key
            && !claim_key(&mut tx, scope.workspace_id(), key, &record).await?
        {
            // Dropping the transaction rolls back, so the sequence number is free again.
            return Ok(SessionEventOutcome::KeyUsed);
        }
        let mut changed = false;
        if let Some(status) = new.status {
            changed = presence::set_status(&mut tx, scope, new.agent_id, status, None, new.at).await?.is_some();
        }
        let event = observer_event(new, sequence, changed);
        let recorded = events::append(&mut tx, scope, new.at, vec![event]).await?;
        // Without a key a repetition would record the event twice.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(SessionEventOutcome::Recorded { sequence, status_changed: changed, recorded })
    }

    /// Lists session events of an agent without their payloads, and the bytes of these; newest first, all or those of
    /// one type.
    pub async fn session_events(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        event_type: Option<&str>,
        filters: &ObserverFilters,
        limit: i64,
    ) -> StoreResult<Vec<(SessionEvent, usize)>> {
        // Two statements, because each has an index of its own.
        let query = match event_type {
            Some(_) => sqlx::query(
                "SELECT event_id, agent_id, type, octet_length(payload::text)::bigint AS content_bytes, sequence, created_at
                   FROM session_events
                  WHERE workspace_id = $1 AND agent_id = $2 AND created_at >= $4 AND type = $5
                  ORDER BY sequence DESC LIMIT $3",
            ),
            None => sqlx::query(
                "SELECT event_id, agent_id, type, octet_length(payload::text)::bigint AS content_bytes, sequence, created_at
                   FROM session_events
                  WHERE workspace_id = $1 AND agent_id = $2 AND created_at >= $4 ORDER BY sequence DESC LIMIT $3",
            ),
        };
        let not_before = filters::not_before(filters).0;
        let query = query.bind(scope.workspace_id()).bind(agent).bind(limit).bind(not_before);
        let rows = match event_type {
            Some(event_type) => query.bind(event_type).fetch_all(&self.pool).await,
            None => query.fetch_all(&self.pool).await,
        }
        .map_err(StoreError::from_sqlx("listing session events"))?;
        let sized = decode_sized::<SessionEventRow>("session_events", &rows)?;
        Ok(sized.into_iter().map(|(row, bytes)| (row.0, bytes)).collect())
    }

    /// Reads the payloads of an agent's session events, by their sequence. Removed events are left out.
    pub async fn session_event_payloads(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        sequences: &[i64],
    ) -> StoreResult<HashMap<i64, JsonText>> {
        // Decoding makes the text compact, which some are not stored as.
        let rows: Vec<(i64, Json<JsonText>)> = sqlx::query_as(
            "SELECT sequence, payload FROM session_events
              WHERE workspace_id = $1 AND agent_id = $2 AND sequence = ANY ($3)",
        )
        .bind(scope.workspace_id())
        .bind(agent)
        .bind(sequences)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the payloads of session events"))?;
        Ok(rows.into_iter().map(|(sequence, Json(payload))| (sequence, payload)).collect())
    }

    /// Removes at most `limit` session events older than `age`. Returns the number of removed rows.
    pub async fn prune_session_events(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        // SKIP LOCKED: several workers may prune at once, and none waits for another.
        let done = sqlx::query(
            "DELETE FROM session_events e
              USING (SELECT workspace_id, agent_id, sequence FROM session_events
                      WHERE created_at < relay_now() - make_interval(secs => $1)
                      ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED) AS old
              WHERE e.workspace_id = old.workspace_id AND e.agent_id = old.agent_id AND e.sequence = old.sequence",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning session events"))?;
        Ok(done.rows_affected())
    }
}

/// Creates the event for observers: a status event if the status changed, else the report itself.
fn observer_event(new: &NewSessionEvent<'_>, sequence: i64, status_changed: bool) -> Event {
    match new.status {
        Some(status) if status_changed => {
            let event = events::status_event(new.agent_id, new.agent_name, status);
            if new.event_type == "status.changed" {
                Event { kind: kind::AGENT_STATUS_CHANGED.into(), ..event }
            } else {
                event
            }
        }
        _ => {
            let data = SessionReported {
                agent_name: new.agent_name,
                id: new.event_id,
                agent_id: new.agent_id,
                payload: new.payload,
                sequence,
            };
            Event::new(format!("{}{}", kind::HARNESS_PREFIX, new.event_type), data.to_value()).by_agent(new.agent_id)
        }
    }
}
