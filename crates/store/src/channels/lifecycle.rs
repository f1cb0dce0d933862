//! Creation, lookup, changes and archiving of channels. Conversations share the table and are excluded here by type.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, ChannelId, WorkspaceScope, channels::Channel, names, observers::ObserverFilters, workspaces::plan::Quota,
};
use serde_json::Value;

use crate::{
    Store, StoreError, StoreResult,
    codes::CHANNEL,
    events::{self, Event, RecordedEvents},
    observers::filters,
    sizes::CHANNEL_BYTES,
    workspaces::quota_counts::is_within_quota,
};

#[derive(Debug)]
pub struct NewChannel<'a> {
    pub channel_id: ChannelId,
    pub name: &'a str,
    pub topic: Option<&'a str>,
    /// JSON object of the client.
    pub metadata: &'a Value,
    /// Becomes the owner. `None` for the workspace's key, which creates a channel without members.
    pub created_by: Option<AgentId>,
    pub at: DateTime<Utc>,
    /// Maximum number of channels in the workspace.
    pub quota: Option<i64>,
}

/// Changes to a channel. `None` leaves a field as it is.
#[derive(Debug, Clone, Copy)]
pub struct ChannelUpdate<'a> {
    pub channel: ChannelId,
    /// `Some(None)` clears it.
    pub topic: Option<Option<&'a str>>,
    pub metadata: Option<&'a Value>,
}

/// Outcome of creating a channel.
#[derive(Debug)]
pub enum ChannelCreation {
    Created(RecordedEvents),
    /// Another channel has the name.
    NameTaken,
    /// The workspace has as many channels as its quota allows.
    QuotaReached,
}

const COLUMNS: &str = "c.channel_id, c.name, c.topic, c.metadata, c.created_by, c.created_at, c.archived_at,
    (SELECT count(*) FROM channel_members m
      WHERE m.workspace_id = c.workspace_id AND m.channel_id = c.channel_id) AS member_count";

const FIND_BY_NAME: &str =
    formatcp!("SELECT {COLUMNS} FROM channels c WHERE c.workspace_id = $1 AND c.name = $2 AND c.type = {CHANNEL}");

const LIST: &str = formatcp!(
    "SELECT c.channel_id, {CHANNEL_BYTES}::bigint
       FROM channels c
      WHERE c.workspace_id = $1 AND c.type = {CHANNEL} AND ($2 OR c.archived_at IS NULL)
        AND ($4::bigint[] IS NULL AND $5::text[] IS NULL OR c.channel_id = ANY ($4) OR c.name = ANY ($5))
      ORDER BY c.channel_id LIMIT $3"
);

// $3 tells a topic that is cleared from one that stays.
const UPDATE: &str = formatcp!(
    "UPDATE channels c
        SET topic = CASE WHEN $3 THEN $4 ELSE topic END, metadata = coalesce($5, metadata)
      WHERE c.workspace_id = $1 AND c.channel_id = $2 AND c.type = {CHANNEL} AND c.archived_at IS NULL
     RETURNING {COLUMNS}"
);

const ARCHIVE: &str = formatcp!(
    "UPDATE channels SET archived_at = $3, members_version = members_version + 1
      WHERE workspace_id = $1 AND channel_id = $2 AND type = {CHANNEL} AND archived_at IS NULL"
);

impl Store {
    /// Creates a channel and records `event`.
    pub async fn create_channel(
        &self,
        scope: WorkspaceScope,
        new: &NewChannel<'_>,
        event: Event,
    ) -> StoreResult<ChannelCreation> {
        let doing = "creating a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The unique name decides between two concurrent creations; the second one waits for the first to commit.
        let created: Option<ChannelId> = sqlx::query_scalar(
            "WITH channel AS (
                INSERT INTO channels (workspace_id, channel_id, name, topic, metadata, created_by, created_at)
                VALUES ($1, $2, $3, $4, $5, $6, $7)
                ON CONFLICT (workspace_id, name) DO NOTHING
                RETURNING channel_id
             ), owner AS (
                INSERT INTO channel_members (workspace_id, channel_id, agent_id, role, joined_at)
                SELECT $1, channel_id, $6, 'owner', $7 FROM channel WHERE $6 IS NOT NULL
             )
             SELECT channel_id FROM channel",
        )
        .bind(scope.workspace_id())
        .bind(new.channel_id)
        .bind(new.name)
        .bind(new.topic)
        .bind(new.metadata)
        .bind(new.created_by)
        .bind(new.at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if created.is_none() {
            return Ok(ChannelCreation::NameTaken);
        }
        // The count includes the new row: a drop of the transaction rolls it back.
        if !is_within_quota(&mut tx, scope, Quota::Channels, new.quota).await? {
            return Ok(ChannelCreation::QuotaReached);
        }
        let recorded = events::append(&mut tx, scope, new.at, vec![event]).await?;
        // A retry after an unknown outcome would report the own channel's name as taken, so it must not be retried.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(ChannelCreation::Created(recorded))
    }

    /// Finds a channel by name, archived or not.
    pub async fn channel_by_name(&self, scope: WorkspaceScope, name: &str) -> StoreResult<Option<Channel>> {
        sqlx::query_as(FIND_BY_NAME)
            .bind(scope.workspace_id())
            .bind(name)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("looking up a channel by name"))
    }

    /// Lists the channels that pass the filters, oldest first, at most [`names::MAX_LISTED_CHANNELS`], with an upper
    /// bound of their bytes.
    pub async fn channel_sizes(
        &self,
        scope: WorkspaceScope,
        with_archived: bool,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<(ChannelId, usize)>> {
        let rows: Vec<(ChannelId, i64)> = sqlx::query_as(LIST)
            .bind(scope.workspace_id())
            .bind(with_archived)
            .bind(names::MAX_LISTED_CHANNELS)
            .bind(filters::channel_ids(filters))
            .bind(&filters.channel_names)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing channels"))?;
        Ok(rows.into_iter().map(|(channel, bytes)| (channel, usize::try_from(bytes).unwrap_or(usize::MAX))).collect())
    }

    /// Reads these channels, oldest first.
    pub async fn channels(&self, scope: WorkspaceScope, channels: &[ChannelId]) -> StoreResult<Vec<Channel>> {
        const READ: &str = formatcp!(
            "SELECT {COLUMNS} FROM channels c WHERE c.workspace_id = $1 AND c.channel_id = ANY ($2)
              ORDER BY c.channel_id"
        );
        sqlx::query_as(READ)
            .bind(scope.workspace_id())
            .bind(channels)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading channels"))
    }

    /// Changes the given fields of a channel that is not archived, and records the event that `event` makes of the
    /// changed channel. `None` without such a channel.
    pub async fn update_channel(
        &self,
        scope: WorkspaceScope,
        change: ChannelUpdate<'_>,
        at: DateTime<Utc>,
        event: impl FnOnce(&Channel) -> Event + Send,
    ) -> StoreResult<Option<(Channel, RecordedEvents)>> {
        let doing = "updating a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let changed: Option<Channel> = sqlx::query_as(UPDATE)
            .bind(scope.workspace_id())
            .bind(change.channel)
            .bind(change.topic.is_some())
            .bind(change.topic.flatten())
            .bind(change.metadata)
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let Some(changed) = changed else { return Ok(None) };
        let recorded = events::append(&mut tx, scope, at, vec![event(&changed)]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some((changed, recorded)))
    }

    /// Archives a channel and records `event`. `None` for a channel that is archived already. Raises
    /// `members_version`, so that sends resolved before the archiving do not commit.
    pub async fn archive_channel(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        at: DateTime<Utc>,
        event: Event,
    ) -> StoreResult<Option<RecordedEvents>> {
        let doing = "archiving a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let archived = sqlx::query(ARCHIVE)
            .bind(scope.workspace_id())
            .bind(channel)
            .bind(at)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        if archived.rows_affected() == 0 {
            return Ok(None);
        }
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }
}
