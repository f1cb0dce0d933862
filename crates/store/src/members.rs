//! Who is in which channel, and who has muted it.
//!
//! Every change raises the channel's `members_version` in the same statement: sends rely on it.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, ChannelId, WorkspaceScope, names, observer::ObserverFilters};
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    events::{self, NewEvent, Recorded},
    filters,
};

/// A member of a channel.
#[derive(Debug, Clone)]
pub struct MemberRow {
    /// The agent.
    pub agent_id: AgentId,
    /// Its name.
    pub agent_name: String,
    /// owner or member.
    pub role: String,
    /// Since when.
    pub joined_at: DateTime<Utc>,
    /// Whether it has muted the channel.
    pub muted: bool,
}

impl FromRow<'_, PgRow> for MemberRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            agent_id: AgentId::new(row.try_get("agent_id")?),
            agent_name: row.try_get("agent_name")?,
            role: row.try_get("role")?,
            joined_at: row.try_get("joined_at")?,
            muted: row.try_get("muted")?,
        })
    }
}

/// A channel as one of its members sees it.
#[derive(Debug, Clone)]
pub struct Membership {
    /// The channel.
    pub channel_id: ChannelId,
    /// Its name.
    pub name: String,
    /// owner or member.
    pub role: String,
    /// Since when.
    pub joined_at: DateTime<Utc>,
}

impl FromRow<'_, PgRow> for Membership {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            channel_id: ChannelId::new(row.try_get("channel_id")?),
            name: row.try_get("name")?,
            role: row.try_get("role")?,
            joined_at: row.try_get("joined_at")?,
        })
    }
}

/// What became of joining.
#[derive(Debug)]
pub enum Joining {
    /// The agent is a member from now on.
    Joined(Recorded),
    /// It was one before.
    AlreadyMember,
    /// The channel is archived or gone, or the agent is.
    Refused,
}

impl Store {
    /// Makes an agent a member of a channel that is not archived. `event` is recorded if it was none.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn join_channel(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        agent: AgentId,
        at: DateTime<Utc>,
        event: NewEvent,
    ) -> StoreResult<Joining> {
        let doing = "joining a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The channel's row serialises joins with each other, with archiving and with deletions of agents.
        let open: Option<i64> = sqlx::query_scalar(
            "SELECT channel_id FROM channels
             WHERE workspace_id = $1 AND channel_id = $2 AND archived_at IS NULL FOR UPDATE",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if open.is_none() {
            return Ok(Joining::Refused);
        }
        // The share lock keeps the agent from being deleted before its membership is committed.
        let (alive, joined): (bool, bool) = sqlx::query_as(
            "WITH agent AS (
                SELECT agent_id FROM agents
                WHERE workspace_id = $1 AND agent_id = $3 AND deleted_at IS NULL FOR SHARE
             ), member AS (
                INSERT INTO channel_members (workspace_id, channel_id, agent_id, joined_at)
                SELECT $1, $2, agent_id, $4 FROM agent
                ON CONFLICT (workspace_id, channel_id, agent_id) DO NOTHING
                RETURNING agent_id
             ), bumped AS (
                UPDATE channels SET members_version = members_version + 1
                WHERE workspace_id = $1 AND channel_id = $2 AND EXISTS (SELECT FROM member)
             )
             SELECT EXISTS (SELECT FROM agent), EXISTS (SELECT FROM member)",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .bind(agent.get())
        .bind(at)
        .fetch_one(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if !joined {
            return Ok(if alive { Joining::AlreadyMember } else { Joining::Refused });
        }
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Joining::Joined(recorded))
    }

    /// Ends a membership and records `event`. `None` when there was none.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn leave_channel(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        agent: AgentId,
        at: DateTime<Utc>,
        event: NewEvent,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "leaving a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let left: Option<i64> = sqlx::query_scalar(
            "WITH locked AS (
                SELECT channel_id FROM channels WHERE workspace_id = $1 AND channel_id = $2 FOR UPDATE
             ), gone AS (
                DELETE FROM channel_members m USING locked
                WHERE m.workspace_id = $1 AND m.channel_id = locked.channel_id AND m.agent_id = $3
                RETURNING m.channel_id
             )
             UPDATE channels c SET members_version = members_version + 1 FROM gone
             WHERE c.workspace_id = $1 AND c.channel_id = gone.channel_id
             RETURNING c.channel_id",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .bind(agent.get())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if left.is_none() {
            return Ok(None);
        }
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }

    /// Mutes or unmutes a channel for one member; `event` is recorded if that is a change. `None` when the
    /// agent is no member.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn set_muted(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        agent: AgentId,
        muted: bool,
        at: DateTime<Utc>,
        event: NewEvent,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "muting a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let (member, changed): (bool, bool) = sqlx::query_as(
            "WITH locked AS (
                SELECT channel_id FROM channels WHERE workspace_id = $1 AND channel_id = $2 FOR UPDATE
             ), changed AS (
                UPDATE channel_members m SET muted = $4 FROM locked
                WHERE m.workspace_id = $1 AND m.channel_id = locked.channel_id AND m.agent_id = $3
                  AND m.muted <> $4
                RETURNING m.channel_id
             ), bumped AS (
                UPDATE channels c SET members_version = members_version + 1 FROM changed
                WHERE c.workspace_id = $1 AND c.channel_id = changed.channel_id
             )
             SELECT EXISTS (SELECT FROM channel_members
                            WHERE workspace_id = $1 AND channel_id = $2 AND agent_id = $3),
                    EXISTS (SELECT FROM changed)",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .bind(agent.get())
        .bind(muted)
        .fetch_one(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if !member {
            return Ok(None);
        }
        let events = if changed { vec![event] } else { Vec::new() };
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }

    /// Whether an agent is a member of a channel.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn is_member(&self, scope: WorkspaceScope, channel: ChannelId, agent: AgentId) -> StoreResult<bool> {
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM channel_members
                            WHERE workspace_id = $1 AND channel_id = $2 AND agent_id = $3)",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .bind(agent.get())
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for a member of a channel"))
    }

    /// The members of a channel in the order of joining, those that the filters let pass, at most
    /// [`names::MAX_LISTED_MEMBERS`].
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn channel_members(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<MemberRow>> {
        sqlx::query_as(
            "SELECT m.agent_id, a.name AS agent_name, m.role, m.joined_at, m.muted
             FROM channel_members m
             JOIN agents a ON a.workspace_id = m.workspace_id AND a.agent_id = m.agent_id AND a.deleted_at IS NULL
             WHERE m.workspace_id = $1 AND m.channel_id = $2
               AND ($4::bigint[] IS NULL OR m.agent_id = ANY ($4))
             ORDER BY m.joined_at, m.agent_id LIMIT $3",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .bind(names::MAX_LISTED_MEMBERS)
        .bind(filters::agent_ids(filters))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the members of a channel"))
    }

    /// The channels (not conversations) of an agent, oldest first, at most [`names::MAX_LISTED_CHANNELS`].
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn channels_of_agent(&self, scope: WorkspaceScope, agent: AgentId) -> StoreResult<Vec<Membership>> {
        sqlx::query_as(
            "SELECT c.channel_id, c.name, m.role, m.joined_at
             FROM channel_members m
             JOIN channels c ON c.workspace_id = m.workspace_id AND c.channel_id = m.channel_id
             WHERE m.workspace_id = $1 AND m.agent_id = $2 AND c.type = 0 AND c.archived_at IS NULL
             ORDER BY c.channel_id LIMIT $3",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .bind(names::MAX_LISTED_CHANNELS)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the channels of an agent"))
    }
}
