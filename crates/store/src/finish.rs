//! Outcomes of invocations: the first one counts, whoever brings a later one is refused.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{AgentId, InvocationId, NodeId, WorkspaceId, WorkspaceScope, action, event};
use serde_json::{Value, json};
use sqlx::{PgConnection, Row as _};

use crate::{
    Store, StoreError, StoreResult,
    events::{self, NewEvent, Recorded},
    hosting::Fence,
    invocations::{COLUMNS, InvocationRow},
    redispatch::HANDLER_IS_AWAY,
    result_deliveries,
};

/// Who says that an invocation is done.
#[derive(Debug, Clone)]
pub enum Source {
    /// The provider that it was dispatched to, over its connection.
    Provider(Fence),
    /// The agent that handles it; none: the holder of the workspace's key.
    Handler(Option<AgentId>),
}

/// An outcome to be recorded.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The invocation.
    pub invocation: InvocationId,
    /// Who says so.
    pub source: Source,
    /// What it brought, or why it failed.
    pub result: Result<Value, String>,
    /// How long it took, in milliseconds, as the handler says.
    pub duration_ms: Option<i64>,
}

/// What became of recording an outcome.
#[derive(Debug, Clone)]
pub enum Finished {
    /// It is the outcome.
    Recorded(Box<InvocationRow>),
    /// It came too late, or from somebody who was not asked.
    Refused,
}

/// What became of recording outcomes.
#[derive(Debug, Default)]
pub struct FinishedAll {
    /// For each of them, in order.
    pub outcomes: Vec<Finished>,
    /// What to announce.
    pub recorded: Vec<Recorded>,
    /// Mailboxes that got an outcome, with the nodes that their agents are on.
    pub mailboxes: Vec<(WorkspaceScope, AgentId, NodeId)>,
    /// What callers are told beside their mailboxes.
    pub notices: Vec<OutcomeNotice>,
}

/// What a caller is told of an outcome.
#[derive(Debug, Clone)]
pub struct OutcomeNotice {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The caller.
    pub caller: AgentId,
    /// What it invoked.
    pub invocation: InvocationId,
    /// The kind of event.
    pub kind: &'static str,
    /// What it says.
    pub data: Value,
}

// A provider may answer for what went back to waiting because its connection broke, as long as nobody else has it.
// An agent's broker may say that it cannot reach the agent. Begin and end are told by two clocks.
const FINISH: &str = "
WITH r AS (
    SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::bool[], $7::bigint[],
                         $8::text[], $9::text[], $10::bigint[]) WITH ORDINALITY
           AS r (workspace_id, invocation_id, node_id, provider, epoch, by_provider, agent_id,
                 output, error, duration_ms, ord)
), locked AS MATERIALIZED (
    SELECT r.ord, i.workspace_id, i.invocation_id
      FROM r JOIN invocations i USING (workspace_id, invocation_id)
     WHERE i.completed_at IS NULL
     ORDER BY i.workspace_id, i.invocation_id, r.ord
       FOR UPDATE OF i
), valid AS (
    SELECT DISTINCT ON (r.workspace_id, r.invocation_id) r.*
      FROM locked l
      JOIN r USING (ord)
      JOIN invocations i ON i.workspace_id = l.workspace_id AND i.invocation_id = l.invocation_id
     WHERE CASE WHEN r.by_provider THEN
                EXISTS (SELECT FROM providers p
                         WHERE p.workspace_id = r.workspace_id AND p.node_id = r.node_id
                           AND p.provider = r.provider AND p.epoch = r.epoch)
                AND (i.node_id = r.node_id AND i.provider = r.provider AND i.status IN ('dispatched', 'pending')
                     OR i.status = 'invoked' AND EXISTS (
                        SELECT FROM agents a
                         WHERE a.workspace_id = i.workspace_id AND a.agent_id = i.handler_agent_id
                           AND a.node_id = r.node_id AND (a.provider IS NULL OR a.provider = r.provider)))
           ELSE i.handler_agent_id IS NOT NULL AND (r.agent_id IS NULL OR i.handler_agent_id = r.agent_id)
           END
     ORDER BY r.workspace_id, r.invocation_id, r.ord
)
UPDATE invocations i
   SET status = CASE WHEN v.error IS NULL THEN 'completed' ELSE 'failed' END,
       output = v.output::json, error = v.error, reserves = false, completed_at = $11,
       duration_ms = coalesce(v.duration_ms, greatest(0,
           (extract(epoch FROM $11 - coalesce(i.sent_at, i.dispatched_at, i.created_at)) * 1000)::bigint))
  FROM valid v
 WHERE i.workspace_id = v.workspace_id AND i.invocation_id = v.invocation_id AND i.completed_at IS NULL
RETURNING v.ord, ";

impl Store {
    /// Records outcomes, each once. Those that are refused change nothing.
    ///
    /// # Errors
    /// When Postgres is away, or the transaction lost against others.
    pub async fn finish(&self, results: &[Outcome], at: DateTime<Utc>) -> StoreResult<FinishedAll> {
        let doing = "recording outcomes";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let fence = |outcome: &Outcome| match &outcome.source {
            Source::Provider(fence) => Some(fence.clone()),
            Source::Handler(_) => None,
        };
        let fences: Vec<Option<Fence>> = results.iter().map(fence).collect();
        let node = |f: &Option<Fence>| f.as_ref().map(|f| f.node_id.to_string());
        let provider = |f: &Option<Fence>| f.as_ref().map(|f| f.provider.to_string());
        let agent = |outcome: &Outcome| match outcome.source {
            Source::Handler(agent) => agent.map(AgentId::get),
            Source::Provider(_) => None,
        };
        let output = |outcome: &Outcome| outcome.result.as_ref().ok().map(ToString::to_string);
        let rows = sqlx::query(sqlx::AssertSqlSafe(format!("{FINISH}{COLUMNS}")))
            .bind(results.iter().map(|r| r.scope.workspace_id().get()).collect::<Vec<_>>())
            .bind(results.iter().map(|r| r.invocation.get()).collect::<Vec<_>>())
            .bind(fences.iter().map(node).collect::<Vec<_>>())
            .bind(fences.iter().map(provider).collect::<Vec<_>>())
            .bind(fences.iter().map(|f| f.as_ref().map(|f| f.epoch)).collect::<Vec<_>>())
            .bind(fences.iter().map(Option::is_some).collect::<Vec<_>>())
            .bind(results.iter().map(agent).collect::<Vec<_>>())
            .bind(results.iter().map(output).collect::<Vec<_>>())
            .bind(results.iter().map(|r| r.result.as_ref().err()).collect::<Vec<_>>())
            .bind(results.iter().map(|r| r.duration_ms).collect::<Vec<_>>())
            .bind(at)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let mut outcomes = vec![Finished::Refused; results.len()];
        let mut done = Vec::with_capacity(rows.len());
        for row in &rows {
            let nth = usize::try_from(row.get::<i64, _>("ord") - 1).unwrap_or(usize::MAX);
            let invocation =
                <InvocationRow as sqlx::FromRow<_>>::from_row(row).map_err(StoreError::from_sqlx(doing))?;
            if let Some(outcome) = outcomes.get_mut(nth) {
                *outcome = Finished::Recorded(Box::new(invocation.clone()));
            }
            done.push(invocation);
        }
        let told = conclude(&mut tx, done, at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(FinishedAll { outcomes, ..told })
    }

    /// Completes what an inventory showed to be done `quiet` ago and nobody has ended since. At most `limit` at once.
    ///
    /// # Errors
    /// When Postgres is away, or the transaction lost against others.
    pub async fn finish_came_up(&self, quiet: Duration, limit: i64, at: DateTime<Utc>) -> StoreResult<FinishedAll> {
        let doing = "completing what has come up";
        let query = format!(
            "WITH up AS MATERIALIZED (
                 SELECT workspace_id, invocation_id FROM invocations
                  WHERE completed_at IS NULL AND came_up_at < $2
                  ORDER BY workspace_id, invocation_id LIMIT $3
                    FOR UPDATE SKIP LOCKED
             )
             UPDATE invocations i
                SET status = 'completed', output = i.came_up, reserves = false, completed_at = $1,
                    duration_ms = greatest(0,
                        (extract(epoch FROM $1 - coalesce(i.sent_at, i.created_at)) * 1000)::bigint)
               FROM up
              WHERE i.workspace_id = up.workspace_id AND i.invocation_id = up.invocation_id
             RETURNING {COLUMNS}"
        );
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let done: Vec<InvocationRow> = sqlx::query_as(sqlx::AssertSqlSafe(query))
            .bind(at)
            .bind(at - TimeDelta::from_std(quiet).unwrap_or_default())
            .bind(limit)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let outcomes = done.iter().cloned().map(|row| Finished::Recorded(Box::new(row))).collect();
        let told = conclude(&mut tx, done, at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(FinishedAll { outcomes, ..told })
    }

    /// Fails what could not be done: no handler in time, or none at all any more. At most `limit` at once.
    ///
    /// # Errors
    /// When Postgres is away, or the transaction lost against others.
    pub async fn fail_hopeless(&self, limit: i64, at: DateTime<Utc>) -> StoreResult<FinishedAll> {
        let doing = "failing hopeless invocations";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let seconds = |duration| TimeDelta::from_std(duration).unwrap_or_default();
        let query = format!(
            "WITH hopeless AS MATERIALIZED (
                 SELECT workspace_id, invocation_id,
                        CASE WHEN created_at < $2 THEN 'timed out' ELSE '{}' END AS error
                   FROM invocations i
                  WHERE completed_at IS NULL
                    AND (created_at < $2
                         OR unreachable_since < $3
                            AND (status = 'pending' OR sent_epoch IS NULL OR status = 'invoked' AND {HANDLER_IS_AWAY}))
                  ORDER BY workspace_id, invocation_id LIMIT $4
                    FOR UPDATE SKIP LOCKED
             )
             UPDATE invocations i
                SET status = 'failed', error = h.error, reserves = false, completed_at = $1
               FROM hopeless h
              WHERE i.workspace_id = h.workspace_id AND i.invocation_id = h.invocation_id
             RETURNING {COLUMNS}",
            action::HANDLER_UNAVAILABLE
        );
        let done: Vec<InvocationRow> = sqlx::query_as(sqlx::AssertSqlSafe(query))
            .bind(at)
            .bind(at - seconds(action::LIFETIME))
            .bind(at - seconds(action::UNREACHABLE))
            .bind(limit)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let outcomes = done.iter().cloned().map(|row| Finished::Recorded(Box::new(row))).collect();
        let told = conclude(&mut tx, done, at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(FinishedAll { outcomes, ..told })
    }
}

/// Puts durable outcomes into mailboxes and records all of them: the last that a transaction does. What to tell of
/// them comes back, without outcomes.
pub(crate) async fn conclude(
    tx: &mut PgConnection,
    mut done: Vec<InvocationRow>,
    at: DateTime<Utc>,
) -> StoreResult<FinishedAll> {
    done.sort_unstable_by_key(|row| (row.scope.workspace_id(), row.invocation_id));
    let written = result_deliveries::write(tx, &done, at).await?;
    let in_mailbox = |row: &InvocationRow| written.iter().any(|one| one.invocation_id == row.invocation_id);
    let notices = done.iter().filter(|row| !in_mailbox(row)).filter_map(notice).collect();
    let mut mailboxes: Vec<_> = written.into_iter().map(|one| (one.scope, one.agent_id, one.node_id)).collect();
    mailboxes.dedup();
    let events = done.iter().map(|row| (row.scope, outcome_event(row))).collect();
    let recorded = events::append_mixed(tx, at, events).await?;
    Ok(FinishedAll { outcomes: Vec::new(), recorded, mailboxes, notices })
}

fn notice(row: &InvocationRow) -> Option<OutcomeNotice> {
    let facts = OutcomeFacts::of(row);
    let (kind, data) = (facts.kind(), facts.data());
    Some(OutcomeNotice { scope: row.scope, caller: row.caller_id?, invocation: row.invocation_id, kind, data })
}

/// An output as callers are shown it: an object, or null. Typed clients take nothing else, so that what is neither comes
/// as `{"value": …}`.
#[must_use]
pub fn shown_output(output: Option<&Value>) -> Option<Value> {
    match output {
        None | Some(Value::Null) => None,
        Some(object @ Value::Object(_)) => Some(object.clone()),
        Some(other) => Some(json!({ "value": other })),
    }
}

/// What there is to tell of an outcome.
pub(crate) struct OutcomeFacts {
    pub(crate) invocation_id: InvocationId,
    pub(crate) action_name: String,
    pub(crate) status: String,
    pub(crate) output: Option<Value>,
    pub(crate) error: Option<String>,
}

impl OutcomeFacts {
    fn of(row: &InvocationRow) -> Self {
        Self {
            invocation_id: row.invocation_id,
            action_name: row.action_name.clone(),
            status: row.status.clone(),
            output: row.output.clone(),
            error: row.error.clone(),
        }
    }

    /// The kind of event that tells it.
    pub(crate) const fn kind(&self) -> &'static str {
        if self.error.is_none() { event::ACTION_COMPLETED } else { event::ACTION_FAILED }
    }

    /// What callers are told.
    pub(crate) fn data(&self) -> Value {
        json!({
            "invocation_id": self.invocation_id, "action_name": self.action_name, "status": self.status,
            "output": shown_output(self.output.as_ref()), "error": self.error,
        })
    }
}

/// That an invocation has its outcome.
fn outcome_event(row: &InvocationRow) -> NewEvent {
    let facts = OutcomeFacts::of(row);
    let told = NewEvent::new(facts.kind(), facts.data());
    match row.caller_id {
        Some(caller) => told.by(caller),
        None => told,
    }
}

/// That an agent was not allowed to invoke an action.
pub(crate) fn denied_event(action: &str, caller: AgentId, caller_name: &str) -> NewEvent {
    let error = format!("{caller_name} may not invoke {action}");
    let data = json!({ "action_name": action, "caller_name": caller_name, "error": error });
    NewEvent::new(event::ACTION_DENIED, data).by(caller)
}

impl Store {
    /// Records that an agent was not allowed to invoke an action.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn record_denial(
        &self,
        scope: WorkspaceScope,
        action: &str,
        caller: AgentId,
        caller_name: &str,
        at: DateTime<Utc>,
    ) -> StoreResult<Recorded> {
        let doing = "recording a denial";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let event = denied_event(action, caller, caller_name);
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(recorded)
    }
}

/// The scope of a row.
pub(crate) const fn scope_of(workspace: i64) -> WorkspaceScope {
    WorkspaceScope::from_engine_row(WorkspaceId::new(workspace))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_is_shown_as_an_object_or_null() {
        for (output, shown) in [
            (None, None),
            (Some(json!(null)), None),
            (Some(json!({ "sum": 4 })), Some(json!({ "sum": 4 }))),
            (Some(json!(4)), Some(json!({ "value": 4 }))),
            (Some(json!([1, 2])), Some(json!({ "value": [1, 2] }))),
        ] {
            assert_eq!(shown_output(output.as_ref()), shown, "{output:?}");
        }
    }
}
