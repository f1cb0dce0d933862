//! Invocations that gateways write to sockets, and the record that they were written. Main types: [`UnsentInvocation`]
//! and [`SentInvocation`]; called by the engine's invocation queue.

use chrono::{DateTime, Utc};
use const_format::{concatcp, formatcp};
use relay_domain::{AgentId, GatewayId, InvocationId, JsonText, NodeId, ProviderName, WorkspaceScope};
use sqlx::{FromRow, Row as _, postgres::PgRow};
use tokio::time::Instant;

use crate::{Store, StoreError, StoreResult, decode::json_text, nodes::fence::Fence, sizes::INPUT_BYTES};

/// Maximum number of rows in one scan.
const PER_SCAN: i64 = 1000;
/// Maximum number of rows of one provider in one scan, so that a slow socket does not delay other providers.
const PER_PROVIDER: i64 = 100;

/// Bound of the inputs of one scan, and of those of one workspace. At least one of each workspace is returned.
const SCAN_BYTES: i64 = 32 * 1024 * 1024;
const WORKSPACE_BYTES: i64 = 4 * 1024 * 1024;

/// Invocation to write to a provider's socket.
#[derive(Debug, Clone)]
pub struct UnsentInvocation {
    pub scope: WorkspaceScope,
    pub invocation_id: InvocationId,
    /// Attempt number, starting at 1; 0 if an agent handles it.
    pub attempt: i32,
    pub node_id: NodeId,
    pub provider: ProviderName,
    /// Name of the action in the frame.
    pub action: String,
    pub input: JsonText,
    /// Handling agent with its name; `None` if the node handles it.
    pub agent: Option<(AgentId, String)>,
    /// Caller's id (`None` for the workspace key) and name, if the capability requests the caller's identity.
    pub caller: Option<(Option<AgentId>, String)>,
}

impl FromRow<'_, PgRow> for UnsentInvocation {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let agent_name: Option<String> = row.try_get("agent_name")?;
        let caller = if row.try_get("tells_caller")? {
            Some((row.try_get("caller_id")?, row.try_get("caller_name")?))
        } else {
            None
        };
        Ok(Self {
            scope: WorkspaceScope::from_engine_row(row.try_get("workspace_id")?),
            invocation_id: row.try_get("invocation_id")?,
            attempt: row.try_get("attempt")?,
            node_id: row.try_get("node_id")?,
            provider: row.try_get("provider")?,
            action: row.try_get("action")?,
            input: json_text(row, "input")?.unwrap_or_else(JsonText::empty_object),
            agent: row.try_get::<Option<AgentId>, _>("handler_agent_id")?.zip(agent_name),
            caller,
        })
    }
}

// Chooses among the invocations `chosen_of`, which have a rank `nth` for their provider. Keys and sizes come first: the
// inputs, up to 768 KiB each, are read only for the rows that are returned. Workspaces take turns, and inputs of a
// workspace whose sockets take nothing, which are read again each time, leave room for the others'.
macro_rules! chosen_inputs {
    ($chosen_of:literal, $per_provider:literal, $per_scan:literal) => {
        formatcp!(
            "
sized AS (
    SELECT u.*, {INPUT_BYTES} AS bytes
      FROM {chosen_of} u JOIN invocations i USING (workspace_id, invocation_id)
     WHERE u.nth <= {per_provider}
), turns AS (
    SELECT z.*, row_number() OVER of_workspace AS turn, sum(z.bytes) OVER of_workspace AS workspace_bytes
      FROM sized z
    WINDOW of_workspace AS (PARTITION BY z.workspace_id ORDER BY z.nth, z.bytes, z.invocation_id
                            ROWS UNBOUNDED PRECEDING)
), chosen AS MATERIALIZED (
    SELECT t.*, sum(t.bytes) OVER (ORDER BY t.turn, t.bytes, t.invocation_id ROWS UNBOUNDED PRECEDING) AS scan_bytes
      FROM turns t WHERE t.turn = 1 OR t.workspace_bytes <= {WORKSPACE_BYTES}
)
SELECT c.workspace_id, c.invocation_id, c.agent_name, c.node_id, c.provider, i.attempt, i.handler_agent_id,
       coalesce(i.capability, i.action_name) AS action, i.input, i.tells_caller, i.caller_id, i.caller_name
  FROM chosen c JOIN invocations i USING (workspace_id, invocation_id)
 WHERE c.scan_bytes <= {SCAN_BYTES}
 ORDER BY c.turn, c.nth, c.created_at LIMIT {per_scan}",
            chosen_of = $chosen_of,
            per_provider = $per_provider,
            per_scan = $per_scan,
        )
    };
}

/// Condition: an invocation has not been written to a socket of any gateway. In the order of the index, so that no plan
/// reads those of the last days.
pub(crate) const HAS_UNSENT: &str = "(
    SELECT true FROM invocations WHERE sent_epoch IS NULL AND status IN ('dispatched', 'invoked')
     ORDER BY created_at LIMIT 1) IS NOT NULL";

// An invocation of an unassigned agent is sent to the connected provider that registered first.
const UNSENT: &str = concatcp!(
    "
WITH unsent AS MATERIALIZED (
    SELECT i.workspace_id, i.invocation_id, i.created_at, a.name AS agent_name, p.node_id, p.provider,
           row_number() OVER (PARTITION BY p.workspace_id, p.node_id, p.provider ORDER BY i.created_at) AS nth
      FROM invocations i
      LEFT JOIN agents a ON a.workspace_id = i.workspace_id AND a.agent_id = i.handler_agent_id
      JOIN providers p ON p.workspace_id = i.workspace_id
           AND p.node_id = CASE WHEN i.status = 'invoked' THEN a.node_id ELSE i.node_id END
           AND (p.provider = CASE WHEN i.status = 'invoked' THEN a.provider ELSE i.provider END
                OR i.status = 'invoked' AND a.provider IS NULL)
     WHERE i.sent_epoch IS NULL AND i.status IN ('dispatched', 'invoked') AND p.gateway_id = $1
       AND (i.status = 'dispatched' OR a.provider IS NOT NULL OR NOT EXISTS (
            SELECT FROM providers o
             WHERE o.workspace_id = p.workspace_id AND o.node_id = p.node_id AND o.gateway_id IS NOT NULL
               AND (o.registered_at, o.provider) < (p.registered_at, p.provider)))
),",
    chosen_inputs!("unsent", "$2", "$3")
);

// Each half of the union has its own index: invocations that nodes handle, and invocations that agents located there
// handle. An invocation of an unassigned agent is resent to the provider that received it before, as long as that
// provider is connected.
const SENT_BEFORE: &str = concatcp!(
    "
WITH current AS MATERIALIZED (
    SELECT p.workspace_id, p.node_id, p.provider, p.epoch
      FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[]) AS k (workspace_id, node_id, provider, epoch)
      JOIN providers p USING (workspace_id, node_id, provider, epoch)
), unanswered AS (
    SELECT h.workspace_id, i.invocation_id, i.created_at, h.node_id, h.provider, NULL::text AS agent_name
      FROM current h
      JOIN invocations i USING (workspace_id, node_id, provider)
     WHERE i.status = 'dispatched' AND i.sent_epoch < h.epoch
     UNION ALL
    SELECT h.workspace_id, i.invocation_id, i.created_at, h.node_id, h.provider, a.name
      FROM current h
      JOIN agents a ON a.workspace_id = h.workspace_id AND a.node_id = h.node_id
           AND (a.provider IS NULL OR a.provider = h.provider) AND a.deleted_at IS NULL
      JOIN invocations i ON i.workspace_id = a.workspace_id AND i.handler_agent_id = a.agent_id
     WHERE i.status = 'invoked' AND i.sent_epoch < h.epoch
       AND (a.provider IS NOT NULL OR i.provider = h.provider OR NOT EXISTS (
            SELECT FROM providers o
             WHERE o.workspace_id = a.workspace_id AND o.node_id = a.node_id AND o.provider = i.provider
               AND o.gateway_id IS NOT NULL))
), ranked AS (
    SELECT b.*, row_number() OVER (PARTITION BY b.workspace_id, b.node_id, b.provider ORDER BY b.created_at) AS nth
      FROM unanswered b
),",
    chosen_inputs!("ranked", "$5", "$6")
);

/// Invocation that was written to a socket.
#[derive(Debug, Clone)]
pub struct SentInvocation {
    pub scope: WorkspaceScope,
    pub invocation_id: InvocationId,
    /// Attempt number, starting at 1; 0 if an agent handles it.
    pub attempt: i32,
    pub node_id: NodeId,
    pub provider: ProviderName,
    /// Epoch of the connection.
    pub epoch: i64,
    /// Time at which the frame was written.
    pub written_at: Instant,
}

impl Store {
    /// Returns the unsent invocations for this gateway's sockets, the oldest of each provider first.
    pub async fn unsent_invocations(&self, gateway: GatewayId) -> StoreResult<Vec<UnsentInvocation>> {
        sqlx::query_as(UNSENT)
            .bind(gateway)
            .bind(PER_PROVIDER)
            .bind(PER_SCAN)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading unsent invocations"))
    }

    /// Returns the unanswered invocations that were sent over earlier connections of these providers, the oldest of
    /// each provider first. Marking them as sent excludes them from the next call.
    pub async fn invocations_of_earlier_epochs(&self, fences: &[Fence]) -> StoreResult<Vec<UnsentInvocation>> {
        sqlx::query_as(SENT_BEFORE)
            .bind(fences.iter().map(|fence| fence.scope.workspace_id()).collect::<Vec<_>>())
            .bind(fences.iter().map(|fence| &fence.node_id).collect::<Vec<_>>())
            .bind(fences.iter().map(|fence| &fence.provider).collect::<Vec<_>>())
            .bind(fences.iter().map(|fence| fence.epoch).collect::<Vec<_>>())
            .bind(PER_PROVIDER)
            .bind(PER_SCAN)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading invocations of earlier connections"))
    }

    /// Marks invocations as sent. A row with an outcome, of another attempt or of a deleted agent stays as it is.
    ///
    /// # Errors
    /// If Postgres is unavailable; the invocations are then sent again.
    pub async fn mark_invocations_sent(&self, sent: &[SentInvocation]) -> StoreResult<()> {
        // DISTINCT ON: a row can be updated once, and of several notes that of the newest epoch counts. Rows are locked
        // in the order of all writers of invocations. The mark `-infinity` (its agent or node was deleted) must stay:
        // by it the worker fails the invocation. Ages are sent, not times, because they were measured by another clock
        // than that of Postgres.
        sqlx::query(
            "WITH s AS (
                 SELECT DISTINCT ON (workspace_id, invocation_id) *
                   FROM unnest($1::bigint[], $2::bigint[], $3::int[], $4::text[], $5::text[], $6::bigint[], $7::float8[])
                        AS s (workspace_id, invocation_id, attempt, node_id, provider, epoch, age_seconds)
                  ORDER BY workspace_id, invocation_id, epoch DESC
             ), locked AS MATERIALIZED (
                 SELECT i.workspace_id, i.invocation_id,
                        greatest(i.created_at, relay_now() - make_interval(secs => s.age_seconds)) AS written_at
                   FROM invocations i JOIN s USING (workspace_id, invocation_id)
                  WHERE i.completed_at IS NULL AND i.attempt = s.attempt
                  ORDER BY 1, 2 FOR UPDATE OF i
             )
             UPDATE invocations i
                SET sent_epoch = s.epoch, node_id = s.node_id, provider = s.provider, unreachable_since = NULL,
                    sent_at = coalesce(i.sent_at, locked.written_at),
                    dispatched_at = coalesce(i.dispatched_at, locked.written_at)
               FROM locked JOIN s USING (workspace_id, invocation_id)
              WHERE i.workspace_id = s.workspace_id AND i.invocation_id = s.invocation_id
                AND i.attempt = s.attempt AND i.unreachable_since IS DISTINCT FROM '-infinity'
                AND (i.status = 'invoked' OR i.status = 'dispatched' AND (i.node_id, i.provider) = (s.node_id, s.provider))",
        )
        .bind(sent.iter().map(|s| s.scope.workspace_id()).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| s.invocation_id).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| s.attempt).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| &s.node_id).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| &s.provider).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| s.epoch).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| s.written_at.elapsed().as_secs_f64()).collect::<Vec<_>>())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("marking invocations as sent"))?;
        Ok(())
    }

    /// Marks an invocation as accepted: a missing answer no longer moves it to another provider. Returns `false` if the
    /// invocation is not assigned to this provider or the fence does not hold.
    pub async fn accept_invocation(
        &self,
        fence: &Fence,
        invocation: InvocationId,
        at: DateTime<Utc>,
    ) -> StoreResult<bool> {
        // A repeated report keeps the time of the first one.
        let accepted = sqlx::query(
            "UPDATE invocations i SET accepted_at = coalesce(i.accepted_at, $6)
              WHERE i.workspace_id = $1 AND i.invocation_id = $5 AND i.completed_at IS NULL
                AND EXISTS (SELECT FROM providers p WHERE p.workspace_id = $1 AND p.node_id = $2
                               AND p.provider = $3 AND p.epoch = $4)
                AND (i.status = 'dispatched' AND i.node_id = $2 AND i.provider = $3
                     OR i.status = 'invoked' AND EXISTS (
                        SELECT FROM agents a
                         WHERE a.workspace_id = $1 AND a.agent_id = i.handler_agent_id AND a.node_id = $2
                           AND (a.provider IS NULL OR a.provider = $3)))",
        )
        .bind(fence.scope.workspace_id())
        .bind(&fence.node_id)
        .bind(&fence.provider)
        .bind(fence.epoch)
        .bind(invocation)
        .bind(at)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("accepting an invocation"))?;
        Ok(accepted.rows_affected() == 1)
    }
}
