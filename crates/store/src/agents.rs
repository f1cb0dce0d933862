//! Agents: registration, reading, changing, deleting, presence.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, ChannelId, NodeId, ProviderName, WorkspaceScope,
    agent::{AgentKind, AgentStatus},
    names,
    observer::ObserverFilters,
    plan::Ceiling,
    token::TokenHash,
};
use serde_json::Value;
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    ceilings::is_within,
    events::{self, NewEvent, Recorded, status_event},
    filters,
    located::has_ended,
    tokens::read_hash,
};

/// An agent that is not deleted.
#[derive(Debug, Clone)]
pub struct AgentRow {
    /// Its id.
    pub agent_id: AgentId,
    /// Its name, unique in the workspace while it lives.
    pub name: String,
    /// What it is.
    pub kind: AgentKind,
    /// Who it is, in its own words.
    pub persona: Option<String>,
    /// What clients keep there.
    pub metadata: Value,
    /// What it can do.
    pub capabilities: Option<Value>,
    /// What it was last known to be doing.
    pub status: AgentStatus,
    /// The node it is on.
    pub node_id: NodeId,
    /// The provider of that node that runs it, if one is known.
    pub provider: Option<ProviderName>,
    /// When it was registered.
    pub created_at: DateTime<Utc>,
    /// When it was last heard of.
    pub last_seen_at: DateTime<Utc>,
}

impl FromRow<'_, PgRow> for AgentRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            agent_id: AgentId::new(row.try_get("agent_id")?),
            name: row.try_get("name")?,
            kind: AgentKind::parse(row.try_get("type")?).unwrap_or_default(),
            persona: row.try_get("persona")?,
            metadata: row.try_get("metadata")?,
            capabilities: row.try_get("capabilities")?,
            status: AgentStatus::parse(row.try_get("status")?).unwrap_or_default(),
            node_id: NodeId::new(row.try_get::<String, _>("node_id")?),
            provider: row.try_get::<Option<String>, _>("provider")?.map(ProviderName::new),
            created_at: row.try_get("created_at")?,
            last_seen_at: row.try_get("last_seen_at")?,
        })
    }
}

/// An agent to be registered.
#[derive(Debug)]
pub struct NewAgent<'a> {
    /// Its id.
    pub agent_id: AgentId,
    /// Its name.
    pub name: &'a str,
    /// What it is.
    pub kind: AgentKind,
    /// Who it is.
    pub persona: Option<&'a str>,
    /// What clients keep there.
    pub metadata: &'a Value,
    /// What it can do.
    pub capabilities: Option<&'a Value>,
    /// What it is good at.
    pub skills: Option<&'a Value>,
    /// The hash of its token.
    pub token: TokenHash,
    /// When it is registered.
    pub at: DateTime<Utc>,
    /// The channel it joins at once, by name, if any.
    pub joins: Option<&'a str>,
    /// How many agents the workspace may have.
    pub ceiling: Option<i64>,
}

/// What became of a registration.
#[derive(Debug)]
pub enum Registration {
    /// The agent exists now, and is a member of this channel, which is recorded.
    Registered(Option<(ChannelId, Recorded)>),
    /// A living agent has that name.
    NameTaken,
    /// The workspace has as many as it may.
    NoRoom,
}

/// What to change of an agent. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct AgentChange<'a> {
    /// What it is doing.
    pub status: Option<AgentStatus>,
    /// Who it is; `Some(None)` clears it.
    pub persona: Option<Option<&'a str>>,
    /// Merged key by key into what is there.
    pub metadata: Option<&'a Value>,
    /// What it can do; `Some(None)` clears it.
    pub capabilities: Option<Option<&'a Value>>,
    /// What it is good at.
    pub skills: Option<&'a Value>,
}

/// What must hold of an agent for it to be deleted; nothing by default.
#[derive(Debug, Default)]
pub struct DeleteIf {
    /// It is this one.
    pub agent: Option<AgentId>,
    /// This is its token still.
    pub token: Option<TokenHash>,
    /// It has ended: it is offline, or nobody at its node has it any more, whatever it calls.
    pub ended: bool,
    /// Its mail becomes dead letters at once rather than with time.
    pub empties: bool,
}

/// What a deletion took along.
#[derive(Debug)]
pub struct DeletedAgent {
    /// The agent.
    pub agent_id: AgentId,
    /// The node it was on.
    pub node_id: NodeId,
    /// Its own token and the token of its direct node.
    pub tokens: Vec<TokenHash>,
    /// The channels it was a member of.
    pub channels: Vec<ChannelId>,
    /// That it went offline, if it was not.
    pub recorded: Recorded,
}

macro_rules! columns {
    () => {
        "agent_id, name, type, persona, metadata, capabilities, status, node_id, provider, created_at, last_seen_at"
    };
}

impl Store {
    /// Registers an agent with its mailbox, token and first membership, of which `joined` makes an event.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn register_agent(
        &self,
        scope: WorkspaceScope,
        new: &NewAgent<'_>,
        joined: impl FnOnce(ChannelId) -> NewEvent + Send,
    ) -> StoreResult<Registration> {
        let doing = "registering an agent";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let row: Option<Option<i64>> = sqlx::query_scalar(
            "WITH agent AS (
                INSERT INTO agents (workspace_id, agent_id, name, type, persona, metadata, capabilities, skills,
                                    node_id, created_at, last_seen_at)
                VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $10)
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
                WHERE workspace_id = $1 AND name = $12 AND type = 0 AND archived_at IS NULL
                  AND EXISTS (SELECT FROM agent)
                RETURNING channel_id
             ), member AS (
                INSERT INTO channel_members (workspace_id, channel_id, agent_id, joined_at)
                SELECT $1, channel_id, $2, $10 FROM channel
             )
             SELECT (SELECT channel_id FROM channel) FROM agent",
        )
        .bind(scope.workspace_id().get())
        .bind(new.agent_id.get())
        .bind(new.name)
        .bind(new.kind.as_str())
        .bind(new.persona)
        .bind(new.metadata)
        .bind(new.capabilities)
        .bind(new.skills)
        .bind(NodeId::direct(new.agent_id).as_str())
        .bind(new.at)
        .bind(&new.token.as_bytes()[..])
        .bind(new.joins)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(channel) = row else { return Ok(Registration::NameTaken) };
        if !is_within(&mut tx, scope, Ceiling::Agents, new.ceiling).await? {
            return Ok(Registration::NoRoom);
        }
        let registered = match channel.map(ChannelId::new) {
            Some(channel) => Some((channel, events::append(&mut tx, scope, new.at, vec![joined(channel)]).await?)),
            None => None,
        };
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Registration::Registered(registered))
    }

    /// The living agent of that name.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agent_by_name(&self, scope: WorkspaceScope, name: &str) -> StoreResult<Option<AgentRow>> {
        sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM agents WHERE workspace_id = $1 AND name = $2 AND deleted_at IS NULL"
        ))
        .bind(scope.workspace_id().get())
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking up an agent by name"))
    }

    /// The living agent of that id.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agent(&self, scope: WorkspaceScope, agent: AgentId) -> StoreResult<Option<AgentRow>> {
        sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM agents WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL"
        ))
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading an agent"))
    }

    /// Living agents, oldest first, at most [`names::MAX_LISTED_AGENTS`].
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agents(&self, scope: WorkspaceScope, filters: &ObserverFilters) -> StoreResult<Vec<AgentRow>> {
        sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM agents WHERE workspace_id = $1 AND deleted_at IS NULL
                AND ($3::bigint[] IS NULL OR agent_id = ANY ($3))
              ORDER BY agent_id LIMIT $2"
        ))
        .bind(scope.workspace_id().get())
        .bind(names::MAX_LISTED_AGENTS)
        .bind(filters::agent_ids(filters))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing agents"))
    }

    /// Changes an agent, and tells of another status than before. `None` when there is none of that name or its
    /// metadata would pass `metadata_limit` bytes.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn update_agent(
        &self,
        scope: WorkspaceScope,
        name: &str,
        change: &AgentChange<'_>,
        metadata_limit: i32,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<(AgentRow, Option<Recorded>)>> {
        let doing = "updating an agent";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // A status is newer than any call that came before it: last_seen_at moves along, so that a late
        // refresh (see `agents_seen`) does not bring the agent back.
        let row = sqlx::query(concat!(
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
                skills = coalesce($9, skills)
             FROM former
             WHERE workspace_id = $1 AND agent_id = former_id
               AND ($6 IS NULL OR octet_length((metadata || $6)::text) <= $10)
             RETURNING former_status, ",
            columns!()
        ))
        .bind(scope.workspace_id().get())
        .bind(name)
        .bind(change.status.map(AgentStatus::as_str))
        .bind(change.persona.is_some())
        .bind(change.persona.flatten())
        .bind(change.metadata)
        .bind(change.capabilities.is_some())
        .bind(change.capabilities.flatten())
        .bind(change.skills)
        .bind(metadata_limit)
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(None) };
        let former: String = row.try_get("former_status").map_err(StoreError::from_sqlx(doing))?;
        let agent = AgentRow::from_row(&row).map_err(StoreError::from_sqlx(doing))?;
        let mut recorded = None;
        if agent.status.as_str() != former {
            let event = status_event(agent.agent_id, &agent.name, agent.status.as_str());
            recorded = Some(events::append(&mut tx, scope, at, vec![event]).await?);
        }
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some((agent, recorded)))
    }

    /// Deletes an agent with its tokens and memberships; that it went offline is recorded. `None` when there
    /// is none of that name that is as it must be.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn delete_agent(
        &self,
        scope: WorkspaceScope,
        name: &str,
        only: &DeleteIf,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<DeletedAgent>> {
        // Channel rows are locked in the order of their ids, as two deletions at once may share channels.
        let doing = "deleting an agent";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let row = sqlx::query(concat!(
            "WITH alive AS MATERIALIZED (
                SELECT agent_id, status FROM agents a
                WHERE workspace_id = $1 AND name = $2 AND deleted_at IS NULL
                  AND ($4::bigint IS NULL OR agent_id = $4)
                  AND ($5::bytea IS NULL OR EXISTS (
                      SELECT FROM tokens t WHERE t.workspace_id = $1 AND t.agent_id = a.agent_id AND t.token_hash = $5))
                  AND (NOT $6 OR ",
            has_ended!("a"),
            ")
                FOR UPDATE
             ), gone AS (
                UPDATE agents a SET deleted_at = $3, status = 'offline', token_generation = token_generation + 1,
                       mailbox_orphaned = mailbox_orphaned OR $7
                FROM alive WHERE a.workspace_id = $1 AND a.agent_id = alive.agent_id
                RETURNING a.agent_id, a.node_id, alive.status AS was
             ), locked AS (
                SELECT c.channel_id FROM channels c
                JOIN channel_members m ON m.workspace_id = c.workspace_id AND m.channel_id = c.channel_id
                WHERE c.workspace_id = $1 AND m.agent_id = (SELECT agent_id FROM gone)
                ORDER BY c.channel_id FOR UPDATE OF c
             ), bumped AS (
                UPDATE channels c SET members_version = members_version + 1 FROM locked
                WHERE c.workspace_id = $1 AND c.channel_id = locked.channel_id
             ), memberships AS (
                DELETE FROM channel_members m USING gone
                WHERE m.workspace_id = $1 AND m.agent_id = gone.agent_id
             ), dead_tokens AS (
                DELETE FROM tokens t USING gone
                WHERE t.workspace_id = $1
                  AND (t.agent_id = gone.agent_id OR t.node_id = 'node_direct_' || gone.agent_id)
                RETURNING t.token_hash
             ), handled AS (
                DELETE FROM actions c USING gone WHERE c.workspace_id = $1 AND c.handler_agent_id = gone.agent_id
             ), hopeless AS (
                -- Nobody will end these: they fail at the worker's next look.
                UPDATE invocations i SET sent_epoch = NULL, unreachable_since = '-infinity'
                FROM gone WHERE i.workspace_id = $1 AND i.handler_agent_id = gone.agent_id AND i.status = 'invoked'
             )
             SELECT agent_id, node_id, was,
                    ARRAY(SELECT token_hash FROM dead_tokens) AS tokens,
                    ARRAY(SELECT channel_id FROM locked) AS channels
             FROM gone"
        ))
        .bind(scope.workspace_id().get())
        .bind(name)
        .bind(at)
        .bind(only.agent.map(AgentId::get))
        .bind(only.token.as_ref().map(|token| &token.as_bytes()[..]))
        .bind(only.ended)
        .bind(only.empties)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(None) };
        let agent_id = AgentId::new(row.get("agent_id"));
        let was_offline = row.get::<&str, _>("was") == "offline";
        let events = if was_offline { Vec::new() } else { vec![status_event(agent_id, name, "offline")] };
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        let read = || -> sqlx::Result<DeletedAgent> {
            Ok(DeletedAgent {
                agent_id,
                node_id: NodeId::new(row.try_get::<String, _>("node_id")?),
                tokens: row.try_get::<Vec<Vec<u8>>, _>("tokens")?.iter().filter_map(|t| read_hash(t)).collect(),
                channels: row.try_get::<Vec<i64>, _>("channels")?.into_iter().map(ChannelId::new).collect(),
                recorded,
            })
        };
        read().map(Some).map_err(StoreError::from_sqlx(doing))
    }

    /// Gives an agent a new token and raises its generation. Returns the old token's hash, if it had one;
    /// the outer `None` when there is no such agent.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn rotate_agent_token(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        token: TokenHash,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<Option<TokenHash>>> {
        let doing = "rotating an agent's token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The agent's row serialises rotations.
        let found = sqlx::query(
            "UPDATE agents SET token_generation = token_generation + 1
             WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if found.rows_affected() == 0 {
            return Ok(None);
        }
        let old: Option<Vec<u8>> = sqlx::query_scalar(
            "DELETE FROM tokens WHERE workspace_id = $1 AND agent_id = $2 AND kind = 'agent' RETURNING token_hash",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        sqlx::query(
            "INSERT INTO tokens (token_hash, kind, workspace_id, agent_id, created_at) VALUES ($3, 'agent', $1, $2, $4)",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .bind(&token.as_bytes()[..])
        .bind(at)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Some(old.and_then(|bytes| read_hash(&bytes))))
    }
}
