//! Direct-message conversations: channels of type 1 (two agents) and 2 (a group).

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, ChannelId, ConversationId, WorkspaceScope, conversation::MAX_UNREAD};
use serde_json::Value;
use sqlx::{FromRow as _, PgTransaction};

use crate::{
    Store, StoreError, StoreResult,
    events::{self, NewEvent, Recorded},
    read_state::acked_in_channels,
};

/// A conversation.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ConversationRow {
    /// The backing channel.
    pub channel_id: i64,
    /// The backing channel's name.
    pub name: String,
    /// 1 one-to-one, 2 group.
    #[sqlx(rename = "type")]
    pub channel_type: i16,
    /// What clients call it.
    pub conversation_id: String,
    /// A group's own name.
    pub title: Option<String>,
    /// Rises with every change of membership.
    pub members_version: i64,
    /// When it began.
    pub created_at: DateTime<Utc>,
}

/// A conversation in an agent's list.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ListedConversation {
    /// The conversation.
    #[sqlx(flatten)]
    pub conversation: ConversationRow,
    /// Who takes part, by agent id; names in the same order.
    pub participant_ids: Vec<i64>,
    /// Their names.
    pub participant_names: Vec<String>,
    /// The newest message, if there is one; the same for the rest.
    pub last_message_id: Option<i64>,
    /// Its author.
    pub last_agent_id: Option<i64>,
    /// The author's name.
    pub last_agent_name: Option<String>,
    /// The author's type.
    pub last_agent_type: Option<String>,
    /// Its text.
    pub last_text: Option<String>,
    /// When it was accepted.
    pub last_created_at: Option<DateTime<Utc>>,
    /// Messages of others that the agent has neither read nor acknowledged.
    pub unread_count: i64,
}

/// A conversation to be made.
#[derive(Debug, Clone)]
pub struct NewConversation<'a> {
    /// The backing channel, if it is to be made.
    pub channel: ChannelId,
    /// The backing channel's name.
    pub channel_name: &'a str,
    /// 1 one-to-one, 2 group.
    pub channel_type: i16,
    /// What clients call it.
    pub conversation: &'a ConversationId,
    /// A group's own name.
    pub title: Option<&'a str>,
    /// Who began it.
    pub created_by: AgentId,
    /// Everyone who takes part.
    pub members: &'a [AgentId],
    /// The idempotency key that its creation is kept under, with the answer.
    pub key: Option<KeptAnswer<'a>>,
}

/// An answer to be kept under an idempotency key.
#[derive(Debug, Clone)]
pub struct KeptAnswer<'a> {
    /// What the key is stored as.
    pub key_hash: [u8; 32],
    /// SHA-256 of the request body.
    pub fingerprint: [u8; 32],
    /// The answer's `data`.
    pub response: &'a Value,
}

/// What became of opening a conversation.
#[derive(Debug, Clone)]
pub enum OpenOutcome {
    /// It is there, with all members in it.
    Open(ConversationRow),
    /// The key was used before; nothing was done.
    KeyUsed,
}

const GET: &str = "SELECT channel_id, name, type, conversation_id, title, members_version, created_at FROM channels \
                   WHERE workspace_id = $1 AND conversation_id = $2";

impl Store {
    /// A conversation by what clients call it.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn conversation(
        &self,
        scope: WorkspaceScope,
        conversation: &str,
    ) -> StoreResult<Option<ConversationRow>> {
        sqlx::query_as(GET)
            .bind(scope.workspace_id().get())
            .bind(conversation)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a conversation"))
    }

    /// Makes a conversation, or finds the one that is there, with all of `members` in it.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn open_conversation(
        &self,
        scope: WorkspaceScope,
        new: &NewConversation<'_>,
    ) -> StoreResult<OpenOutcome> {
        let doing = "opening a conversation";
        let workspace = scope.workspace_id().get();
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if let Some(key) = &new.key
            && !keep_answer(&mut tx, scope, key).await?
        {
            return Ok(OpenOutcome::KeyUsed);
        }
        sqlx::query(
            "INSERT INTO channels (workspace_id, channel_id, name, type, conversation_id, title, created_by, created_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, now())
             ON CONFLICT DO NOTHING",
        )
        .bind(workspace)
        .bind(new.channel.get())
        .bind(new.channel_name)
        .bind(new.channel_type)
        .bind(new.conversation.as_str())
        .bind(new.title)
        .bind(new.created_by.get())
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // Whoever made it: the row is there now, and locked so that the members and their version agree.
        let row = sqlx::query(
            "SELECT channel_id, name, type, conversation_id, title, members_version, created_at FROM channels
              WHERE workspace_id = $1 AND conversation_id = $2 FOR UPDATE",
        )
        .bind(workspace)
        .bind(new.conversation.as_str())
        .fetch_one(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let mut conversation = ConversationRow::from_row(&row).map_err(StoreError::from_sqlx(doing))?;
        let channel = ChannelId::new(conversation.channel_id);
        if add_members(&mut tx, scope, channel, new.members, Some(new.created_by)).await? {
            conversation.members_version += 1;
        }
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(OpenOutcome::Open(conversation))
    }

    /// Lets an agent take part, and records `event`. `None` when it did already.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn add_participant(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        agent: AgentId,
        at: DateTime<Utc>,
        event: NewEvent,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "adding a participant";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if !add_members(&mut tx, scope, channel, &[agent], None).await? {
            return Ok(None);
        }
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }

    /// Ends an agent's part, and records `event`. `None` when it took none.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn remove_participant(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        agent: AgentId,
        at: DateTime<Utc>,
        event: NewEvent,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "removing a participant";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let removed = sqlx::query(
            "WITH removed AS (
                DELETE FROM channel_members WHERE workspace_id = $1 AND channel_id = $2 AND agent_id = $3
                RETURNING channel_id)
             UPDATE channels SET members_version = members_version + 1
              WHERE workspace_id = $1 AND channel_id IN (SELECT channel_id FROM removed)",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .bind(agent.get())
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if removed.rows_affected() == 0 {
            return Ok(None);
        }
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }

    /// How many take part in a conversation.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn participant_count(&self, scope: WorkspaceScope, channel: ChannelId) -> StoreResult<i64> {
        sqlx::query_scalar("SELECT count(*) FROM channel_members WHERE workspace_id = $1 AND channel_id = $2")
            .bind(scope.workspace_id().get())
            .bind(channel.get())
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("counting participants"))
    }

    /// The conversations of an agent, the liveliest first.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn conversations(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        limit: i64,
    ) -> StoreResult<Vec<ListedConversation>> {
        sqlx::query_as(concat!(
            "WITH acked AS MATERIALIZED (",
            acked_in_channels!("$2"),
            "), mine AS (
                SELECT c.*, greatest(coalesce(cm.last_read_id, 0), coalesce(acked.read_id, 0)) AS read_id,
                       l.message_id AS last_message_id, l.agent_id AS last_agent_id,
                       l.agent_name AS last_agent_name, l.agent_type AS last_agent_type, l.text AS last_text,
                       l.created_at AS last_created_at
                  FROM channel_members cm
                  JOIN channels c ON c.workspace_id = cm.workspace_id AND c.channel_id = cm.channel_id
                  LEFT JOIN acked ON acked.channel_id = cm.channel_id
                  LEFT JOIN LATERAL (
                       SELECT m.* FROM messages m
                        WHERE m.workspace_id = c.workspace_id AND m.channel_id = c.channel_id
                          AND m.thread_id IS NULL
                        ORDER BY m.message_id DESC LIMIT 1) l ON true
                 WHERE cm.workspace_id = $1 AND cm.agent_id = $2 AND c.type IN (1, 2)
                 ORDER BY coalesce(l.message_id, c.channel_id) DESC
                 LIMIT $3)
             SELECT mine.*, p.ids AS participant_ids, p.names AS participant_names,
                    (SELECT least(count(*), $4) FROM (
                        SELECT agent_id FROM messages m
                         WHERE m.workspace_id = $1 AND m.channel_id = mine.channel_id AND m.thread_id IS NULL
                           AND m.message_id > mine.read_id
                           AND m.created_on >= DATE '2025-01-01' + ((mine.read_id >> 22) / 86400000)::integer
                         ORDER BY m.message_id DESC
                         LIMIT 2 * $4) above WHERE above.agent_id <> $2) AS unread_count
               FROM mine
               CROSS JOIN LATERAL (
                    SELECT coalesce(array_agg(a.agent_id ORDER BY a.name), '{}') AS ids,
                           coalesce(array_agg(a.name ORDER BY a.name), '{}') AS names
                      FROM channel_members o
                      JOIN agents a ON a.workspace_id = o.workspace_id AND a.agent_id = o.agent_id
                     WHERE o.workspace_id = $1 AND o.channel_id = mine.channel_id) p
              ORDER BY coalesce(mine.last_message_id, mine.channel_id) DESC",
        ))
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .bind(limit)
        .bind(MAX_UNREAD)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing conversations"))
    }

    /// The ids of agents by name; names without an agent are left out.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn agent_ids(&self, scope: WorkspaceScope, names: &[String]) -> StoreResult<Vec<(String, AgentId)>> {
        sqlx::query_as(
            "SELECT name, agent_id FROM agents
              WHERE workspace_id = $1 AND name = ANY($2) AND deleted_at IS NULL ORDER BY agent_id",
        )
        .bind(scope.workspace_id().get())
        .bind(names)
        .fetch_all(&self.pool)
        .await
        .map(|rows: Vec<(String, i64)>| rows.into_iter().map(|(name, id)| (name, AgentId::new(id))).collect())
        .map_err(StoreError::from_sqlx("looking up agents by name"))
    }
}

/// Adds whoever is not a member yet, and raises the members' version if that was anybody.
async fn add_members(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    channel: ChannelId,
    agents: &[AgentId],
    owner: Option<AgentId>,
) -> StoreResult<bool> {
    let doing = "adding members to a conversation";
    let ids: Vec<i64> = agents.iter().map(|agent| agent.get()).collect();
    let added = sqlx::query(
        "INSERT INTO channel_members (workspace_id, channel_id, agent_id, role, joined_at)
         SELECT $1, $2, id, CASE WHEN id = $4 THEN 'owner' ELSE 'member' END, now()
           FROM unnest($3::bigint[]) AS id ORDER BY id
         ON CONFLICT DO NOTHING",
    )
    .bind(scope.workspace_id().get())
    .bind(channel.get())
    .bind(&ids)
    .bind(owner.map(AgentId::get))
    .execute(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?
    .rows_affected();
    if added > 0 {
        sqlx::query(
            "UPDATE channels SET members_version = members_version + 1 WHERE workspace_id = $1 AND channel_id = $2",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .execute(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    }
    Ok(added > 0)
}

/// Writes an answer under its key, over one older than a day. `false` when the key is in use.
async fn keep_answer(tx: &mut PgTransaction<'_>, scope: WorkspaceScope, key: &KeptAnswer<'_>) -> StoreResult<bool> {
    let kept = sqlx::query(
        "INSERT INTO idempotency_keys AS k (workspace_id, key_hash, fingerprint, status, response, created_at)
         VALUES ($1, $2, $3, 201, $4, now())
         ON CONFLICT (workspace_id, key_hash) DO UPDATE
            SET fingerprint = excluded.fingerprint, status = excluded.status, response = excluded.response,
                created_at = excluded.created_at
          WHERE k.created_at < now() - interval '24 hours'",
    )
    .bind(scope.workspace_id().get())
    .bind(&key.key_hash[..])
    .bind(&key.fingerprint[..])
    .bind(key.response)
    .execute(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("keeping an answer under its idempotency key"))?;
    Ok(kept.rows_affected() == 1)
}
