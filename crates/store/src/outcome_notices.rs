//! Which callers have been told of outcomes, and which have not: a caller that was away, or that a notice did not
//! reach, hears of it later.

use std::time::Duration;

use relay_domain::{AgentId, InvocationId, WorkspaceScope};
use sqlx::Row as _;

use crate::{
    Store, StoreError, StoreResult,
    finish::{OutcomeFacts, OutcomeNotice, scope_of},
};

/// Outcomes that one look brings at most.
const PER_LOOK: usize = 1000;
/// Outcomes that one look brings of one caller, the newest.
const PER_CALLER: i64 = 100;

// The newest of each caller before the second newest of any: one who is told in vain keeps nobody else from being told.
const UNTOLD: &str = "
SELECT * FROM (
SELECT i.workspace_id, i.caller_id, i.invocation_id, i.action_name, i.status, i.output, i.error, i.completed_at
  FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
 CROSS JOIN LATERAL (
       SELECT i.*, row_number() OVER (ORDER BY i.completed_at DESC) AS nth FROM invocations i
        WHERE i.workspace_id = k.workspace_id AND i.caller_id = k.agent_id
          AND i.completed_at IS NOT NULL AND NOT i.told AND i.completed_at > now() - make_interval(secs => $3)
          -- Of a later one its caller, connected by then, was told as it happened, and the note of that is on its way.
          AND i.completed_at < now() - interval '2 seconds'
        ORDER BY i.completed_at DESC LIMIT $4) AS i
 WHERE NOT (i.durable AND EXISTS (
       SELECT FROM deliveries d
        WHERE d.workspace_id = i.workspace_id AND d.source_id = i.invocation_id AND d.agent_id = i.caller_id
          AND d.source_kind = 1))
 ORDER BY i.nth, i.completed_at LIMIT $5) AS found
 ORDER BY completed_at";

impl Store {
    /// Outcomes of the last `since` that nobody has told these callers, the oldest first. Of at most 1000 callers each
    /// who has missed something is among them.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn untold_outcomes(
        &self,
        callers: &[(WorkspaceScope, AgentId)],
        since: Duration,
    ) -> StoreResult<Vec<OutcomeNotice>> {
        let rows = sqlx::query(UNTOLD)
            .bind(callers.iter().map(|(scope, _)| scope.workspace_id().get()).collect::<Vec<_>>())
            .bind(callers.iter().map(|(_, agent)| agent.get()).collect::<Vec<_>>())
            .bind(since.as_secs_f64())
            .bind(PER_CALLER)
            .bind(i64::try_from(PER_LOOK).unwrap_or(i64::MAX))
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("looking for outcomes that nobody was told"))?;
        let notice = |row: &sqlx::postgres::PgRow| {
            let facts = OutcomeFacts {
                invocation_id: InvocationId::new(row.get("invocation_id")),
                action_name: row.get("action_name"),
                status: row.get("status"),
                output: row.get("output"),
                error: row.get("error"),
            };
            OutcomeNotice {
                scope: scope_of(row.get("workspace_id")),
                caller: AgentId::new(row.get("caller_id")),
                invocation: facts.invocation_id,
                kind: facts.kind(),
                data: facts.data(),
            }
        };
        Ok(rows.iter().map(notice).collect())
    }

    /// Notes that callers were told of these outcomes.
    ///
    /// # Errors
    /// When Postgres is away; they are told again then.
    pub async fn outcomes_told(&self, told: &[(WorkspaceScope, InvocationId)]) -> StoreResult<()> {
        sqlx::query(
            "WITH told AS MATERIALIZED (
                 SELECT i.workspace_id, i.invocation_id
                   FROM (SELECT DISTINCT * FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, invocation_id))
                        AS k
                   JOIN invocations i USING (workspace_id, invocation_id)
                  WHERE NOT i.told ORDER BY 1, 2 FOR UPDATE OF i
             )
             UPDATE invocations i SET told = true
               FROM told WHERE i.workspace_id = told.workspace_id AND i.invocation_id = told.invocation_id",
        )
        .bind(told.iter().map(|(scope, _)| scope.workspace_id().get()).collect::<Vec<_>>())
        .bind(told.iter().map(|(_, id)| id.get()).collect::<Vec<_>>())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("noting outcomes as told"))?;
        Ok(())
    }
}
