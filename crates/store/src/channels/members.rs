//! Members of channels and their mutes.
//!
//! Every change raises the channel's `members_version` in the same transaction: a send that was resolved from the
//! members before the change does not commit.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, ChannelId, WorkspaceScope, channels::Member, names, observers::ObserverFilters};

use crate::{
    Store, StoreError, StoreResult,
    decode::decode_rows,
    events::{self, Event, RecordedEvents},
    observers::filters,
};

#[derive(Debug, Clone, Copy)]
pub struct MemberKey {
    /// Channel, or the backing channel of a conversation.
    pub channel: ChannelId,
    pub agent: AgentId,
}

#[derive(Debug)]
pub enum JoinOutcome {
    Joined(RecordedEvents),
    AlreadyMember,
    /// The channel is archived or does not exist, or the agent is deleted.
    Refused,
}

impl Store {
    /// Makes an agent a member of a channel or group that is not archived. Records `event` for a new member.
    pub async fn join_channel(
        &self,
        scope: WorkspaceScope,
        member: MemberKey,
        at: DateTime<Utc>,
        event: Event,
    ) -> StoreResult<JoinOutcome> {
        let doing = "joining a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The channel's row serialises joins with each other, with archiving and with deletions of agents.
        let open: Option<ChannelId> = sqlx::query_scalar(
            "SELECT channel_id FROM channels
             WHERE workspace_id = $1 AND channel_id = $2 AND archived_at IS NULL FOR UPDATE",
        )
        .bind(scope.workspace_id())
        .bind(member.channel)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if open.is_none() {
            return Ok(JoinOutcome::Refused);
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
        .bind(scope.workspace_id())
        .bind(member.channel)
        .bind(member.agent)
        .bind(at)
        .fetch_one(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // Nothing was written, so the transaction is dropped without a commit.
        if !joined {
            return Ok(if alive { JoinOutcome::AlreadyMember } else { JoinOutcome::Refused });
        }
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(JoinOutcome::Joined(recorded))
    }

    /// Ends a membership and records `event`. `None` for an agent that is not a member.
    pub async fn leave_channel(
        &self,
        scope: WorkspaceScope,
        member: MemberKey,
        at: DateTime<Utc>,
        event: Event,
    ) -> StoreResult<Option<RecordedEvents>> {
        let doing = "leaving a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The channel is locked before the membership, as in a join; the other order could deadlock with it.
        let left: Option<ChannelId> = sqlx::query_scalar(
            "WITH locked AS (
                SELECT channel_id FROM channels WHERE workspace_id = $1 AND channel_id = $2 FOR UPDATE
             ), removed AS (
                DELETE FROM channel_members m USING locked
                WHERE m.workspace_id = $1 AND m.channel_id = locked.channel_id AND m.agent_id = $3
                RETURNING m.channel_id
             )
             UPDATE channels c SET members_version = members_version + 1 FROM removed
             WHERE c.workspace_id = $1 AND c.channel_id = removed.channel_id
             RETURNING c.channel_id",
        )
        .bind(scope.workspace_id())
        .bind(member.channel)
        .bind(member.agent)
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

    /// Mutes or unmutes a channel for one member, and records `event` if that is a change. `None` for an agent
    /// that is not a member.
    pub async fn set_muted(
        &self,
        scope: WorkspaceScope,
        member: MemberKey,
        muted: bool,
        at: DateTime<Utc>,
        event: Event,
    ) -> StoreResult<Option<RecordedEvents>> {
        let doing = "muting a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The final SELECT sees the rows from before the update, which is enough: muting adds no member.
        let (is_member, changed): (bool, bool) = sqlx::query_as(
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
        .bind(scope.workspace_id())
        .bind(member.channel)
        .bind(member.agent)
        .bind(muted)
        .fetch_one(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if !is_member {
            return Ok(None);
        }
        let events = if changed { vec![event] } else { Vec::new() };
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }

    /// Returns true if the agent is a member of the channel.
    pub async fn is_member(&self, scope: WorkspaceScope, channel: ChannelId, agent: AgentId) -> StoreResult<bool> {
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM channel_members
                            WHERE workspace_id = $1 AND channel_id = $2 AND agent_id = $3)",
        )
        .bind(scope.workspace_id())
        .bind(channel)
        .bind(agent)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for a member of a channel"))
    }

    /// Lists the members of a channel that pass the filters, in the order of joining, at most
    /// [`names::MAX_LISTED_MEMBERS`].
    pub async fn channel_members(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<Member>> {
        let rows = sqlx::query(
            "SELECT m.agent_id, a.name AS agent_name, m.role, m.joined_at, m.muted
             FROM channel_members m
             JOIN agents a ON a.workspace_id = m.workspace_id AND a.agent_id = m.agent_id AND a.deleted_at IS NULL
             WHERE m.workspace_id = $1 AND m.channel_id = $2
               AND ($4::bigint[] IS NULL OR m.agent_id = ANY ($4))
             ORDER BY m.joined_at, m.agent_id LIMIT $3",
        )
        .bind(scope.workspace_id())
        .bind(channel)
        .bind(names::MAX_LISTED_MEMBERS)
        .bind(filters::agent_ids(filters))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the members of a channel"))?;
        decode_rows("channel_members", &rows)
    }
}
