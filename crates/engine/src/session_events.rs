//! Session events: what agents' sessions report, and what that does to their status.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, SessionEventId, WorkspaceScope,
    names::check_json_length,
    session_event::{StatusEffect, is_event_type, status_effect},
};
pub use relay_store::session_events::SessionEventRow;
use relay_store::session_events::{NewSessionEvent, SessionEventOutcome};
use serde_json::{Value, json};

use crate::{Engine, EngineError, EngineResult, agents::encoded_length, auth::Credential, idempotency::ClientKey};

/// Default and most of a list.
pub const PAGE: (i64, i64) = (100, 500);

/// An event to be recorded.
#[derive(Debug)]
pub struct ReportEvent {
    /// Its type: `word.word`.
    pub event_type: String,
    /// What it says: an object.
    pub payload: Option<Value>,
}

/// A recorded event.
#[derive(Debug)]
pub struct ReportedEvent {
    /// Its id.
    pub event_id: SessionEventId,
    /// The agent.
    pub agent_id: AgentId,
    /// Its type.
    pub event_type: String,
    /// What it says.
    pub payload: Value,
    /// Its number, from 1 per agent.
    pub sequence: i64,
    /// When it was accepted.
    pub created_at: DateTime<Utc>,
    /// Whether it was recorded by an earlier request with the same key.
    pub replayed: bool,
}

impl Engine {
    /// Records an event of an agent's session: with the workspace's key, or by the agent itself.
    ///
    /// # Errors
    /// When the caller is another agent, there is no such agent, the type is none, a field is out of
    /// bounds, or the key was used with another body.
    pub async fn report_session_event(
        &self,
        caller: &Credential,
        agent: &str,
        request: ReportEvent,
        key: Option<&ClientKey>,
    ) -> EngineResult<ReportedEvent> {
        let scope = caller.scope();
        let (agent_id, agent_name) = match caller {
            Credential::Agent(own) if &*own.name == agent => (own.agent_id, own.name.to_string()),
            Credential::Agent(_) | Credential::Node(_) | Credential::Observer(_) => {
                return Err(EngineError::NotOwnSession);
            }
            Credential::Workspace { .. } => {
                let row = self.agent_by_name(scope, agent).await?;
                (row.agent_id, row.name)
            }
        };
        if !is_event_type(&request.event_type) {
            return Err(EngineError::InvalidEventType);
        }
        let payload = request.payload.unwrap_or_else(|| json!({}));
        check_json_length("payload", encoded_length(&payload))?;
        let told = payload.get("status").and_then(Value::as_str);
        let status = match status_effect(&request.event_type, told) {
            StatusEffect::None => None,
            StatusEffect::Sets(status) => Some(status),
            StatusEffect::Unreadable => {
                let words = "payload.status must be one of active, online, idle, away, blocked, waiting, offline";
                return Err(EngineError::InvalidRequest(words.to_owned()));
            }
        };
        let actor = caller.agent_id().map_or_else(|| "-".to_owned(), |id| id.to_string());
        let key = key.map(|key| (key.hash(&actor, "session.event", &agent_id.to_string()), key.fingerprint()));
        let new = NewSessionEvent {
            event_id: SessionEventId::new(self.next_id()),
            agent_id,
            agent_name: &agent_name,
            event_type: &request.event_type,
            payload: &payload,
            status,
            at: self.now(),
            key,
        };
        let (event_id, sequence, created_at, replayed) = match self.store().record_session_event(scope, &new).await? {
            SessionEventOutcome::Recorded { sequence, recorded, status_changed } => {
                if status_changed {
                    self.inner.seen.forget(scope, agent_id);
                }
                self.announce(recorded);
                (new.event_id, sequence, new.at, false)
            }
            SessionEventOutcome::KeyUsed => {
                let (id, sequence, at) = self.earlier_event(scope, new.key).await?;
                (id, sequence, at, true)
            }
        };
        let event_type = request.event_type;
        Ok(ReportedEvent { event_id, agent_id, event_type, payload, sequence, created_at, replayed })
    }

    /// What was recorded under a key that was used before.
    async fn earlier_event(
        &self,
        scope: WorkspaceScope,
        key: Option<([u8; 32], [u8; 32])>,
    ) -> EngineResult<(SessionEventId, i64, DateTime<Utc>)> {
        let (hash, fingerprint) = key.ok_or(EngineError::IdempotencyInProgress)?;
        let kept = self.replay(scope, &hash, &fingerprint).await?.ok_or(EngineError::IdempotencyInProgress)?.data;
        let id = kept["event_id"].as_str().and_then(|id| id.parse().ok());
        let at = kept["at"].as_i64().and_then(DateTime::from_timestamp_millis);
        match (id, kept["sequence"].as_i64(), at) {
            (Some(id), Some(sequence), Some(at)) => Ok((id, sequence, at)),
            // Kept by something else under the same hash: cannot be, as the hash covers the operation.
            _ => Err(EngineError::IdempotencyKeyReused),
        }
    }

    /// An agent's session events that the caller may see, newest first; with `event_type` only those of that
    /// type.
    ///
    /// # Errors
    /// When there is no such agent, or the caller may not see it.
    pub async fn session_events(
        &self,
        caller: &Credential,
        agent: &str,
        event_type: Option<&str>,
        limit: i64,
    ) -> EngineResult<Vec<SessionEventRow>> {
        let agent = self.visible_agent(caller, agent).await?;
        let filters = &caller.view().filters;
        Ok(self.store().session_events(caller.scope(), agent.agent_id, event_type, filters, limit).await?)
    }
}
