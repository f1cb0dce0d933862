//! Outcomes of invocations. The first outcome is final, later ones are refused. An outcome is recorded together with
//! its event and, if durable, its delivery. Main types: [`InvocationOutcome`] and [`OutcomeBatch`]; called by the
//! engine's invocation worker and by transactions that end invocations. [`super::record_outcomes`] records the outcomes
//! that handlers report.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, GatewayId, InvocationId, JsonText, NodeId, ProviderName, WorkspaceScope,
    actions::{self, Invocation, InvocationStatus},
    events::kind,
};
use relay_wire::{
    events::recorded_data::{ActionDenied, ActionEnded},
    field::ToValue as _,
};
use serde_json::Value;
use sqlx::{Postgres, postgres::PgArguments, query::Query};

use crate::{
    Store, StoreError, StoreResult,
    actions::{
        invocations::{COLUMNS, decode_invocations},
        redispatch::HANDLER_UNREACHABLE,
        result_deliveries::{WrittenResult, write_results},
    },
    connections::DatabaseSession,
    events::{self, Event, RecordedEvents},
    nodes::fence::Fence,
};

/// Sender of an outcome.
#[derive(Debug, Clone)]
pub enum OutcomeSource {
    /// Provider that received the invocation, over its current connection.
    Provider(Fence),
    /// Handling agent, or the workspace key.
    Handler {
        /// `None` for the workspace key.
        agent: Option<AgentId>,
        /// Node and provider that the invocation was written to, if that may not be recorded yet.
        sent_to: Option<(NodeId, ProviderName)>,
    },
}

/// Outcome to record.
#[derive(Debug, Clone)]
pub struct InvocationOutcome {
    pub scope: WorkspaceScope,
    pub invocation: InvocationId,
    pub source: OutcomeSource,
    /// Output, or error text.
    pub result: Result<Value, String>,
    /// Duration in milliseconds as reported by the handler.
    pub duration_ms: Option<i64>,
    /// False if an agent may have to be ended before the outcome is recorded: the handler reports success, and the
    /// invocation may be the release of an agent.
    pub is_release_ended: bool,
}

/// Result of recording one outcome.
#[derive(Debug, Clone)]
pub enum OutcomeRecording {
    Recorded(Box<Invocation>),
    /// The invocation already has an outcome, or the sender is not its handler.
    Refused,
    /// The invocation is a release that is not ended: this outcome is to be submitted again after the end of its agent.
    OpenRelease(Box<InvocationOutcome>),
}

/// Result of recording outcomes, with the notifications to send after the commit.
#[derive(Debug, Default)]
pub struct OutcomeBatch {
    /// One result per outcome, in the order of the call.
    pub outcomes: Vec<OutcomeRecording>,
    pub recorded: Vec<RecordedEvents>,
    /// Mailboxes that received a delivery, with the nodes of their agents.
    pub mailboxes: Vec<(WorkspaceScope, AgentId, NodeId)>,
    /// Notices for callers whose outcome has no delivery.
    pub notices: Vec<OutcomeNotice>,
}

/// Notice to a caller about an outcome.
#[derive(Debug, Clone)]
pub struct OutcomeNotice {
    pub scope: WorkspaceScope,
    pub caller: AgentId,
    pub invocation: InvocationId,
    /// Kind of the event.
    pub kind: &'static str,
    /// Payload of the event.
    pub data: Value,
    /// Gateway that serves the caller. `None`: several do, none does, or it was not looked up.
    pub gateway_id: Option<GatewayId>,
}

impl Store {
    /// Completes spawn invocations whose agent has been in an inventory for `quiet` and whose provider has sent no
    /// result. At most `limit` at once.
    pub async fn finish_spawned(&self, quiet: Duration, limit: i64, at: DateTime<Utc>) -> StoreResult<OutcomeBatch> {
        let doing = "completing spawn invocations";
        // SKIP LOCKED: a result that the provider sends at this moment takes precedence, and workers do not wait for
        // each other. Rows are locked in the order of all writers of invocations.
        let query = format!(
            "WITH spawned AS MATERIALIZED (
                 SELECT workspace_id, invocation_id FROM invocations
                  WHERE completed_at IS NULL AND came_up_at < $2
                  ORDER BY workspace_id, invocation_id LIMIT $3
                    FOR UPDATE SKIP LOCKED
             )
             UPDATE invocations i
                SET status = 'completed', output = i.came_up, reserves = false, completed_at = $1,
                    duration_ms = greatest(0,
                        (extract(epoch FROM $1 - coalesce(i.sent_at, i.created_at)) * 1000)::bigint)
               FROM spawned s
              WHERE i.workspace_id = s.workspace_id AND i.invocation_id = s.invocation_id
             RETURNING {COLUMNS}"
        );
        let statement = sqlx::query(sqlx::AssertSqlSafe(query)).bind(at).bind(at - quiet).bind(limit);
        self.end_invocations(statement, at, doing).await
    }

    /// Fails invocations that exceeded their lifetime or whose handler has been unavailable for too long. At most
    /// `limit` at once.
    pub async fn fail_unservable(&self, limit: i64, at: DateTime<Utc>) -> StoreResult<OutcomeBatch> {
        let doing = "failing unservable invocations";
        // The lifetime ends every invocation. Otherwise a dispatched one that was sent is not failed here: once its
        // provider is lost, `reclaim_lost_invocations` makes it pending first.
        let query = format!(
            "WITH unservable AS MATERIALIZED (
                 SELECT workspace_id, invocation_id,
                        CASE WHEN created_at < $2 THEN 'timed out' ELSE '{}' END AS error
                   FROM invocations i
                  WHERE completed_at IS NULL
                    AND (created_at < $2
                         OR unreachable_since < $3
                            AND (status = 'pending' OR sent_epoch IS NULL OR status = 'invoked' AND {HANDLER_UNREACHABLE}))
                  ORDER BY workspace_id, invocation_id LIMIT $4
                    FOR UPDATE SKIP LOCKED
             )
             UPDATE invocations i
                SET status = 'failed', error = u.error, reserves = false, completed_at = $1
               FROM unservable u
              WHERE i.workspace_id = u.workspace_id AND i.invocation_id = u.invocation_id
             RETURNING {COLUMNS}",
            actions::HANDLER_UNAVAILABLE
        );
        let statement = sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(at)
            .bind(at - actions::INVOCATION_LIFETIME)
            .bind(at - actions::UNREACHABLE_TIMEOUT)
            .bind(limit);
        self.end_invocations(statement, at, doing).await
    }

    /// Runs a statement that ends invocations, and records their outcomes.
    async fn end_invocations(
        &self,
        statement: Query<'_, Postgres, PgArguments>,
        at: DateTime<Utc>,
        doing: &'static str,
    ) -> StoreResult<OutcomeBatch> {
        // Before BEGIN, as in every transaction that may number deliveries.
        let epoch = self.epoch(doing)?;
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let rows = statement.fetch_all(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?;
        let done = decode_invocations(&rows)?;
        let outcomes = done.iter().cloned().map(|row| OutcomeRecording::Recorded(Box::new(row))).collect();
        let batch = self.note_epoch(epoch, deliver_outcomes(&mut tx, done, at, epoch).await)?;
        // Not `from_commit`: a repeated step does not find rows that have ended, and `unannounced_outcomes` finds the
        // notices that were not sent.
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(OutcomeBatch { outcomes, ..batch })
    }
}

/// Writes deliveries for durable outcomes and an event for each outcome. Returns the notifications, with `outcomes`
/// empty. Must be the last write of the transaction: appending events locks the workspaces' event logs until the
/// commit.
pub(crate) async fn deliver_outcomes(
    tx: &mut DatabaseSession,
    mut done: Vec<Invocation>,
    at: DateTime<Utc>,
    epoch: Option<i64>,
) -> StoreResult<OutcomeBatch> {
    // One order for all transactions, because mailbox heads are locked next.
    done.sort_unstable_by_key(|row| (row.scope.workspace_id(), row.invocation_id));
    let written = write_results(tx, &done, at, epoch).await?;
    let recorded = events::append_mixed(tx, at, outcome_events(&done)).await?;
    Ok(OutcomeBatch { recorded, ..notifications(&done, written) })
}

/// Returns the mailboxes that received an outcome, and notices for the callers of the others.
pub(crate) fn notifications(done: &[Invocation], written: Vec<WrittenResult>) -> OutcomeBatch {
    let in_mailbox = |row: &Invocation| written.iter().any(|one| one.invocation_id == row.invocation_id);
    let notices = done.iter().filter(|row| !in_mailbox(row)).filter_map(outcome_notice).collect();
    let mut mailboxes: Vec<_> = written.into_iter().map(|one| (one.scope, one.agent_id, one.node_id)).collect();
    // Removes neighbours only: a second hint for a mailbox does no harm.
    mailboxes.dedup();
    OutcomeBatch { mailboxes, notices, ..OutcomeBatch::default() }
}

/// Creates the events of outcomes, in the order of the rows.
pub(crate) fn outcome_events(done: &[Invocation]) -> Vec<(WorkspaceScope, Event)> {
    done.iter().map(|row| (row.scope, OutcomeFacts::from_row(row).event(row.caller_id))).collect()
}

fn outcome_notice(row: &Invocation) -> Option<OutcomeNotice> {
    let facts = OutcomeFacts::from_row(row);
    Some(OutcomeNotice {
        scope: row.scope,
        caller: row.caller_id?,
        invocation: row.invocation_id,
        kind: facts.kind(),
        data: facts.data().to_value(),
        gateway_id: None,
    })
}

/// Converts an output as [`relay_wire::actions::output_object`] does, without parsing it.
fn output_text(output: Option<&JsonText>) -> Option<JsonText> {
    let output = output.filter(|output| !output.is_null())?;
    Some(if output.is_object() { output.clone() } else { JsonText::encode(&HashMap::from([("value", output)])) })
}

/// Fields of an outcome that its event and its notice contain.
pub(crate) struct OutcomeFacts {
    pub(crate) invocation_id: InvocationId,
    pub(crate) action_name: String,
    pub(crate) status: InvocationStatus,
    pub(crate) output: Option<JsonText>,
    pub(crate) error: Option<String>,
}

impl OutcomeFacts {
    fn from_row(row: &Invocation) -> Self {
        Self {
            invocation_id: row.invocation_id,
            action_name: row.action_name.clone(),
            status: row.status,
            output: row.output.as_ref().map(JsonText::encode),
            error: row.error.clone(),
        }
    }

    /// Returns the kind of the outcome's event.
    pub(crate) const fn kind(&self) -> &'static str {
        if self.error.is_none() { kind::ACTION_COMPLETED } else { kind::ACTION_FAILED }
    }

    /// Returns the payload of the outcome's event.
    pub(crate) fn data(&self) -> JsonText {
        JsonText::encode(&ActionEnded {
            invocation_id: self.invocation_id,
            action_name: &self.action_name,
            status: self.status.as_str(),
            output: output_text(self.output.as_ref()),
            error: self.error.as_deref(),
        })
    }

    /// Creates the event of the outcome.
    fn event(&self, caller: Option<AgentId>) -> Event {
        let event = Event::new(self.kind(), self.data().to_value());
        match caller {
            Some(caller) => event.by_agent(caller),
            None => event,
        }
    }
}

/// Creates the event for a denied invocation.
pub(crate) fn denied_event(action: &str, caller: AgentId, caller_name: &str) -> Event {
    let error = format!("{caller_name} may not invoke {action}");
    let data = ActionDenied { action_name: action, caller_name, error: &error };
    Event::new(kind::ACTION_DENIED, data.to_value()).by_agent(caller)
}

impl Store {
    /// Records that an agent may not invoke an action.
    pub async fn record_denial(
        &self,
        scope: WorkspaceScope,
        action: &str,
        caller: AgentId,
        caller_name: &str,
        at: DateTime<Utc>,
    ) -> StoreResult<RecordedEvents> {
        let doing = "recording a denial";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let event = denied_event(action, caller, caller_name);
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(recorded)
    }
}
