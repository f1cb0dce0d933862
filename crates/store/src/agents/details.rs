//! Agents with their channels, actions and open deliveries ([`AgentDetails`]), for the routes that show one agent.
//!
//! One statement reads all but the deliveries: an agent whose mailbox has nothing unsettled takes one round trip.

use chrono::{DateTime, Utc};
use const_format::{concatcp, formatcp};
use relay_domain::{
    AgentId, ChannelId, WorkspaceScope,
    agents::details::{AgentDetails, AgentKey},
    channels::{MemberRole, Membership},
    names,
};
use sqlx::{
    FromRow, Row as _,
    postgres::{PgHasArrayType, PgRow, Postgres},
};

use super::lifecycle::{AgentRow, agent_columns};
use crate::{Store, StoreError, StoreResult, codes::CHANNEL, decode::decode_row};

/// Selection of an agent and of its details.
#[derive(Debug)]
pub struct AgentDetailsQuery<'a> {
    pub agent: AgentKey<'a>,
    /// Agent that reads: only actions that it may see itself are listed. `None`: all of them.
    pub reader: Option<(AgentId, &'a str)>,
    /// Maximum number of names of actions, those of handled ones first.
    pub action_limit: i64,
    /// Maximum number of pending deliveries.
    pub delivery_limit: i64,
}

/// Aggregates the channels (not conversations) of the agent, oldest first, at most `$2`. `OFFSET 0`: by their keys,
/// also while the tables have no statistics.
const CHANNELS: &str = formatcp!(
    "SELECT array_agg(channel_id) AS channel_ids, array_agg(name) AS channel_names,
            array_agg(role) AS channel_roles, array_agg(joined_at) AS channels_joined_at
       FROM (SELECT c.channel_id, c.name, m.role, m.joined_at
               FROM (SELECT channel_id, role, joined_at FROM channel_members
                      WHERE workspace_id = agents.workspace_id AND agent_id = agents.agent_id OFFSET 0) AS m
              CROSS JOIN LATERAL (
                     SELECT channel_id, name FROM channels
                      WHERE workspace_id = agents.workspace_id AND channel_id = m.channel_id
                        AND type = {CHANNEL} AND archived_at IS NULL OFFSET 0) AS c
              ORDER BY c.channel_id LIMIT $2) AS c"
);

/// Aggregates the names of the actions that the agent handles, and of those that it may invoke, at most `$5` in total.
/// With a reader (`$3`, `$4`), only those that the reader may see itself.
const ACTIONS: &str = "
    SELECT array_agg(name) FILTER (WHERE handles) AS actions_provided,
           array_agg(name) FILTER (WHERE may) AS actions_available
      FROM (SELECT name, handles, may
              FROM (SELECT c.name, coalesce(c.handler_agent_id = agents.agent_id, false) AS handles,
                           c.available_to IS NULL OR agents.name = ANY (c.available_to) AS may,
                           $3::bigint IS NULL OR c.available_to IS NULL OR $4 = ANY (c.available_to)
                               OR coalesce(c.handler_agent_id = $3, false) AS shown
                      FROM actions c
                      LEFT JOIN agents a ON a.workspace_id = c.workspace_id AND a.agent_id = c.handler_agent_id
                     WHERE c.workspace_id = agents.workspace_id AND c.claims_name
                       AND (c.handler_agent_id IS NULL OR a.deleted_at IS NULL)) AS c
             WHERE shown AND (handles OR may)
             ORDER BY handles DESC, name LIMIT $5) AS c";

/// Tells whether the mailbox of the agent has seqs above its settled floor.
const HAS_UNSETTLED: &str = "
    coalesce((SELECT h.next_seq - 1 > coalesce((SELECT k.settled_floor FROM mailbox_cursors k
                                                 WHERE k.workspace_id = agents.workspace_id
                                                   AND k.agent_id = agents.agent_id), 0)
                FROM mailbox_heads h
               WHERE h.workspace_id = agents.workspace_id AND h.agent_id = agents.agent_id), true)";

/// Statement that reads the agent of workspace `$1` that `$selection` selects by `$6`. `OFFSET 0`, as above.
// The lateral parts are aggregates, which yield a row even of no rows, so that none of them hides the agent.
macro_rules! details_of {
    ($selection:literal) => {
        concatcp!(
            "SELECT ",
            agent_columns!(),
            ", channels.*, actions.*, ",
            HAS_UNSETTLED,
            " AS has_unsettled FROM (SELECT * FROM agents WHERE workspace_id = $1 AND ",
            $selection,
            " OFFSET 0) AS agents CROSS JOIN LATERAL (",
            CHANNELS,
            ") AS channels CROSS JOIN LATERAL (",
            ACTIONS,
            ") AS actions WHERE deleted_at IS NULL"
        )
    };
}

struct DetailsRow {
    details: AgentDetails,
    has_unsettled: bool,
}

impl FromRow<'_, PgRow> for DetailsRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let ids: Vec<ChannelId> = aggregated(row, "channel_ids")?;
        let names: Vec<String> = aggregated(row, "channel_names")?;
        let roles: Vec<MemberRole> = aggregated(row, "channel_roles")?;
        let joined: Vec<DateTime<Utc>> = aggregated(row, "channels_joined_at")?;
        let channels = ids.into_iter().zip(names).zip(roles.into_iter().zip(joined));
        let channels =
            channels.map(|((channel_id, name), (role, joined_at))| Membership { channel_id, name, role, joined_at });
        let mut actions_available: Vec<String> = aggregated(row, "actions_available")?;
        // The statement lists handled actions first, so the names come in two sorted runs.
        actions_available.sort_unstable();
        let details = AgentDetails {
            agent: AgentRow::from_row(row)?.into(),
            channels: channels.collect(),
            actions_provided: aggregated(row, "actions_provided")?,
            actions_available,
            pending_deliveries: Vec::new(),
        };
        Ok(Self { details, has_unsettled: row.try_get("has_unsettled")? })
    }
}

/// Decodes an aggregated array. That of no rows is null.
fn aggregated<'r, T>(row: &'r PgRow, column: &str) -> sqlx::Result<Vec<T>>
where
    T: for<'v> sqlx::Decode<'v, Postgres> + sqlx::Type<Postgres> + PgHasArrayType,
{
    row.try_get::<Option<Vec<T>>, _>(column).map(Option::unwrap_or_default)
}

impl Store {
    /// Reads an agent with its details, unless it is deleted.
    pub async fn agent_details(
        &self,
        scope: WorkspaceScope,
        query: &AgentDetailsQuery<'_>,
    ) -> StoreResult<Option<AgentDetails>> {
        let statement = match query.agent {
            AgentKey::Id(_) => sqlx::query(details_of!("agent_id = $6")),
            // Deleted agents may have had the name. The condition also makes the index over names usable, which
            // excludes them.
            AgentKey::Name(_) => sqlx::query(details_of!("name = $6 AND deleted_at IS NULL")),
        };
        let statement = statement
            .bind(scope.workspace_id())
            .bind(names::MAX_LISTED_CHANNELS)
            .bind(query.reader.map(|(id, _)| id))
            .bind(query.reader.map(|(_, name)| name))
            .bind(query.action_limit);
        let statement = match query.agent {
            AgentKey::Id(id) => statement.bind(id),
            AgentKey::Name(name) => statement.bind(name),
        };
        let row = statement
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading an agent with its details"))?;
        let Some(row) = row else { return Ok(None) };
        let DetailsRow { mut details, has_unsettled } = decode_row("agents", &row)?;
        if has_unsettled && query.delivery_limit > 0 {
            let pending = self.deliveries(scope, details.agent.id, None, query.delivery_limit).await?;
            details.pending_deliveries = pending.into_iter().map(|(delivery, _)| delivery).collect();
        }
        Ok(Some(details))
    }
}
