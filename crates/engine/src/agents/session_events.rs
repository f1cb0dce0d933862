//! Session events: reports of agents' sessions, and their effect on the agents' status.

use relay_domain::{
    JsonText, SessionEventId, WorkspaceScope,
    agents::{
        AgentStatus,
        session_event::{SessionEvent, StatusEffect, is_event_type, status_effect},
    },
    encoded_length,
    names::check_json_length,
};
use relay_store::{
    IdempotencyKey, SessionEventRecord,
    agents::session_events::{NewSessionEvent, SessionEventOutcome},
};
use relay_wire::agents::session_event::ReportBody;
use serde_json::Value;

use super::Agents;
use crate::{
    EngineError, EngineResult,
    access::{callers::Credential, idempotency::ClientKey},
    error::{Conflict, Denial, InvalidInput},
    parts::Parts,
};

/// Default and maximum page size.
pub const PAGE: (i64, i64) = (100, 500);

#[derive(Debug)]
pub struct RecordedSessionEvent {
    pub event: SessionEvent,
    /// True if an earlier request with the same key recorded it.
    pub replayed: bool,
}

impl Agents {
    /// Records an event of an agent's session, with the workspace key or by the agent itself.
    ///
    /// # Errors
    /// When the caller is another agent, there is no such agent, the type is unknown, a field is out of bounds, or the
    /// key was used with another body.
    pub async fn report_session_event(
        &self,
        caller: &Credential,
        agent: &str,
        request: ReportBody,
        key: Option<&ClientKey>,
    ) -> EngineResult<RecordedSessionEvent> {
        let scope = caller.scope();
        let (agent_id, agent_name) = match caller {
            Credential::Agent(own) if &*own.name == agent => (own.agent_id, own.name.to_string()),
            Credential::Agent(_) | Credential::Node(_) | Credential::Observer(_) => {
                return Err(EngineError::Forbidden(Denial::NotOwnSession));
            }
            Credential::Workspace { .. } => {
                let agent = self.by_name(scope, agent).await?;
                (agent.id, agent.name)
            }
        };
        if !is_event_type(&request.event_type) {
            return Err(EngineError::Invalid(InvalidInput::EventType));
        }
        let payload = Value::Object(request.payload.unwrap_or_default());
        check_json_length("payload", encoded_length(&payload))?;
        let status = reported_status(&request.event_type, &payload)?;
        let actor = caller.agent_id().map_or_else(|| "-".to_owned(), |id| id.to_string());
        let key = key.map(|key| key.stored(&actor, "session.event", &agent_id.to_string()));
        let new = NewSessionEvent {
            event_id: SessionEventId::new(self.core.next_id()),
            agent_id,
            agent_name: &agent_name,
            event_type: &request.event_type,
            payload: &payload,
            status,
            at: self.core.now(),
            key,
        };
        let (id, sequence, created_at, replayed) = match self.core.store.record_session_event(scope, &new).await? {
            SessionEventOutcome::Recorded { sequence, recorded, status_changed } => {
                if status_changed {
                    self.seen.forget(scope, agent_id);
                }
                self.core.announce(recorded);
                (new.event_id, sequence, new.at, false)
            }
            SessionEventOutcome::KeyUsed => {
                let first = self.load_repeated_event(scope, new.key).await?;
                (first.event_id, first.sequence, first.at, true)
            }
        };
        let event_type = request.event_type;
        let payload = JsonText::from(payload);
        let event = SessionEvent { id, agent_id, event_type, payload, sequence, created_at };
        Ok(RecordedSessionEvent { event, replayed })
    }

    /// Loads the event that was recorded under a repeated key.
    async fn load_repeated_event(
        &self,
        scope: WorkspaceScope,
        key: Option<IdempotencyKey>,
    ) -> EngineResult<SessionEventRecord> {
        let in_progress = || EngineError::Conflict(Conflict::IdempotencyInProgress);
        let replay = self.core.replay(scope, &key.ok_or_else(in_progress)?).await?.ok_or_else(in_progress)?;
        // Of another type: impossible, because the hash covers the operation.
        replay.record().ok_or(EngineError::Conflict(Conflict::IdempotencyKeyReused))
    }

    /// Lists an agent's session events that the caller may see, newest first; with `event_type` only those of that
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
    ) -> EngineResult<Parts<SessionEvent>> {
        let (scope, store) = (caller.scope(), self.core.store.clone());
        let agent = self.visible(caller, agent).await?.id;
        let rows = store.session_events(scope, agent, event_type, &caller.view().filters, limit).await?;
        let read = move |rows: Vec<SessionEvent>| {
            let store = store.clone();
            async move {
                let sequences: Vec<i64> = rows.iter().map(|row| row.sequence).collect();
                let mut payloads = store.session_event_payloads(scope, agent, &sequences).await?;
                let with_payloads = rows.into_iter().filter_map(|row| {
                    // A row that retention has removed meanwhile is left out.
                    let payload = payloads.remove(&row.sequence)?;
                    Some(SessionEvent { payload, ..row })
                });
                Ok(with_payloads.collect())
            }
        };
        self.core.read_in_parts(scope, rows, read).await
    }
}

/// Returns the status that an event sets.
fn reported_status(event_type: &str, payload: &Value) -> EngineResult<Option<AgentStatus>> {
    match status_effect(event_type, payload.get("status").and_then(Value::as_str)) {
        StatusEffect::None => Ok(None),
        StatusEffect::Sets(status) => Ok(Some(status)),
        StatusEffect::Unreadable => Err(EngineError::invalid_request(
            "payload.status must be one of active, online, idle, away, blocked, waiting, offline",
        )),
    }
}
