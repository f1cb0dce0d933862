//! Outcome notices: finds outcomes that their callers were not notified of, because the caller was disconnected or the
//! notice was lost. Called by the engine's receipts.

use std::time::Duration;

use const_format::formatcp;
use relay_domain::{AgentId, InvocationId, WorkspaceScope};
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    actions::outcomes::{OutcomeFacts, OutcomeNotice},
    codes::ACTION_RESULT_SOURCE,
    decode::{decode_rows, json_text},
    sizes::OUTCOME_BYTES,
};

/// Maximum number of outcomes in one scan.
const PER_SCAN: i64 = 1000;
/// Maximum number of outcomes of one caller in one scan; the newest are kept.
const PER_CALLER: i64 = 100;
/// Bound of the outcomes of one scan, and of those of one workspace, which are parsed. At least one of each workspace
/// is returned.
const SCAN_BYTES: i64 = 8 * 1024 * 1024;
const WORKSPACE_BYTES: i64 = 1024 * 1024;

// The newest outcome of every caller comes before the second newest of any, so that a caller that never confirms its
// notices does not delay the others. Workspaces take turns, too.
// A durable outcome with a delivery needs no notice. Without a delivery its caller's mailbox was full.
const UNANNOUNCED: &str = formatcp!(
    "
WITH unannounced AS (
SELECT i.workspace_id, i.invocation_id, i.completed_at, {OUTCOME_BYTES} AS bytes, i.nth
  FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
 CROSS JOIN LATERAL (
       SELECT i.*, row_number() OVER (ORDER BY i.completed_at DESC) AS nth FROM invocations i
        WHERE i.workspace_id = k.workspace_id AND i.caller_id = k.agent_id
          AND i.completed_at IS NOT NULL AND NOT i.told AND i.completed_at > relay_now() - make_interval(secs => $3)
          -- A connected caller is notified at completion, and that notice may not be marked yet.
          AND i.completed_at < relay_now() - interval '2 seconds'
        ORDER BY i.completed_at DESC LIMIT $4) AS i
 WHERE NOT (i.durable AND EXISTS (
       SELECT FROM deliveries d
        WHERE d.workspace_id = i.workspace_id AND d.source_id = i.invocation_id AND d.agent_id = i.caller_id
          AND d.source_kind = {ACTION_RESULT_SOURCE}))
), turns AS (
    SELECT u.*, row_number() OVER of_workspace AS turn, sum(u.bytes) OVER of_workspace AS workspace_bytes
      FROM unannounced u
    WINDOW of_workspace AS (PARTITION BY u.workspace_id ORDER BY u.nth, u.completed_at, u.invocation_id
                            ROWS UNBOUNDED PRECEDING)
), chosen AS MATERIALIZED (
    SELECT t.*, sum(t.bytes) OVER (ORDER BY t.turn, t.bytes, t.invocation_id ROWS UNBOUNDED PRECEDING) AS scan_bytes
      FROM turns t WHERE t.turn = 1 OR t.workspace_bytes <= {WORKSPACE_BYTES}
     ORDER BY t.turn, t.bytes LIMIT $5
)
SELECT i.workspace_id, i.caller_id, i.invocation_id, i.action_name, i.status, i.output, i.error, i.completed_at
  FROM chosen c JOIN invocations i USING (workspace_id, invocation_id)
 WHERE c.scan_bytes <= {SCAN_BYTES}
 ORDER BY i.completed_at"
);

impl FromRow<'_, PgRow> for OutcomeNotice {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let facts = OutcomeFacts {
            invocation_id: row.try_get("invocation_id")?,
            action_name: row.try_get("action_name")?,
            status: row.try_get("status")?,
            output: json_text(row, "output")?,
            error: row.try_get("error")?,
        };
        Ok(Self {
            scope: WorkspaceScope::from_engine_row(row.try_get("workspace_id")?),
            caller: row.try_get("caller_id")?,
            invocation: facts.invocation_id,
            kind: facts.kind(),
            data: facts.data().to_value(),
            gateway_id: None,
        })
    }
}

impl Store {
    /// Returns the outcomes of the last `since` without a notice to these callers, oldest first: of each workspace
    /// one at least, unless there are many large ones.
    pub async fn unannounced_outcomes(
        &self,
        callers: &[(WorkspaceScope, AgentId)],
        since: Duration,
    ) -> StoreResult<Vec<OutcomeNotice>> {
        let rows = sqlx::query(UNANNOUNCED)
            .bind(callers.iter().map(|(scope, _)| scope.workspace_id()).collect::<Vec<_>>())
            .bind(callers.iter().map(|(_, agent)| *agent).collect::<Vec<_>>())
            .bind(since.as_secs_f64())
            .bind(PER_CALLER)
            .bind(PER_SCAN)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading outcomes without a notice"))?;
        decode_rows("invocations", &rows)
    }

    /// Marks outcomes as announced to their callers.
    ///
    /// # Errors
    /// If Postgres is unavailable; the callers are then notified again.
    pub async fn mark_outcomes_announced(&self, announced: &[(WorkspaceScope, InvocationId)]) -> StoreResult<()> {
        // Two gateways may mark the same outcomes: rows are locked in one order, and marked ones stay unchanged.
        sqlx::query(
            "WITH unmarked AS MATERIALIZED (
                 SELECT i.workspace_id, i.invocation_id
                   FROM (SELECT DISTINCT * FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, invocation_id))
                        AS k
                   JOIN invocations i USING (workspace_id, invocation_id)
                  WHERE NOT i.told ORDER BY 1, 2 FOR UPDATE OF i
             )
             UPDATE invocations i SET told = true
               FROM unmarked u WHERE i.workspace_id = u.workspace_id AND i.invocation_id = u.invocation_id",
        )
        .bind(announced.iter().map(|(scope, _)| scope.workspace_id()).collect::<Vec<_>>())
        .bind(announced.iter().map(|(_, id)| *id).collect::<Vec<_>>())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("marking outcomes as announced"))?;
        Ok(())
    }
}
