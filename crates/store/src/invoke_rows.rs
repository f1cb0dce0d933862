//! New invocations on their way into the table, as columns.

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    AgentId, NodeId, ProviderName, WorkspaceScope,
    action::{self, Status},
};
use serde_json::Value;
use sqlx::PgConnection;

use crate::{
    StoreError, StoreResult,
    candidates::Able,
    invoke::{Handler, NewInvocation},
};

/// How one invocation starts.
pub(crate) struct Row<'a> {
    pub(crate) status: Status,
    pub(crate) chosen: Option<&'a Able>,
    pub(crate) reasons: Value,
}

/// New rows, as columns.
#[derive(Default)]
pub(crate) struct Rows {
    workspace: Vec<i64>,
    id: Vec<i64>,
    action: Vec<String>,
    capability: Vec<Option<String>>,
    handler: Vec<Option<i64>>,
    target: Vec<Option<String>>,
    target_provider: Vec<Option<String>>,
    only_capacity: Vec<bool>,
    caller: Vec<Option<i64>>,
    caller_name: Vec<String>,
    input: Vec<String>,
    status: Vec<&'static str>,
    attempt: Vec<i32>,
    node: Vec<Option<String>>,
    provider: Vec<Option<String>>,
    reserves: Vec<bool>,
    tells_caller: Vec<bool>,
    due_at: Vec<DateTime<Utc>>,
    waits_since: Vec<Option<DateTime<Utc>>>,
    durable: Vec<bool>,
    placements: Vec<String>,
    created_at: Vec<DateTime<Utc>>,
}

impl Rows {
    pub(crate) fn push(&mut self, one: &NewInvocation, row: &Row<'_>) {
        let (capability, handler, target, target_provider, only_capacity) = match &one.handler {
            Handler::Agent(agent) => (None, Some(agent.get()), None, None, false),
            Handler::Node { capability, target, provider, only_capacity, waits: _ } => {
                let node = target.as_ref().map(ToString::to_string);
                (Some(capability.clone()), None, node, provider.as_ref().map(ToString::to_string), *only_capacity)
            }
        };
        let looked_at = match row.status {
            Status::Pending => action::backoff(1),
            _ => action::DISPATCH_TIMEOUT,
        };
        self.workspace.push(one.scope.workspace_id().get());
        self.id.push(one.id.get());
        self.action.push(one.action_name.clone());
        self.capability.push(capability);
        self.handler.push(handler);
        self.target.push(target);
        self.target_provider.push(target_provider);
        self.only_capacity.push(only_capacity);
        self.caller.push(one.caller.agent_id.map(AgentId::get));
        self.caller_name.push(one.caller.name.clone());
        self.input.push(one.input.to_string());
        self.status.push(row.status.as_str());
        self.attempt.push(i32::from(row.chosen.is_some()));
        self.node.push(row.chosen.map(|able| able.node_id.clone()));
        self.provider.push(row.chosen.map(|able| able.provider.clone()));
        self.reserves.push(row.chosen.is_some_and(Able::takes_place));
        self.tells_caller.push(row.chosen.is_some_and(|able| able.tells_caller));
        self.due_at.push(one.at + TimeDelta::from_std(looked_at).unwrap_or_default());
        self.waits_since.push(row.chosen.is_none().then_some(one.at));
        self.durable.push(one.durable);
        self.placements.push(row.reasons.to_string());
        self.created_at.push(one.at);
    }

    /// How many of these wait for a provider of a node, or for the node if any of them will do.
    pub(crate) fn waiting_for(&self, scope: WorkspaceScope, node: &NodeId, provider: Option<&ProviderName>) -> i64 {
        let rows = self.workspace.iter().zip(&self.target).zip(&self.target_provider).zip(&self.status);
        let these = rows.filter(|(((workspace, target), target_provider), status)| {
            **workspace == scope.workspace_id().get()
                && target.as_deref() == Some(node.as_str())
                && target_provider.as_deref() == provider.map(ProviderName::as_str)
                && **status == Status::Pending.as_str()
        });
        i64::try_from(these.count()).unwrap_or(i64::MAX)
    }

    pub(crate) async fn insert(self, tx: &mut PgConnection) -> StoreResult<()> {
        if self.id.is_empty() {
            return Ok(());
        }
        sqlx::query(
            "INSERT INTO invocations (workspace_id, invocation_id, action_name, capability, handler_agent_id,
                    target_node_id, caller_id, caller_name, input, status, attempt, node_id, provider, dispatched_at,
                    reserves, tells_caller, due_at, unreachable_since, durable, placements, created_at,
                    target_provider, only_capacity)
             SELECT w, i, a, c, h, t, k, n, x::json, s, e, o, p, CASE WHEN o IS NULL THEN NULL ELSE z END,
                    r, l, d, u, y, q::json, z, f, oc
               FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::bigint[],
                           $8::text[], $9::text[], $10::text[], $11::int[], $12::text[], $13::text[], $14::bool[],
                           $15::bool[], $16::timestamptz[], $17::timestamptz[], $18::bool[], $19::text[],
                           $20::timestamptz[], $21::text[], $22::bool[])
                    AS v (w, i, a, c, h, t, k, n, x, s, e, o, p, r, l, d, u, y, q, z, f, oc)
             ON CONFLICT (workspace_id, invocation_id) DO NOTHING",
        )
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
        .bind(self.waits_since)
        .bind(self.durable)
        .bind(self.placements)
        .bind(self.created_at)
        .bind(self.target_provider)
        .bind(self.only_capacity)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("writing invocations"))?;
        Ok(())
    }
}
