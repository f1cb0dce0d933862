//! Channels. Conversations (type 1 and 2) live in the same table and are not touched here.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, ChannelId, WorkspaceScope, names, observer::ObserverFilters, plan::Ceiling};
use serde_json::Value;
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    ceilings::is_within,
    events::{self, NewEvent, Recorded},
    filters,
};

/// A channel.
#[derive(Debug, Clone)]
pub struct ChannelRow {
    /// Its id.
    pub channel_id: ChannelId,
    /// Its name.
    pub name: String,
    /// What it is about.
    pub topic: Option<String>,
    /// What clients keep there.
    pub metadata: Value,
    /// The agent that made it.
    pub created_by: Option<AgentId>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// Since when it takes no more messages.
    pub archived_at: Option<DateTime<Utc>>,
    /// How many members it has.
    pub member_count: i64,
}

impl FromRow<'_, PgRow> for ChannelRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            channel_id: ChannelId::new(row.try_get("channel_id")?),
            name: row.try_get("name")?,
            topic: row.try_get("topic")?,
            metadata: row.try_get("metadata")?,
            created_by: row.try_get::<Option<i64>, _>("created_by")?.map(AgentId::new),
            created_at: row.try_get("created_at")?,
            archived_at: row.try_get("archived_at")?,
            member_count: row.try_get("member_count")?,
        })
    }
}

/// A channel to be made.
#[derive(Debug)]
pub struct NewChannel<'a> {
    /// Its id.
    pub channel_id: ChannelId,
    /// Its name.
    pub name: &'a str,
    /// What it is about.
    pub topic: Option<&'a str>,
    /// What clients keep there.
    pub metadata: &'a Value,
    /// The agent that makes it and becomes its owner. A workspace's key makes a channel without members.
    pub created_by: Option<AgentId>,
    /// When.
    pub at: DateTime<Utc>,
    /// How many channels the workspace may have.
    pub ceiling: Option<i64>,
}

/// What became of making a channel.
#[derive(Debug)]
pub enum ChannelCreation {
    /// It exists, and its event is recorded.
    Made(Recorded),
    /// The name is taken.
    NameTaken,
    /// The workspace has as many as it may.
    NoRoom,
}

macro_rules! columns {
    () => {
        "c.channel_id, c.name, c.topic, c.metadata, c.created_by, c.created_at, c.archived_at,
         (SELECT count(*) FROM channel_members m
          WHERE m.workspace_id = c.workspace_id AND m.channel_id = c.channel_id) AS member_count"
    };
}

impl Store {
    /// Makes a channel and records `event`.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn create_channel(
        &self,
        scope: WorkspaceScope,
        new: &NewChannel<'_>,
        event: NewEvent,
    ) -> StoreResult<ChannelCreation> {
        let doing = "creating a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let made: Option<i64> = sqlx::query_scalar(
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
        .bind(scope.workspace_id().get())
        .bind(new.channel_id.get())
        .bind(new.name)
        .bind(new.topic)
        .bind(new.metadata)
        .bind(new.created_by.map(AgentId::get))
        .bind(new.at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if made.is_none() {
            return Ok(ChannelCreation::NameTaken);
        }
        if !is_within(&mut tx, scope, Ceiling::Channels, new.ceiling).await? {
            return Ok(ChannelCreation::NoRoom);
        }
        let recorded = events::append(&mut tx, scope, new.at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(ChannelCreation::Made(recorded))
    }

    /// The channel of that name, archived or not.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn channel_by_name(&self, scope: WorkspaceScope, name: &str) -> StoreResult<Option<ChannelRow>> {
        sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM channels c WHERE c.workspace_id = $1 AND c.name = $2 AND c.type = 0"
        ))
        .bind(scope.workspace_id().get())
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking up a channel by name"))
    }

    /// Channels by age, those that the filters let pass, at most [`names::MAX_LISTED_CHANNELS`].
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn channels(
        &self,
        scope: WorkspaceScope,
        with_archived: bool,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<ChannelRow>> {
        sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM channels c WHERE c.workspace_id = $1 AND c.type = 0 AND ($2 OR c.archived_at IS NULL)
               AND ($4::bigint[] IS NULL AND $5::text[] IS NULL OR c.channel_id = ANY ($4) OR c.name = ANY ($5))
             ORDER BY c.channel_id LIMIT $3"
        ))
        .bind(scope.workspace_id().get())
        .bind(with_archived)
        .bind(names::MAX_LISTED_CHANNELS)
        .bind(filters::channel_ids(filters))
        .bind(&filters.channel_names)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing channels"))
    }

    /// Changes what is given of a channel that is not archived, and records what `event` makes of it. `None`
    /// when there is no such channel.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn update_channel(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        topic: Option<Option<&str>>,
        metadata: Option<&Value>,
        at: DateTime<Utc>,
        event: impl FnOnce(&ChannelRow) -> NewEvent + Send,
    ) -> StoreResult<Option<(ChannelRow, Recorded)>> {
        let doing = "updating a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let changed: Option<ChannelRow> = sqlx::query_as(concat!(
            "UPDATE channels c SET
                topic = CASE WHEN $3 THEN $4 ELSE topic END,
                metadata = coalesce($5, metadata)
             WHERE c.workspace_id = $1 AND c.channel_id = $2 AND c.type = 0 AND c.archived_at IS NULL
             RETURNING ",
            columns!()
        ))
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .bind(topic.is_some())
        .bind(topic.flatten())
        .bind(metadata)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(changed) = changed else { return Ok(None) };
        let recorded = events::append(&mut tx, scope, at, vec![event(&changed)]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some((changed, recorded)))
    }

    /// Archives a channel and records `event`; again is fine. Raises `members_version`, which sends rely on.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn archive_channel(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        at: DateTime<Utc>,
        event: NewEvent,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "archiving a channel";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let archived = sqlx::query(
            "UPDATE channels SET archived_at = $3, members_version = members_version + 1
             WHERE workspace_id = $1 AND channel_id = $2 AND type = 0 AND archived_at IS NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.get())
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
