//! Column arrays for the statement that writes new invocations, used by [`super::invoke`].

use std::time::Duration;

use chrono::{DateTime, Utc};
use const_format::concatcp;
use relay_domain::{
    AgentId, InvocationId, NodeId, ProviderName, WorkspaceId, WorkspaceScope,
    actions::{self, InvocationStatus, PlacementRecord},
};
use relay_wire::field::ToValue as _;

use crate::{
    StoreError, StoreResult,
    actions::{
        candidates::CapableProvider,
        new_invocation::{Handler, NewInvocation},
    },
    connections::DatabaseSession,
    events::{EventColumns, NUMBERED, RecordedEvents, appended_events},
};

/// Initial state of an invocation.
pub(crate) struct InvocationStart<'a> {
    pub(crate) status: InvocationStatus,
    pub(crate) chosen: Option<&'a CapableProvider>,
    /// Decision that led to `chosen`; `None` if an agent handles the invocation.
    pub(crate) record: Option<PlacementRecord>,
}

/// New rows as column arrays, for one `INSERT … SELECT FROM unnest`.
#[derive(Default)]
pub(crate) struct InvocationColumns {
    workspace: Vec<WorkspaceId>,
    id: Vec<InvocationId>,
    action: Vec<String>,
    capability: Vec<Option<String>>,
    handler: Vec<Option<AgentId>>,
    target: Vec<Option<NodeId>>,
    target_provider: Vec<Option<ProviderName>>,
    only_capacity: Vec<bool>,
    caller: Vec<Option<AgentId>>,
    caller_name: Vec<String>,
    input: Vec<String>,
    status: Vec<InvocationStatus>,
    attempt: Vec<i32>,
    node: Vec<Option<NodeId>>,
    provider: Vec<Option<ProviderName>>,
    reserves: Vec<bool>,
    tells_caller: Vec<bool>,
    due_at: Vec<DateTime<Utc>>,
    unreachable_since: Vec<Option<DateTime<Utc>>>,
    durable: Vec<bool>,
    placements: Vec<String>,
    created_at: Vec<DateTime<Utc>>,
}

impl InvocationColumns {
    pub(crate) fn push(&mut self, one: &NewInvocation, row: &InvocationStart<'_>) {
        let (capability, handler, target, target_provider, only_capacity) = match &one.handler {
            Handler::Agent(agent) => (None, Some(*agent), None, None, false),
            Handler::Node { capability, target, provider, only_capacity, wait_policy: _ } => {
                (Some(capability.clone()), None, target.clone(), provider.clone(), *only_capacity)
            }
        };
        // No new invocation has ended. All states are named, so that a further one has to be decided here.
        let first_check = match row.status {
            InvocationStatus::Pending => actions::retry_backoff(1),
            InvocationStatus::Dispatched | InvocationStatus::Invoked => actions::DISPATCH_TIMEOUT,
            InvocationStatus::Completed | InvocationStatus::Failed => Duration::ZERO,
        };
        self.workspace.push(one.scope.workspace_id());
        self.id.push(one.id);
        self.action.push(one.action_name.clone());
        self.capability.push(capability);
        self.handler.push(handler);
        self.target.push(target);
        self.target_provider.push(target_provider);
        self.only_capacity.push(only_capacity);
        self.caller.push(one.caller.agent_id);
        self.caller_name.push(one.caller.name.clone());
        self.input.push(one.input.to_string());
        self.status.push(row.status);
        self.attempt.push(i32::from(row.chosen.is_some()));
        self.node.push(row.chosen.map(|provider| provider.node_id.clone()));
        self.provider.push(row.chosen.map(|provider| provider.provider.clone()));
        self.reserves.push(row.chosen.is_some_and(CapableProvider::occupies_slot));
        self.tells_caller.push(row.chosen.is_some_and(|provider| provider.tells_caller));
        self.due_at.push(one.at + first_check);
        // Without a provider: a queued invocation waits for one, and an agent's counts as unreachable until its frame
        // is recorded as written (`mark_invocations_sent`).
        self.unreachable_since.push(row.chosen.is_none().then_some(one.at));
        self.durable.push(one.durable);
        self.placements.push(row.record.as_slice().to_value().to_string());
        self.created_at.push(one.at);
    }

    /// Counts the queued rows that wait for a provider of a node, or for any provider of the node.
    pub(crate) fn waiting_for(&self, scope: WorkspaceScope, node: &NodeId, provider: Option<&ProviderName>) -> i64 {
        let rows = self.workspace.iter().zip(&self.target).zip(&self.target_provider).zip(&self.status);
        let matching = rows.filter(|(((workspace, target), target_provider), status)| {
            **workspace == scope.workspace_id()
                && target.as_ref() == Some(node)
                && target_provider.as_ref() == provider
                && **status == InvocationStatus::Pending
        });
        i64::try_from(matching.count()).unwrap_or(i64::MAX)
    }

    /// Writes the rows and appends their events, in one statement. Must be the last one before COMMIT, because it locks
    /// the counters of events.
    pub(crate) async fn write(
        self,
        tx: &mut DatabaseSession,
        events: EventColumns,
    ) -> StoreResult<Vec<RecordedEvents>> {
        if self.id.is_empty() {
            return Ok(Vec::new());
        }
        let query = sqlx::query(WRITE)
            .bind(self.workspace)
            .bind(self.id)
            .bind(self.action)
            .bind(self.capability)
            .bind(self.handler)
            .bind(self.target)
            .bind(self.caller)
            .bind(self.caller_name)
            .bind(self.input)
            .bind(self.status)
            .bind(self.attempt)
            .bind(self.node)
            .bind(self.provider)
            .bind(self.reserves)
            .bind(self.tells_caller)
            .bind(self.due_at)
            .bind(self.unreachable_since)
            .bind(self.durable)
            .bind(self.placements)
            .bind(self.created_at)
            .bind(self.target_provider)
            .bind(self.only_capacity);
        let rows = events.bind(query).fetch_all(tx).await.map_err(StoreError::from_sqlx("writing invocations"))?;
        events.recorded_by(&rows)
    }
}

// The events are appended after the rows are written, so that their counters are the last locks.
const WRITE: &str = concatcp!(
    "
WITH written AS (
    INSERT INTO invocations (workspace_id, invocation_id, action_name, capability, handler_agent_id, target_node_id,
                             caller_id, caller_name, input, status, attempt, node_id, provider, dispatched_at,
                             reserves, tells_caller, due_at, unreachable_since, durable, placements, created_at,
                             target_provider, only_capacity)
    SELECT workspace_id, invocation_id, action_name, capability, handler_agent_id, target_node_id,
           caller_id, caller_name, input::json, status, attempt, node_id, provider,
           CASE WHEN node_id IS NOT NULL THEN created_at END,
           reserves, tells_caller, due_at, unreachable_since, durable, placements::json, created_at,
           target_provider, only_capacity
      FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::bigint[],
                  $8::text[], $9::text[], $10::text[], $11::int[], $12::text[], $13::text[], $14::bool[],
                  $15::bool[], $16::timestamptz[], $17::timestamptz[], $18::bool[], $19::text[],
                  $20::timestamptz[], $21::text[], $22::bool[])
           AS v (workspace_id, invocation_id, action_name, capability, handler_agent_id, target_node_id, caller_id,
                 caller_name, input, status, attempt, node_id, provider, reserves, tells_caller, due_at,
                 unreachable_since, durable, placements, created_at, target_provider, only_capacity)
    ON CONFLICT (workspace_id, invocation_id) DO NOTHING
    RETURNING 1
), made AS MATERIALIZED (
    SELECT e.* FROM unnest($23::bigint[], $24::bigint[], $25::text[]) AS e (workspace_id, event_count, events)
     WHERE (SELECT count(*) FROM written) >= 0
), ",
    appended_events!("$26", "$27"),
    NUMBERED
);
