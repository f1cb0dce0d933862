//! What agents' sessions report: numbered per agent in the order of commits, with the effect on the
//! agent's status in the same transaction and order.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, SessionEventId, WorkspaceScope, agent::AgentStatus, event, observer::ObserverFilters};
use serde_json::{Value, json};
use sqlx::{PgConnection, Row};

use crate::{
    Store, StoreError, StoreResult, agent_presence,
    commit::IDEMPOTENCY_KEPT_HOURS,
    events::{self, NewEvent, Recorded},
    filters,
};

/// An event of an agent's session.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct SessionEventRow {
    /// Its id.
    pub event_id: i64,
    /// The agent.
    pub agent_id: i64,
    /// Its type.
    #[sqlx(rename = "type")]
    pub event_type: String,
    /// What it says.
    pub payload: Value,
    /// Its number, from 1 per agent.
    pub sequence: i64,
    /// When it was accepted.
    pub created_at: DateTime<Utc>,
}

/// A session event to be recorded.
#[derive(Debug)]
pub struct NewSessionEvent<'a> {
    /// Its id.
    pub event_id: SessionEventId,
    /// The agent.
    pub agent_id: AgentId,
    /// The agent's name.
    pub agent_name: &'a str,
    /// Its type.
    pub event_type: &'a str,
    /// What it says: an object.
    pub payload: &'a Value,
    /// What the agent is doing from now on, if the event says so.
    pub status: Option<AgentStatus>,
    /// When it was accepted.
    pub at: DateTime<Utc>,
    /// What its idempotency key is stored as, with the fingerprint of the request.
    pub key: Option<([u8; 32], [u8; 32])>,
}

/// What became of recording a session event.
#[derive(Debug)]
pub enum SessionEventOutcome {
    /// It is recorded, under this number.
    Recorded {
        /// Its number.
        sequence: i64,
        /// Whether the agent is doing something else than before.
        status_changed: bool,
        /// What to announce.
        recorded: Recorded,
    },
    /// Its key was used before: nothing was done.
    KeyUsed,
}

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
    /// Records a session event. The agent's head row stays locked until the commit, so that sequences and
    /// their effects have one order, on whichever gateway they arrive.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn record_session_event(
        &self,
        scope: WorkspaceScope,
        new: &NewSessionEvent<'_>,
    ) -> StoreResult<SessionEventOutcome> {
        let doing = "recording a session event";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let sequence: i64 = sqlx::query_scalar(APPEND)
            .bind(scope.workspace_id().get())
            .bind(new.agent_id.get())
            .bind(new.event_id.get())
            .bind(new.event_type)
            .bind(new.payload)
            .bind(new.at)
            .fetch_one(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        if let Some((hash, fingerprint)) = &new.key
            && !keep_key(&mut tx, scope, hash, fingerprint, &rendered(new, sequence)).await?
        {
            // Rolled back: the number is free again.
            return Ok(SessionEventOutcome::KeyUsed);
        }
        let mut changed = false;
        if let Some(status) = new.status {
            changed = agent_presence::set_status(&mut tx, scope, new.agent_id, status, None, new.at).await?.is_some();
        }
        let event = observed(new, sequence, changed);
        let recorded = events::append(&mut tx, scope, new.at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(SessionEventOutcome::Recorded { sequence, status_changed: changed, recorded })
    }

    /// An agent's session events, newest first; with `event_type` only those of that type.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn session_events(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        event_type: Option<&str>,
        filters: &ObserverFilters,
        limit: i64,
    ) -> StoreResult<Vec<SessionEventRow>> {
        let query = match event_type {
            Some(_) => sqlx::query_as(
                "SELECT event_id, agent_id, type, payload, sequence, created_at FROM session_events
                  WHERE workspace_id = $1 AND agent_id = $2 AND created_at >= $4 AND type = $5
                  ORDER BY sequence DESC LIMIT $3",
            ),
            None => sqlx::query_as(
                "SELECT event_id, agent_id, type, payload, sequence, created_at FROM session_events
                  WHERE workspace_id = $1 AND agent_id = $2 AND created_at >= $4 ORDER BY sequence DESC LIMIT $3",
            ),
        };
        let not_before = filters::not_before(filters).0;
        let query = query.bind(scope.workspace_id().get()).bind(agent.get()).bind(limit).bind(not_before);
        match event_type {
            Some(event_type) => query.bind(event_type).fetch_all(&self.pool).await,
            None => query.fetch_all(&self.pool).await,
        }
        .map_err(StoreError::from_sqlx("listing session events"))
    }

    /// Removes up to `limit` session events older than `age`. Returns how many.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn prune_session_events(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM session_events e
              USING (SELECT workspace_id, agent_id, sequence FROM session_events
                      WHERE created_at < now() - make_interval(secs => $1)
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

/// What is kept for a repeated request: enough to answer it again.
fn rendered(new: &NewSessionEvent<'_>, sequence: i64) -> Value {
    json!({ "event_id": new.event_id, "sequence": sequence, "at": new.at.timestamp_millis() })
}

/// What those who watch are told: a change of status where there is one, else what was reported.
fn observed(new: &NewSessionEvent<'_>, sequence: i64, status_changed: bool) -> NewEvent {
    match new.status {
        Some(status) if status_changed => {
            let told = events::status_event(new.agent_id, new.agent_name, status.as_str());
            if new.event_type == "status.changed" {
                NewEvent { kind: event::AGENT_STATUS_CHANGED.into(), ..told }
            } else {
                told
            }
        }
        _ => {
            let data = json!({
                "agent_name": new.agent_name,
                "id": new.event_id,
                "agent_id": new.agent_id,
                "payload": new.payload,
                "sequence": sequence,
            });
            NewEvent::new(format!("{}{}", event::HARNESS_PREFIX, new.event_type), data).by(new.agent_id)
        }
    }
}

/// Writes the answer under its key, over one past its day. False when the key is in use.
async fn keep_key(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    hash: &[u8; 32],
    fingerprint: &[u8; 32],
    response: &Value,
) -> StoreResult<bool> {
    let doing = "keeping a session event under its idempotency key";
    let kept = sqlx::query(
        "INSERT INTO idempotency_keys AS k (workspace_id, key_hash, fingerprint, status, response, created_at)
         VALUES ($1, $2, $3, 201, $4, now())
         ON CONFLICT (workspace_id, key_hash) DO UPDATE
            SET fingerprint = excluded.fingerprint, status = excluded.status, response = excluded.response,
                created_at = excluded.created_at
          WHERE k.created_at < now() - make_interval(hours => $5)
         RETURNING 1",
    )
    .bind(scope.workspace_id().get())
    .bind(&hash[..])
    .bind(&fingerprint[..])
    .bind(response)
    .bind(IDEMPOTENCY_KEPT_HOURS)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    Ok(kept.is_some_and(|row| !row.is_empty()))
}
