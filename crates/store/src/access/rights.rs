//! Rights as stored: the settings of workspaces and agents, and the agents' rights that follow from them. Called by
//! token lookup and by the engine where it decides for an agent that is not the caller.

use relay_domain::{
    AgentId, WorkspaceScope,
    access::rights::{RightSettings, Rights},
    agents::AgentKind,
};
use sqlx::{FromRow, Row as _, postgres::PgRow, types::Json};

use crate::{
    Store, StoreError, StoreResult,
    decode::{decode_row, decode_rows},
};

/// Agent with its rights, as far as decisions about it need.
#[derive(Debug, Clone)]
pub struct AgentWithRights {
    pub agent_id: AgentId,
    pub name: String,
    pub kind: AgentKind,
    pub rights: Rights,
}

impl FromRow<'_, PgRow> for AgentWithRights {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            agent_id: row.try_get("agent_id")?,
            name: row.try_get("name")?,
            kind: row.try_get("type")?,
            rights: decode_rights(row)?,
        })
    }
}

/// Decodes the settings of one level; null is none.
pub(crate) fn decode_settings(row: &PgRow, column: &str) -> sqlx::Result<RightSettings> {
    Ok(row.try_get::<Option<Json<RightSettings>>, _>(column)?.map(|Json(settings)| settings).unwrap_or_default())
}

/// Decodes the rights in force from the columns `policy` of the workspace and `rights` of the agent.
pub(crate) fn decode_rights(row: &PgRow) -> sqlx::Result<Rights> {
    Ok(Rights::new(&decode_settings(row, "policy")?, &decode_settings(row, "rights")?))
}

/// Columns of [`AgentWithRights`], of the agent `a` and its workspace `w`.
macro_rules! select_rights {
    ($rest:literal) => {
        concat!(
            "SELECT a.agent_id, a.name, a.type, a.rights, w.policy
               FROM agents a JOIN workspaces w ON w.workspace_id = a.workspace_id
              WHERE a.workspace_id = $1 AND a.deleted_at IS NULL AND ",
            $rest
        )
    };
}

impl Store {
    /// Reads those of these agents that are not deleted, in no order.
    pub async fn agents_with_rights(
        &self,
        scope: WorkspaceScope,
        agents: &[AgentId],
    ) -> StoreResult<Vec<AgentWithRights>> {
        let rows = sqlx::query(select_rights!("a.agent_id = ANY ($2)"))
            .bind(scope.workspace_id())
            .bind(agents)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading the rights of agents"))?;
        decode_rows("agents", &rows)
    }

    /// Reads the agent of a name, unless it is deleted.
    pub async fn agent_with_rights_by_name(
        &self,
        scope: WorkspaceScope,
        name: &str,
    ) -> StoreResult<Option<AgentWithRights>> {
        let row = sqlx::query(select_rights!("a.name = $2"))
            .bind(scope.workspace_id())
            .bind(name)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading the rights of an agent"))?;
        row.map(|row| decode_row("agents", &row)).transpose()
    }
}
