//! Sessions of agents that nodes run: results of spawns, the node of a session, releases, and events at the end of a
//! session. Main type: [`AgentRelease`]; called by the engine's spawn and release use cases and by the worker.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use const_format::concatcp;
use relay_domain::{
    AgentId, InvocationId, NodeId, WorkspaceId, WorkspaceScope, access::token::TokenHash, actions::Invocation,
    agents::AgentStatus, events::kind,
};
use relay_wire::{agents::spawn::SpawnOutput, events::recorded_data::AgentExited, field::ToValue as _};
use serde_json::Value;

use crate::{
    Store, StoreError, StoreResult,
    actions::{
        invocations::COLUMNS,
        invoke::claim_keys,
        new_invocation::{Handler, NewInvocation},
        outcomes::{OutcomeBatch, OutcomeRecording, deliver_outcomes},
    },
    agents::presence::last_seen_at,
    connections::DatabaseSession,
    events::{self, Event, RecordedEvents, status_event},
    nodes::{assignment::is_not_running, fence::Fence},
};

/// Condition: a mailbox of an ended session is to be emptied, or a release waits for its outcome or its agent.
pub(crate) const HAS_ENDED: &str = "(
    (SELECT true FROM agents WHERE mailbox_orphaned ORDER BY workspace_id, agent_id LIMIT 1) IS NOT NULL
     OR EXISTS (SELECT FROM agent_releases))";

/// Request to a node to end an agent.
#[derive(Debug, Clone)]
pub struct AgentRelease {
    pub scope: WorkspaceScope,
    pub invocation: InvocationId,
    pub agent: AgentId,
    /// `None` for a deleted agent.
    pub agent_name: Option<String>,
    /// `true` if deletion was requested and the node has ended the agent.
    pub deletes: bool,
    /// Time at which the node reported the end; `None` if there is no invocation.
    pub completed_at: Option<DateTime<Utc>>,
}

/// Agent whose release a provider has.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct AgentToRelease {
    pub agent_id: AgentId,
    pub name: String,
    /// `true` if the agent is deleted when it has ended.
    pub deletes: bool,
    pub requested_at: DateTime<Utc>,
    /// `true` if a policy has it, which may refuse it.
    pub is_placed_on_policy: bool,
}

impl Store {
    /// Returns the node that last ran a session.
    pub async fn session_origin(&self, scope: WorkspaceScope, session_ref: &str) -> StoreResult<Option<NodeId>> {
        // A session that moved is known for several agents; the one seen last has run it last.
        sqlx::query_scalar(concat!(
            "SELECT session_node_id FROM agents
              WHERE workspace_id = $1 AND session_ref = $2 AND session_node_id IS NOT NULL AND deleted_at IS NULL
              ORDER BY ",
            last_seen_at!("agents"),
            " DESC LIMIT 1"
        ))
        .bind(scope.workspace_id())
        .bind(session_ref)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the node of a session"))
    }

    /// Reads the input of a spawn that was dispatched to this provider. `None` when this invocation is no such spawn.
    pub async fn spawn_input(&self, fence: &Fence, invocation: InvocationId) -> StoreResult<Option<Value>> {
        sqlx::query_scalar(
            "SELECT input FROM invocations
              WHERE workspace_id = $1 AND invocation_id = $2 AND node_id = $3 AND provider = $4
                AND status = 'dispatched' AND action_name <> 'release'",
        )
        .bind(fence.scope.workspace_id())
        .bind(invocation)
        .bind(&fence.node_id)
        .bind(&fence.provider)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the input of a spawn"))
    }

    /// Returns the output of a spawn whose agent is located on this provider, else `None`. The agent need not be
    /// online: after a reconnection the provider may report the result before its inventory.
    pub async fn spawned_agent_output(&self, fence: &Fence, invocation: InvocationId) -> StoreResult<Option<Value>> {
        let row: Option<(AgentId, String, Option<String>)> = sqlx::query_as(
            "SELECT a.agent_id, a.name, a.session_ref
               FROM invocations i JOIN agents a USING (workspace_id, agent_id)
              WHERE i.workspace_id = $1 AND i.invocation_id = $2 AND i.node_id = $3 AND i.provider = $4
                AND a.node_id = $3 AND a.provider = $4 AND a.deleted_at IS NULL",
        )
        .bind(fence.scope.workspace_id())
        .bind(invocation)
        .bind(&fence.node_id)
        .bind(&fence.provider)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a spawned agent"))?;
        Ok(row.map(|(agent, name, session_ref)| {
            SpawnOutput { agent_id: agent, name: &name, invocation_id: invocation, session_ref: session_ref.as_deref() }
                .to_value()
        }))
    }

    /// Records an invocation that the engine has completed itself. `None` when its idempotency key was used before.
    pub async fn record_completed_invocation(
        &self,
        new: &NewInvocation,
        output: &Value,
    ) -> StoreResult<Option<OutcomeBatch>> {
        let doing = "recording a completed invocation";
        let epoch = self.epoch(doing)?;
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The key is claimed first: a repeated request must not record a second invocation.
        if claim_keys(&mut tx, &[new]).await?.contains(&true) {
            return Ok(None);
        }
        let (capability, target) = match &new.handler {
            Handler::Node { capability, target, .. } => (capability.as_str(), target.as_ref()),
            // No handler is stored, and a constraint requires a handling agent or a capability.
            Handler::Agent(_) => (new.action_name.as_str(), None),
        };
        // `due_at` is required, although an invocation that has ended is never due.
        let query = format!(
            "INSERT INTO invocations AS i (workspace_id, invocation_id, action_name, capability, target_node_id, caller_id,
                    caller_name, input, output, status, duration_ms, due_at, created_at, completed_at, durable)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'completed', 0, $10, $10, $10, $11)
             RETURNING {COLUMNS}"
        );
        let done: Vec<Invocation> = sqlx::query_as(sqlx::AssertSqlSafe(query))
            .bind(new.scope.workspace_id())
            .bind(new.id)
            .bind(&new.action_name)
            .bind(capability)
            .bind(target)
            .bind(new.caller.agent_id)
            .bind(&new.caller.name)
            .bind(&new.input)
            .bind(output)
            .bind(new.at)
            .bind(new.durable)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let outcomes = done.iter().cloned().map(|row| OutcomeRecording::Recorded(Box::new(row))).collect();
        let delivered = self.note_epoch(epoch, deliver_outcomes(&mut tx, done, new.at, epoch).await)?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(OutcomeBatch { outcomes, ..delivered }))
    }

    /// Returns whether this is the agent's current token.
    pub async fn is_token_of_agent(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        token: &TokenHash,
    ) -> StoreResult<bool> {
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM tokens
                             WHERE token_hash = $3 AND kind = 'agent' AND workspace_id = $1 AND agent_id = $2)",
        )
        .bind(scope.workspace_id())
        .bind(agent)
        .bind(token)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("comparing an agent's token"))
    }

    /// Records a release before its invocation exists, so that a crash between the two leaves a row to clean up.
    pub async fn record_release(
        &self,
        scope: WorkspaceScope,
        invocation: InvocationId,
        agent: AgentId,
        deletes: bool,
        at: DateTime<Utc>,
    ) -> StoreResult<()> {
        // A repeated request has the same invocation id, and changes nothing.
        sqlx::query(
            "INSERT INTO agent_releases (workspace_id, invocation_id, agent_id, deletes, created_at)
             VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
        )
        .bind(scope.workspace_id())
        .bind(invocation)
        .bind(agent)
        .bind(deletes)
        .bind(at)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("recording a release"))?;
        Ok(())
    }

    /// Removes a release that was refused or is complete.
    pub async fn delete_release(&self, scope: WorkspaceScope, invocation: InvocationId) -> StoreResult<()> {
        sqlx::query("DELETE FROM agent_releases WHERE workspace_id = $1 AND invocation_id = $2")
            .bind(scope.workspace_id())
            .bind(invocation)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("removing a release"))?;
        Ok(())
    }

    /// Returns the agent that a provider is to release. `None` for other invocations, and for those of which the
    /// provider no longer decides the outcome.
    pub async fn agent_of_release(
        &self,
        fence: &Fence,
        invocation: InvocationId,
    ) -> StoreResult<Option<AgentToRelease>> {
        // A superseded connection reads nothing: its report about a release does not count.
        sqlx::query_as(
            "SELECT a.agent_id, a.name, r.deletes, r.created_at AS requested_at,
                    EXISTS (SELECT FROM node_capabilities own
                             WHERE own.workspace_id = i.workspace_id AND own.node_id = i.node_id
                               AND own.provider = i.provider AND own.name = i.capability AND own.kind = 'action')
                        AS is_placed_on_policy
               FROM agent_releases r
               JOIN invocations i USING (workspace_id, invocation_id)
               JOIN agents a ON a.workspace_id = r.workspace_id AND a.agent_id = r.agent_id AND a.deleted_at IS NULL
               JOIN providers p ON p.workspace_id = i.workspace_id AND p.node_id = i.node_id AND p.provider = i.provider
              WHERE r.workspace_id = $1 AND r.invocation_id = $2
                AND i.completed_at IS NULL AND i.status IN ('dispatched', 'pending')
                AND p.node_id = $3 AND p.provider = $4 AND p.epoch = $5",
        )
        .bind(fence.scope.workspace_id())
        .bind(invocation)
        .bind(&fence.node_id)
        .bind(&fence.provider)
        .bind(fence.epoch)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the agent of a release"))
    }

    /// Marks a released agent offline and records its end. Its node may report the end later, or never. An agent that
    /// was bound again since the request was started again, and is left as it is.
    pub async fn end_released_agent(
        &self,
        scope: WorkspaceScope,
        agent: &AgentToRelease,
        at: DateTime<Utc>,
    ) -> StoreResult<RecordedEvents> {
        let doing = "ending a released agent";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The lock lets one of two reports of the same end record it: the other one finds the agent offline. Only the
        // end of a running session that cannot be resumed orphans the mailbox.
        let ended: Option<(bool, Option<NodeId>)> = sqlx::query_as(
            "WITH running AS MATERIALIZED (
                 SELECT status <> 'offline' AS was_online, CASE WHEN hosted_on = node_id THEN hosted_on END AS host
                   FROM agents
                  WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL
                    AND coalesce(rebound_at, bound_at, '-infinity') <= $3
                    FOR UPDATE
             )
             UPDATE agents a
                SET status = 'offline', hosted_on = NULL, last_seen_at = greatest(a.last_seen_at, $4),
                    mailbox_orphaned = CASE WHEN r.was_online THEN coalesce(NOT a.resumable, false)
                                            ELSE a.mailbox_orphaned END
               FROM running r WHERE a.workspace_id = $1 AND a.agent_id = $2
          RETURNING r.was_online, r.host",
        )
        .bind(scope.workspace_id())
        .bind(agent.agent_id)
        .bind(agent.requested_at)
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let mut events = Vec::new();
        if let Some((was_online, host)) = ended {
            if was_online {
                events.push(status_event(agent.agent_id, &agent.name, AgentStatus::Offline));
            }
            if let Some(host) = host {
                events.extend(exit_events(&mut tx, scope, &host, &[agent.agent_id], "released").await?);
            }
        }
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(recorded)
    }

    /// Lists releases that have an outcome or never got an invocation, at most `limit`. Most of them have deleted their
    /// agent before the outcome. A policy may end the agent after its answer, so its release waits until the agent has
    /// ended. An agent that was spawned again meanwhile, or is still listed after 10 s, is not waited for.
    pub async fn settled_releases(&self, limit: i64) -> StoreResult<Vec<AgentRelease>> {
        // A release without an invocation after a minute: its process stopped between the two transactions.
        let rows: Vec<(WorkspaceId, InvocationId, AgentId, Option<String>, bool, Option<DateTime<Utc>>)> =
            sqlx::query_as(concatcp!(
                "SELECT r.workspace_id, r.invocation_id, r.agent_id, a.name,
                    r.deletes AND coalesce(i.status = 'completed', false), i.completed_at
               FROM agent_releases r
               LEFT JOIN invocations i USING (workspace_id, invocation_id)
               LEFT JOIN agents a ON a.workspace_id = r.workspace_id AND a.agent_id = r.agent_id
                    AND a.deleted_at IS NULL
              WHERE i.completed_at IS NOT NULL
                    AND NOT (r.deletes AND i.status = 'completed' AND NOT ",
                is_not_running!("a"),
                "
                             AND coalesce(a.rebound_at, a.bound_at, '-infinity') <= i.completed_at
                             AND i.completed_at > relay_now() - interval '10 seconds')
                 OR i.invocation_id IS NULL AND r.created_at < relay_now() - interval '1 minute'
              ORDER BY r.workspace_id, r.invocation_id LIMIT $1"
            ))
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing settled releases"))?;
        Ok(rows
            .into_iter()
            .map(|(workspace, invocation, agent, agent_name, deletes, completed_at)| AgentRelease {
                scope: WorkspaceScope::from_engine_row(workspace),
                invocation,
                agent,
                agent_name,
                deletes,
                completed_at,
            })
            .collect())
    }

    /// Lists agents whose session has ended for good and whose deliveries are still to become dead letters, at most
    /// `limit`.
    pub async fn orphaned_mailboxes(&self, limit: i64) -> StoreResult<Vec<(WorkspaceScope, AgentId)>> {
        let rows: Vec<(WorkspaceId, AgentId)> = sqlx::query_as(
            "SELECT workspace_id, agent_id FROM agents WHERE mailbox_orphaned
              ORDER BY workspace_id, agent_id LIMIT $1",
        )
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing orphaned mailboxes"))?;
        Ok(rows.into_iter().map(|(workspace, agent)| (WorkspaceScope::from_engine_row(workspace), agent)).collect())
    }

    pub async fn mark_orphaned_mailboxes_emptied(&self, agents: &[(WorkspaceScope, AgentId)]) -> StoreResult<()> {
        let (workspaces, agents): (Vec<WorkspaceId>, Vec<AgentId>) =
            agents.iter().map(|(scope, agent)| (scope.workspace_id(), *agent)).unzip();
        // Locked in the order of the key: an update alone takes the rows in the order of its plan, and could deadlock
        // with batches of others.
        sqlx::query(
            "WITH emptied AS MATERIALIZED (
                 SELECT a.workspace_id, a.agent_id
                   FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
                   JOIN agents a USING (workspace_id, agent_id)
                  ORDER BY a.workspace_id, a.agent_id FOR NO KEY UPDATE OF a
             )
             UPDATE agents a SET mailbox_orphaned = false FROM emptied e
              WHERE a.workspace_id = e.workspace_id AND a.agent_id = e.agent_id",
        )
        .bind(workspaces)
        .bind(agents)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("marking mailboxes as emptied"))?;
        Ok(())
    }
}

/// Creates the exit events of agents that move to `node` from another node that they ran on.
pub(crate) async fn move_events(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    node: &NodeId,
    hosts: impl Iterator<Item = (AgentId, NodeId)>,
) -> StoreResult<Vec<Event>> {
    let mut left: BTreeMap<NodeId, Vec<AgentId>> = BTreeMap::new();
    for (agent, host) in hosts.filter(|(_, host)| host != node) {
        left.entry(host).or_default().push(agent);
    }
    let mut events = Vec::new();
    for (host, agents) in left {
        events.extend(exit_events(tx, scope, &host, &agents, "moved").await?);
    }
    Ok(events)
}

/// Creates the exit events of agents of a node; the callers of their spawns receive them. An agent with a release was
/// released, whatever other reason is reported.
pub(crate) async fn exit_events(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    node: &NodeId,
    agents: &[AgentId],
    reason: &'static str,
) -> StoreResult<Vec<Event>> {
    if agents.is_empty() {
        return Ok(Vec::new());
    }
    let rows: Vec<(AgentId, String, Option<InvocationId>, Option<AgentId>, bool)> = sqlx::query_as(
        // The newest invocation of an agent is the one that spawned it.
        "SELECT a.agent_id, a.name, i.invocation_id, i.caller_id,
                EXISTS (SELECT FROM agent_releases r
                         WHERE r.workspace_id = a.workspace_id AND r.agent_id = a.agent_id) AS released
           FROM agents a
           LEFT JOIN LATERAL (
                SELECT invocation_id, caller_id FROM invocations i
                 WHERE i.workspace_id = a.workspace_id AND i.agent_id = a.agent_id
                 ORDER BY i.invocation_id DESC LIMIT 1) AS i ON true
          WHERE a.workspace_id = $1 AND a.agent_id = ANY ($2)
          ORDER BY a.agent_id",
    )
    .bind(scope.workspace_id())
    .bind(agents)
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("reading the spawns of agents"))?;
    let event = |(agent, name, invocation, caller, released): (
        AgentId,
        String,
        Option<InvocationId>,
        Option<AgentId>,
        bool,
    )| {
        let data = AgentExited {
            agent_id: agent,
            agent_name: &name,
            node_id: node.as_str(),
            invocation_id: invocation,
            reason: if released { "released" } else { reason },
        };
        let event = Event::new(kind::AGENT_EXITED, data.to_value());
        match caller {
            Some(caller) => event.by_agent(caller),
            None => event,
        }
    };
    Ok(rows.into_iter().map(event).collect())
}
