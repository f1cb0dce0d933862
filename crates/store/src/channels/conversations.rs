//! Direct-message conversations, one-to-one and group, which are stored as channels of their own types. Called by
//! the engine's conversations.

use const_format::concatcp;
use relay_domain::{
    AgentId, ChannelId, ConversationId, WorkspaceScope,
    channels::{ChannelKind, Conversation, LastMessage, ListedConversation, MAX_UNREAD},
};
use serde_json::Value;
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    access::idempotency::{IdempotencyKey, claim_key},
    codes::CHANNEL,
    connections::Transaction,
    decode::decode_row,
    messages::{contents::decode_sized, read_state::ACKED_IN_CHANNELS},
};

struct ListedConversationRow(ListedConversation);

impl FromRow<'_, PgRow> for ListedConversationRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(ListedConversation {
            conversation: Conversation::from_row(row)?,
            participant_ids: row.try_get("participant_ids")?,
            participant_names: row.try_get("participant_names")?,
            last_message: decode_last_message(row)?,
            unread_count: row.try_get("unread_count")?,
        }))
    }
}

/// Decodes the `last_` columns, which are null in an empty conversation.
pub(crate) fn decode_last_message(row: &PgRow) -> sqlx::Result<Option<LastMessage>> {
    let Some(message_id) = row.try_get("last_message_id")? else { return Ok(None) };
    Ok(Some(LastMessage {
        message_id,
        agent_id: row.try_get("last_agent_id")?,
        agent_name: row.try_get("last_agent_name")?,
        agent_kind: row.try_get("last_agent_type")?,
        text: String::new(),
        created_at: row.try_get("last_created_at")?,
    }))
}

/// A conversation to open.
#[derive(Debug, Clone)]
pub struct NewConversation<'a> {
    /// Id of the backing channel, if it has to be created.
    pub channel: ChannelId,
    /// Name of the backing channel.
    pub channel_name: &'a str,
    pub channel_kind: ChannelKind,
    pub conversation: &'a ConversationId,
    /// Name of a group.
    pub title: Option<&'a str>,
    pub created_by: AgentId,
    /// All participants, `created_by` included.
    pub members: &'a [AgentId],
    /// Idempotency key of the request, with the response to store.
    pub key: Option<(IdempotencyKey, &'a Value)>,
}

#[derive(Debug, Clone)]
pub enum OpenOutcome {
    /// Exists with all members.
    Open(Conversation),
    /// The idempotency key was used before; nothing was written.
    KeyUsed,
}

const GET: &str = "SELECT channel_id, name, type, conversation_id, title, members_version, created_at FROM channels \
                   WHERE workspace_id = $1 AND conversation_id = $2";
const LOCK: &str = concatcp!(GET, " FOR UPDATE");

// `mine` is limited before participants and unread messages are read, so that their cost has a bound. A conversation
// without messages sorts by its own id, which is as old as the conversation. The day in the unread count follows from
// the read position and keeps the scan out of older partitions.
// 2025-01-01 is the epoch of the ids.
const LIST: &str = concatcp!(
    "WITH acked AS MATERIALIZED (",
    ACKED_IN_CHANNELS,
    "), mine AS (
        SELECT c.*, greatest(coalesce(cm.last_read_id, 0), coalesce(acked.read_id, 0)) AS read_id,
               l.message_id AS last_message_id, l.agent_id AS last_agent_id,
               l.agent_name AS last_agent_name, l.agent_type AS last_agent_type, octet_length(l.text)::bigint AS content_bytes,
               l.created_at AS last_created_at
          FROM channel_members cm
          JOIN channels c ON c.workspace_id = cm.workspace_id AND c.channel_id = cm.channel_id
          LEFT JOIN acked ON acked.channel_id = cm.channel_id
          LEFT JOIN LATERAL (
               SELECT m.* FROM messages m
                WHERE m.workspace_id = c.workspace_id AND m.channel_id = c.channel_id
                  AND m.thread_id IS NULL
                ORDER BY m.message_id DESC LIMIT 1) l ON true
         WHERE cm.workspace_id = $1 AND cm.agent_id = $2 AND c.type <> ",
    CHANNEL,
    "
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
      ORDER BY coalesce(mine.last_message_id, mine.channel_id) DESC"
);

impl Store {
    /// Reads a conversation by its public id.
    pub async fn conversation(&self, scope: WorkspaceScope, conversation: &str) -> StoreResult<Option<Conversation>> {
        let row = sqlx::query(GET)
            .bind(scope.workspace_id())
            .bind(conversation)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a conversation"))?;
        row.map(|row| decode_row("channels", &row)).transpose()
    }

    /// Creates a conversation or finds the existing one, and adds the `members` that are missing.
    pub async fn open_conversation(
        &self,
        scope: WorkspaceScope,
        new: &NewConversation<'_>,
    ) -> StoreResult<OpenOutcome> {
        let doing = "opening a conversation";
        let workspace = scope.workspace_id();
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // First, because a concurrent request with the same key waits here and then sees the stored response.
        if let Some((key, response)) = &new.key
            && !claim_key(&mut tx, workspace, key, response).await?
        {
            return Ok(OpenOutcome::KeyUsed);
        }
        sqlx::query(
            "INSERT INTO channels (workspace_id, channel_id, name, type, conversation_id, title, created_by, created_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, relay_now())
             ON CONFLICT DO NOTHING",
        )
        .bind(workspace)
        .bind(new.channel)
        .bind(new.channel_name)
        .bind(new.channel_kind)
        .bind(new.conversation)
        .bind(new.title)
        .bind(new.created_by)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // The row exists now, created here or by a concurrent caller. Its lock serialises changes of members, so
        // that members and version agree.
        let row = sqlx::query(LOCK)
            .bind(workspace)
            .bind(new.conversation)
            .fetch_one(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let mut conversation: Conversation = decode_row("channels", &row)?;
        if add_members(&mut tx, scope, conversation.channel_id, new).await? {
            // The row was read before the version was raised.
            conversation.members_version += 1;
        }
        // A group without a key is created once more by a retry, so the caller must learn of an unknown outcome.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(OpenOutcome::Open(conversation))
    }

    /// Counts the participants of a conversation.
    pub async fn participant_count(&self, scope: WorkspaceScope, channel: ChannelId) -> StoreResult<i64> {
        sqlx::query_scalar("SELECT count(*) FROM channel_members WHERE workspace_id = $1 AND channel_id = $2")
            .bind(scope.workspace_id())
            .bind(channel)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("counting participants"))
    }

    /// Lists the conversations of an agent, those with the newest messages first, without the texts of these, and the
    /// bytes of the texts.
    ///
    /// Deliveries that are acked but not folded yet count as read. The unread count reads at most twice
    /// [`MAX_UNREAD`] messages above the read position, because the agent's own messages are not counted.
    pub async fn conversations(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        limit: i64,
    ) -> StoreResult<Vec<(ListedConversation, usize)>> {
        let rows = sqlx::query(LIST)
            .bind(scope.workspace_id())
            .bind(agent)
            .bind(limit)
            .bind(MAX_UNREAD)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing conversations"))?;
        let listed = decode_sized::<ListedConversationRow>("channels", &rows)?;
        Ok(listed.into_iter().map(|(row, bytes)| (row.0, bytes)).collect())
    }

    /// Finds the ids of agents by name; unknown names are left out.
    pub async fn agent_ids(&self, scope: WorkspaceScope, names: &[String]) -> StoreResult<Vec<(String, AgentId)>> {
        sqlx::query_as(
            "SELECT name, agent_id FROM agents
              WHERE workspace_id = $1 AND name = ANY($2) AND deleted_at IS NULL ORDER BY agent_id",
        )
        .bind(scope.workspace_id())
        .bind(names)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking up agents by name"))
    }
}

/// Adds the participants that are not members yet. Raises `members_version` and returns true if any was added. Rows are
/// inserted in id order, so that concurrent calls do not deadlock.
async fn add_members(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    channel: ChannelId,
    new: &NewConversation<'_>,
) -> StoreResult<bool> {
    let doing = "adding members to a conversation";
    let added = sqlx::query(
        "INSERT INTO channel_members (workspace_id, channel_id, agent_id, role, joined_at)
         SELECT $1, $2, id, CASE WHEN id = $4 THEN 'owner' ELSE 'member' END, relay_now()
           FROM unnest($3::bigint[]) AS id ORDER BY id
         ON CONFLICT DO NOTHING",
    )
    .bind(scope.workspace_id())
    .bind(channel)
    .bind(new.members)
    .bind(new.created_by)
    .execute(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?
    .rows_affected();
    if added > 0 {
        sqlx::query(
            "UPDATE channels SET members_version = members_version + 1 WHERE workspace_id = $1 AND channel_id = $2",
        )
        .bind(scope.workspace_id())
        .bind(channel)
        .execute(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    }
    Ok(added > 0)
}
