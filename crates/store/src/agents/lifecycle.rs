//! Life cycle of agents: registration, lookup, changes and deletion. Main types: [`NewAgent`],
//! [`AgentChange`] and [`DeletedAgent`]; called by the engine's agent use cases.

use chrono::{DateTime, Utc};
use const_format::{concatcp, formatcp};
use relay_domain::{
    AgentId, ChannelId, NodeId, WorkspaceScope,
    access::{rights::RightChanges, token::TokenHash},
    agents::{Agent, AgentKind, AgentPresence, AgentStatus},
    names,
    observers::ObserverFilters,
    workspaces::plan::Quota,
};
use serde_json::Value;
use sqlx::{FromRow, Row as _, postgres::PgRow, types::Json};

use crate::{
    Store, StoreError, StoreResult,
    access::rights::decode_settings,
    agents::sessions,
    codes::CHANNEL,
    decode::{decode_row, decode_rows},
    events::{self, Event, RecordedEvents, status_event},
    nodes::assignment::is_not_running,
    observers::filters,
    sizes::AGENT_BYTES,
    workspaces::quota_counts::is_within_quota,
};

pub(crate) struct AgentRow(Agent);

impl FromRow<'_, PgRow> for AgentRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(Agent {
            id: row.try_get("agent_id")?,
            name: row.try_get("name")?,
            kind: row.try_get("type")?,
            persona: row.try_get("persona")?,
            metadata: row.try_get("metadata")?,
            capabilities: row.try_get("capabilities")?,
            status: row.try_get("status")?,
            node_id: row.try_get("node_id")?,
            machine: row.try_get("machine")?,
            provider: row.try_get("provider")?,
            created_at: row.try_get("created_at")?,
            last_seen_at: row.try_get("last_seen_at")?,
            spawned_by: row.try_get("spawned_by")?,
            rights: decode_settings(row, "rights")?,
        }))
    }
}

impl From<AgentRow> for Agent {
    fn from(row: AgentRow) -> Self {
        row.0
    }
}

/// Agent to be registered.
#[derive(Debug)]
pub struct NewAgent<'a> {
    pub agent_id: AgentId,
    pub name: &'a str,
    pub kind: AgentKind,
    pub persona: Option<&'a str>,
    pub metadata: &'a Value,
    pub capabilities: Option<&'a Value>,
    pub skills: Option<&'a Value>,
    pub token: TokenHash,
    /// Machine of its own node.
    pub direct_machine: Option<&'a str>,
    pub at: DateTime<Utc>,
    /// Name of a channel that the agent joins, if it exists.
    pub joins: Option<&'a str>,
    /// Maximum number of agents in the workspace.
    pub quota: Option<i64>,
}

/// Outcome of [`Store::register_agent`].
#[derive(Debug)]
pub enum Registration {
    /// The agent exists, and is a member of this channel; the membership is recorded.
    Registered(Option<(ChannelId, RecordedEvents)>),
    NameTaken,
    QuotaReached,
}

/// Changes of an agent. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct AgentChange<'a> {
    pub status: Option<AgentStatus>,
    /// `Some(None)` clears it.
    pub persona: Option<Option<&'a str>>,
    /// Merged into the stored object, key by key.
    pub metadata: Option<&'a Value>,
    /// `Some(None)` clears them.
    pub capabilities: Option<Option<&'a Value>>,
    pub skills: Option<&'a Value>,
    /// Merged into the stored overrides; `Some(None)` removes all of them.
    pub rights: Option<Option<&'a RightChanges>>,
}

/// Conditions of a deletion, and its effect on the mailbox. No condition by default.
#[derive(Debug, Default)]
pub struct DeleteCondition {
    /// The agent must have this id.
    pub agent: Option<AgentId>,
    /// The agent must still have this token.
    pub token: Option<TokenHash>,
    /// The agent must have ended: it is offline, or no provider of its node runs it.
    pub has_ended: bool,
    /// `true` if the agent is released; its node may never report its end.
    pub is_release: bool,
    /// Deletes a running agent as well if its provider has not bound it after this time.
    pub unbound_since: Option<DateTime<Utc>>,
    /// Makes the worker turn the agent's deliveries into dead letters at once, instead of when they expire.
    pub orphans_mailbox: bool,
}

/// Deleted agent, with all that depended on it.
#[derive(Debug)]
pub struct DeletedAgent {
    pub agent_id: AgentId,
    /// Former location.
    pub node_id: NodeId,
    /// Revoked tokens: the agent's own, its former one, and that of its direct node.
    pub tokens: Vec<TokenHash>,
    /// Former memberships.
    pub channels: Vec<ChannelId>,
    pub recorded: RecordedEvents,
}

/// Row of [`DELETE`].
#[derive(FromRow)]
struct DeletedRow {
    agent_id: AgentId,
    node_id: NodeId,
    former_status: AgentStatus,
    /// Node that it still ran on.
    hosted_on: Option<NodeId>,
    tokens: Vec<TokenHash>,
    channels: Vec<ChannelId>,
}

/// `$seen` is the expression for the last heartbeat of the agent's host.
macro_rules! agent_columns {
    () => {
        $crate::agents::lifecycle::agent_columns!($crate::agents::presence::host_seen_at!("agents"))
    };
    ($($seen:tt)+) => {
        concat!(
            "agent_id, name, type, persona, metadata, capabilities, status, node_id, provider, created_at,
         greatest(last_seen_at, CASE WHEN status <> 'offline' THEN ",
            $($seen)+,
            " END) AS last_seen_at, spawned_by, rights,
         coalesce(CASE WHEN node_id = 'node_direct_' || agent_id
                       THEN coalesce((SELECT n.machine_id FROM nodes n WHERE n.workspace_id = agents.workspace_id
                                         AND n.node_id = agents.node_id), direct_machine_id)
                       ELSE (SELECT n.name FROM nodes n WHERE n.workspace_id = agents.workspace_id
                                AND n.node_id = agents.node_id) END, 'direct') AS machine"
        )
    };
}
pub(crate) use agent_columns;

/// Joins the last heartbeat of an agent's provider. A join, because its results are kept for the other
/// agents of the provider.
macro_rules! joined_host {
    () => {
        "LEFT JOIN LATERAL (SELECT max(p.last_heartbeat_at) AS seen_at FROM providers p
                             WHERE p.workspace_id = agents.workspace_id AND p.node_id = agents.node_id
                               AND p.gateway_id IS NOT NULL
                               AND p.provider = coalesce(agents.provider, p.provider)) AS host ON true"
    };
}

// One statement: a conflict on the name leaves `agent` empty, and with it all other parts.
const REGISTER: &str = formatcp!(
    "WITH agent AS (
        INSERT INTO agents (workspace_id, agent_id, name, type, persona, metadata, capabilities, skills,
                            node_id, created_at, last_seen_at, direct_machine_id)
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $10, $13)
        ON CONFLICT (workspace_id, name) WHERE deleted_at IS NULL DO NOTHING
        RETURNING agent_id
     ), head AS (
        INSERT INTO mailbox_heads (workspace_id, agent_id) SELECT $1, agent_id FROM agent
     ), cursors AS (
        INSERT INTO mailbox_cursors (workspace_id, agent_id) SELECT $1, agent_id FROM agent
     ), token AS (
        INSERT INTO tokens (token_hash, kind, workspace_id, agent_id, created_at)
        SELECT $11, 'agent', $1, agent_id, $10 FROM agent
     ), channel AS (
        UPDATE channels SET members_version = members_version + 1
        WHERE workspace_id = $1 AND name = $12 AND type = {CHANNEL} AND archived_at IS NULL
          AND EXISTS (SELECT FROM agent)
        RETURNING channel_id
     ), member AS (
        INSERT INTO channel_members (workspace_id, channel_id, agent_id, joined_at)
        SELECT $1, channel_id, $2, $10 FROM channel
     )
     SELECT (SELECT channel_id FROM channel) FROM agent"
);

// A reported status is newer than every call before it, so last_seen_at moves along: otherwise a call that is recorded
// late (`record_agents_seen`) would make an agent active again that has just gone offline.
const UPDATE: &str = concat!(
    "WITH former AS (
        SELECT agent_id AS former_id, status AS former_status FROM agents
         WHERE workspace_id = $1 AND name = $2 AND deleted_at IS NULL FOR NO KEY UPDATE
     )
     UPDATE agents SET
        status = coalesce($3, status),
        last_seen_at = CASE WHEN $3 IS NULL THEN last_seen_at ELSE greatest(last_seen_at, $11) END,
        persona = CASE WHEN $4 THEN $5 ELSE persona END,
        metadata = metadata || coalesce($6, '{}'),
        capabilities = CASE WHEN $7 THEN $8 ELSE capabilities END,
        skills = coalesce($9, skills),
        rights = CASE WHEN $12 THEN nullif(jsonb_strip_nulls(coalesce(rights, '{}') || $13), '{}') ELSE rights END
     FROM former
     WHERE workspace_id = $1 AND agent_id = former_id
       AND ($6 IS NULL OR octet_length((metadata || $6)::text) <= $10)
     RETURNING former_status, ",
    agent_columns!()
);

// Channel rows are locked in the order of their ids, because two deletions at once may share channels. The agent's open
// invocations get no answer any more; they fail at the worker's next pass.
const DELETE: &str = concatcp!(
    "WITH target AS MATERIALIZED (
        SELECT agent_id, status, hosted_on FROM agents a
        WHERE workspace_id = $1 AND name = $2 AND deleted_at IS NULL
          AND ($4::bigint IS NULL OR agent_id = $4)
          AND ($5::bytea IS NULL OR EXISTS (
              SELECT FROM tokens t WHERE t.workspace_id = $1 AND t.agent_id = a.agent_id AND t.token_hash = $5))
          AND (NOT $6 OR ",
    is_not_running!("a"),
    " OR coalesce(coalesce(a.rebound_at, a.bound_at, '-infinity') <= $8, false))
        FOR UPDATE
     ), deleted AS (
        UPDATE agents a SET deleted_at = $3, status = 'offline', hosted_on = NULL, token_generation = token_generation + 1,
               mailbox_orphaned = mailbox_orphaned OR $7
        FROM target WHERE a.workspace_id = $1 AND a.agent_id = target.agent_id
        RETURNING a.agent_id, a.node_id, target.status AS former_status, target.hosted_on
     ), locked AS (
        SELECT c.channel_id FROM channels c
        JOIN channel_members m ON m.workspace_id = c.workspace_id AND m.channel_id = c.channel_id
        WHERE c.workspace_id = $1 AND m.agent_id = (SELECT agent_id FROM deleted)
        ORDER BY c.channel_id FOR UPDATE OF c
     ), versions AS (
        UPDATE channels c SET members_version = members_version + 1 FROM locked
        WHERE c.workspace_id = $1 AND c.channel_id = locked.channel_id
     ), memberships AS (
        DELETE FROM channel_members m USING deleted
        WHERE m.workspace_id = $1 AND m.agent_id = deleted.agent_id
     ), revoked_tokens AS (
        DELETE FROM tokens t USING deleted
        WHERE t.workspace_id = $1
          AND (t.agent_id = deleted.agent_id OR t.node_id = 'node_direct_' || deleted.agent_id)
        RETURNING t.token_hash
     ), former_tokens AS (
        DELETE FROM former_agent_tokens f USING deleted
        WHERE f.workspace_id = $1 AND f.agent_id = deleted.agent_id
        RETURNING f.token_hash
     ), handled_actions AS (
        DELETE FROM actions c USING deleted WHERE c.workspace_id = $1 AND c.handler_agent_id = deleted.agent_id
     ), subscribed AS (
        DELETE FROM subscriptions s USING deleted
        WHERE s.workspace_id = $1 AND s.created_by = deleted.agent_id RETURNING s.subscription_id
     ), calls AS (
        DELETE FROM subscription_deliveries d USING subscribed
        WHERE d.workspace_id = $1 AND d.subscription_id = subscribed.subscription_id
     ), open_invocations AS (
        UPDATE invocations i SET sent_epoch = NULL, unreachable_since = '-infinity'
        FROM deleted WHERE i.workspace_id = $1 AND i.handler_agent_id = deleted.agent_id AND i.status = 'invoked'
     )
     SELECT agent_id, node_id, former_status, hosted_on,
            ARRAY(SELECT token_hash FROM revoked_tokens UNION ALL SELECT token_hash FROM former_tokens) AS tokens,
            ARRAY(SELECT channel_id FROM locked) AS channels
     FROM deleted"
);

impl Store {
    /// Registers an agent with its mailbox, token and first membership; `joined` creates the event of the membership.
    pub async fn register_agent(
        &self,
        scope: WorkspaceScope,
        new: &NewAgent<'_>,
        joined: impl FnOnce(ChannelId) -> Event + Send,
    ) -> StoreResult<Registration> {
        let doing = "registering an agent";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let row: Option<Option<ChannelId>> = sqlx::query_scalar(REGISTER)
            .bind(scope.workspace_id())
            .bind(new.agent_id)
            .bind(new.name)
            .bind(new.kind)
            .bind(new.persona)
            .bind(new.metadata)
            .bind(new.capabilities)
            .bind(new.skills)
            .bind(NodeId::direct(new.agent_id))
            .bind(new.at)
            .bind(new.token)
            .bind(new.joins)
            .bind(new.direct_machine)
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let Some(channel) = row else { return Ok(Registration::NameTaken) };
        // Last, because the count takes a lock that serialises all registrations of the workspace. Dropping the
        // transaction undoes the insert.
        if !is_within_quota(&mut tx, scope, Quota::Agents, new.quota).await? {
            return Ok(Registration::QuotaReached);
        }
        let registered = match channel {
            Some(channel) => Some((channel, events::append(&mut tx, scope, new.at, vec![joined(channel)]).await?)),
            None => None,
        };
        // A repetition would report the agent's own name as taken.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Registration::Registered(registered))
    }

    /// Reads the agent of that name, unless it is deleted.
    pub async fn agent_by_name(&self, scope: WorkspaceScope, name: &str) -> StoreResult<Option<Agent>> {
        let row = sqlx::query(concat!(
            "SELECT ",
            agent_columns!(),
            " FROM agents WHERE workspace_id = $1 AND name = $2 AND deleted_at IS NULL"
        ))
        .bind(scope.workspace_id())
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking up an agent by name"))?;
        row.map(|row| decode_agent(&row)).transpose()
    }

    /// Reads an agent, unless it is deleted.
    pub async fn agent(&self, scope: WorkspaceScope, agent: AgentId) -> StoreResult<Option<Agent>> {
        let row = sqlx::query(concat!(
            "SELECT ",
            agent_columns!(),
            " FROM agents WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL"
        ))
        .bind(scope.workspace_id())
        .bind(agent)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading an agent"))?;
        row.map(|row| decode_agent(&row)).transpose()
    }

    /// Lists agents that are not deleted, oldest first, at most [`names::MAX_LISTED_AGENTS`], each with an upper bound
    /// of its size.
    pub async fn agent_sizes(
        &self,
        scope: WorkspaceScope,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<(AgentId, usize)>> {
        let rows: Vec<(AgentId, i64)> = sqlx::query_as(formatcp!(
            "SELECT a.agent_id, {AGENT_BYTES}::bigint FROM agents a
              WHERE a.workspace_id = $1 AND a.deleted_at IS NULL AND ($3::bigint[] IS NULL OR a.agent_id = ANY ($3))
              ORDER BY a.agent_id LIMIT $2"
        ))
        .bind(scope.workspace_id())
        .bind(names::MAX_LISTED_AGENTS)
        .bind(filters::agent_ids(filters))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing agents"))?;
        Ok(rows.into_iter().map(|(agent, bytes)| (agent, usize::try_from(bytes).unwrap_or(usize::MAX))).collect())
    }

    /// Reads those of these agents that are not deleted, oldest first.
    pub async fn agents(&self, scope: WorkspaceScope, agents: &[AgentId]) -> StoreResult<Vec<Agent>> {
        let rows = sqlx::query(concat!(
            "SELECT ",
            agent_columns!("host.seen_at"),
            " FROM agents ",
            joined_host!(),
            " WHERE workspace_id = $1 AND agent_id = ANY ($2) AND deleted_at IS NULL ORDER BY agent_id"
        ))
        .bind(scope.workspace_id())
        .bind(agents)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading agents"))?;
        Ok(decode_rows::<AgentRow>("agents", &rows)?.into_iter().map(Agent::from).collect())
    }

    /// Lists the statuses of agents that are not deleted, oldest first, at most [`names::MAX_LISTED_AGENTS`].
    pub async fn agent_statuses(&self, scope: WorkspaceScope) -> StoreResult<Vec<AgentPresence>> {
        sqlx::query_as(concat!(
            "SELECT agent_id, name, status,
                    greatest(last_seen_at, CASE WHEN status <> 'offline' THEN host.seen_at END) AS last_seen_at
               FROM agents ",
            joined_host!(),
            " WHERE workspace_id = $1 AND deleted_at IS NULL ORDER BY agent_id LIMIT $2"
        ))
        .bind(scope.workspace_id())
        .bind(names::MAX_LISTED_AGENTS)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing statuses of agents"))
    }

    /// Changes an agent, and records a change of its status. `None` when there is none of that name, or its metadata
    /// would exceed `metadata_limit` bytes.
    pub async fn update_agent(
        &self,
        scope: WorkspaceScope,
        name: &str,
        change: &AgentChange<'_>,
        metadata_limit: i32,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<(Agent, Option<RecordedEvents>)>> {
        let doing = "updating an agent";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let row = sqlx::query(UPDATE)
            .bind(scope.workspace_id())
            .bind(name)
            .bind(change.status)
            .bind(change.persona.is_some())
            .bind(change.persona.flatten())
            .bind(change.metadata)
            .bind(change.capabilities.is_some())
            .bind(change.capabilities.flatten())
            .bind(change.skills)
            .bind(metadata_limit)
            .bind(at)
            .bind(change.rights.is_some())
            .bind(change.rights.flatten().map(Json))
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(None) };
        let (former, agent) = (row.try_get::<AgentStatus, _>("former_status"), decode_agent(&row)?);
        let mut recorded = None;
        if former.map_err(StoreError::from_sqlx(doing))? != agent.status {
            let event = status_event(agent.id, &agent.name, agent.status);
            recorded = Some(events::append(&mut tx, scope, at, vec![event]).await?);
        }
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some((agent, recorded)))
    }

    /// Deletes an agent with its tokens and memberships, and records that it went offline. `None` when there is none of
    /// that name that meets the condition.
    pub async fn delete_agent(
        &self,
        scope: WorkspaceScope,
        name: &str,
        condition: &DeleteCondition,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<DeletedAgent>> {
        let doing = "deleting an agent";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let row = sqlx::query(DELETE)
            .bind(scope.workspace_id())
            .bind(name)
            .bind(at)
            .bind(condition.agent)
            .bind(condition.token)
            .bind(condition.has_ended)
            .bind(condition.orphans_mailbox)
            .bind(condition.unbound_since)
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(None) };
        let DeletedRow { agent_id, node_id, former_status, hosted_on, tokens, channels } = decode_row("agents", &row)?;
        let mut events = match former_status {
            AgentStatus::Offline => Vec::new(),
            AgentStatus::Active | AgentStatus::Idle | AgentStatus::Blocked | AgentStatus::Waiting => {
                vec![status_event(agent_id, name, AgentStatus::Offline)]
            }
        };
        if hosted_on.as_ref() == Some(&node_id) {
            let reason = if condition.is_release { "released" } else { "deleted" };
            events.extend(sessions::exit_events(&mut tx, scope, &node_id, &[agent_id], reason).await?);
        }
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(DeletedAgent { agent_id, node_id, tokens, channels, recorded }))
    }
}

fn decode_agent(row: &PgRow) -> StoreResult<Agent> {
    decode_row::<AgentRow>("agents", row).map(Agent::from)
}
