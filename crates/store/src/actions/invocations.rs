//! Invocations as stored: [`Invocation`], its columns, and the lookup by id.

use const_format::formatcp;
use relay_domain::{InvocationId, WorkspaceScope, actions::Invocation};
use sqlx::postgres::PgRow;

use crate::{
    Store, StoreError, StoreResult,
    decode::{decode_row, decode_rows},
};

const TABLE: &str = "invocations";

/// Columns of an [`Invocation`]; the table's alias is `i`.
pub(crate) const COLUMNS: &str = formatcp!("{COLUMNS_WITHOUT_INPUT}, i.input");

/// The same without the input of up to 768 KiB, for statements that return many rows. They return another `input`.
pub(crate) const COLUMNS_WITHOUT_INPUT: &str = "i.workspace_id, i.invocation_id, i.action_name, i.capability,
    i.handler_agent_id, i.target_node_id, i.caller_id, i.caller_name, i.output, i.error, i.duration_ms, i.status,
    i.attempt, i.node_id, i.provider, i.dispatched_at, i.durable, i.agent_id, i.placements, i.created_at,
    i.completed_at, i.accepted_at";

/// Decodes rows with the columns of [`COLUMNS`].
pub(crate) fn decode_invocations(rows: &[PgRow]) -> StoreResult<Vec<Invocation>> {
    decode_rows(TABLE, rows)
}

impl Store {
    pub async fn invocation(&self, scope: WorkspaceScope, invocation: InvocationId) -> StoreResult<Option<Invocation>> {
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
