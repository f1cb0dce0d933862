//! Invocations as stored: [`InvocationRow`], its columns, and the lookup by id.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{AgentId, InvocationId, NodeId, ProviderName, WorkspaceScope, actions::InvocationStatus};
use serde_json::Value;
use sqlx::{FromRow, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    actions::placement_records::PlacementRecord,
    decode::{decode_row, decode_rows},
};

#[derive(Debug, Clone, FromRow)]
pub struct InvocationRow {
    #[sqlx(rename = "workspace_id")]
    pub scope: WorkspaceScope,
    pub invocation_id: InvocationId,
    pub action_name: String,
    /// Capability that the node must advertise; `None` if an agent handles it.
    pub capability: Option<String>,
    pub handler_agent_id: Option<AgentId>,
    /// Restricts placement to this node.
    pub target_node_id: Option<NodeId>,
    /// Calling agent; `None` for the workspace key.
    pub caller_id: Option<AgentId>,
    pub caller_name: String,
    pub input: Value,
    pub output: Option<Value>,
    pub error: Option<String>,
    /// Duration in milliseconds, reported by the handler or measured by the engine.
    pub duration_ms: Option<i64>,
    pub status: InvocationStatus,
    /// Number of attempts so far.
    pub attempt: i32,
    /// Node of the newest attempt.
    pub node_id: Option<NodeId>,
    /// Provider of the newest attempt.
    pub provider: Option<ProviderName>,
    /// Time at which that provider was chosen.
    pub dispatched_at: Option<DateTime<Utc>>,
    /// Time at which the current provider accepted the invocation.
    pub accepted_at: Option<DateTime<Utc>>,
    /// `true` if the outcome is delivered to the caller's mailbox.
    pub durable: bool,
    /// Agent that the invocation started.
    pub agent_id: Option<AgentId>,
    /// Decisions of the latest attempts, oldest first.
    #[sqlx(json)]
    pub placements: Vec<PlacementRecord>,
    pub created_at: DateTime<Utc>,
    pub completed_at: Option<DateTime<Utc>>,
}

const TABLE: &str = "invocations";

/// Columns of an [`InvocationRow`]; the table's alias is `i`.
pub(crate) const COLUMNS: &str = formatcp!("{COLUMNS_WITHOUT_INPUT}, i.input");

/// The same without the input of up to 768 KiB, for statements that return many rows. They return another `input`.
pub(crate) const COLUMNS_WITHOUT_INPUT: &str = "i.workspace_id, i.invocation_id, i.action_name, i.capability,
    i.handler_agent_id, i.target_node_id, i.caller_id, i.caller_name, i.output, i.error, i.duration_ms, i.status,
    i.attempt, i.node_id, i.provider, i.dispatched_at, i.durable, i.agent_id, i.placements, i.created_at,
    i.completed_at, i.accepted_at";

/// Decodes rows with the columns of [`COLUMNS`].
pub(crate) fn decode_invocations(rows: &[PgRow]) -> StoreResult<Vec<InvocationRow>> {
    decode_rows(TABLE, rows)
}

impl Store {
    pub async fn invocation(
        &self,
        scope: WorkspaceScope,
        invocation: InvocationId,
    ) -> StoreResult<Option<InvocationRow>> {
        let query = format!("SELECT {COLUMNS} FROM invocations i WHERE i.workspace_id = $1 AND i.invocation_id = $2");
        let row = sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(scope.workspace_id())
            .bind(invocation)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading an invocation"))?;
        row.map(|row| decode_row(TABLE, &row)).transpose()
    }
}
