//! Invocations as they are read.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, InvocationId, WorkspaceId, WorkspaceScope};
use serde_json::Value;
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{Store, StoreError, StoreResult};

/// An invocation.
#[derive(Debug, Clone)]
pub struct InvocationRow {
    /// Its tenant.
    pub scope: WorkspaceScope,
    /// Its id.
    pub invocation_id: InvocationId,
    /// What was invoked.
    pub action_name: String,
    /// What its node must advertise; none when an agent handles it.
    pub capability: Option<String>,
    /// The agent that handles it.
    pub handler_agent_id: Option<AgentId>,
    /// The only node that may do it, if there is only one.
    pub target_node_id: Option<String>,
    /// Who invoked it; none for the holder of the workspace's key.
    pub caller_id: Option<AgentId>,
    /// That caller's name.
    pub caller_name: String,
    /// What it was given.
    pub input: Value,
    /// What it brought.
    pub output: Option<Value>,
    /// Why it failed.
    pub error: Option<String>,
    /// How long it took, in milliseconds, as its handler says or else as it was measured.
    pub duration_ms: Option<i64>,
    /// A word of [`relay_domain::action::Status`].
    pub status: String,
    /// How often a provider was picked.
    pub attempt: i32,
    /// The node of the newest attempt.
    pub node_id: Option<String>,
    /// The provider of the newest attempt.
    pub provider: Option<String>,
    /// When that was picked.
    pub dispatched_at: Option<DateTime<Utc>>,
    /// When the provider that has it said that it is at work.
    pub accepted_at: Option<DateTime<Utc>>,
    /// Whether its outcome goes into the caller's mailbox.
    pub durable: bool,
    /// The agent that came up by it.
    pub agent_id: Option<AgentId>,
    /// Why it went where it went.
    pub placements: Value,
    /// When it was invoked.
    pub created_at: DateTime<Utc>,
    /// When it had its outcome.
    pub completed_at: Option<DateTime<Utc>>,
}

/// The columns of an [`InvocationRow`] of the table `i`.
pub(crate) const COLUMNS: &str = "i.workspace_id, i.invocation_id, i.action_name, i.capability, i.handler_agent_id,
    i.target_node_id, i.caller_id, i.caller_name, i.input, i.output, i.error, i.duration_ms, i.status, i.attempt,
    i.node_id, i.provider, i.dispatched_at, i.durable, i.agent_id, i.placements, i.created_at, i.completed_at,
    i.accepted_at";

impl FromRow<'_, PgRow> for InvocationRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let agent = |column: &str| row.try_get::<Option<i64>, _>(column).map(|id| id.map(AgentId::new));
        Ok(Self {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(row.try_get("workspace_id")?)),
            invocation_id: InvocationId::new(row.try_get("invocation_id")?),
            action_name: row.try_get("action_name")?,
            capability: row.try_get("capability")?,
            handler_agent_id: agent("handler_agent_id")?,
            target_node_id: row.try_get("target_node_id")?,
            caller_id: agent("caller_id")?,
            caller_name: row.try_get("caller_name")?,
            input: row.try_get("input")?,
            output: row.try_get("output")?,
            error: row.try_get("error")?,
            duration_ms: row.try_get("duration_ms")?,
            status: row.try_get("status")?,
            attempt: row.try_get("attempt")?,
            node_id: row.try_get("node_id")?,
            provider: row.try_get("provider")?,
            dispatched_at: row.try_get("dispatched_at")?,
            accepted_at: row.try_get("accepted_at")?,
            durable: row.try_get("durable")?,
            agent_id: agent("agent_id")?,
            placements: row.try_get("placements")?,
            created_at: row.try_get("created_at")?,
            completed_at: row.try_get("completed_at")?,
        })
    }
}

impl Store {
    /// An invocation of an action.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn invocation(
        &self,
        scope: WorkspaceScope,
        invocation: InvocationId,
    ) -> StoreResult<Option<InvocationRow>> {
        let query = format!("SELECT {COLUMNS} FROM invocations i WHERE i.workspace_id = $1 AND i.invocation_id = $2");
        sqlx::query_as(sqlx::AssertSqlSafe(query))
            .bind(scope.workspace_id().get())
            .bind(invocation.get())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading an invocation"))
    }
}
