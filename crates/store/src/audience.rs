//! Who hears a channel: what a send resolves its recipients from.

use relay_domain::{AgentId, ChannelId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult};

/// How a channel or conversation is named.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum AudienceKey {
    /// A channel by name.
    Name(String),
    /// A conversation by what clients call it.
    Conversation(String),
    /// Either by id.
    Id(ChannelId),
}

/// A channel or conversation and its members, as of one version.
#[derive(Debug, Clone)]
pub struct Audience {
    /// The channel.
    pub channel_id: ChannelId,
    /// Its name.
    pub name: String,
    /// 0 channel, 1 one-to-one conversation, 2 group conversation.
    pub channel_type: i16,
    /// What clients call the conversation.
    pub conversation_id: Option<String>,
    /// Whether nothing may be posted any more.
    pub archived: bool,
    /// Rises with every change of members or mutes.
    pub members_version: i64,
    /// The members, living agents only.
    pub members: Vec<Member>,
}

/// A member.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct Member {
    /// Its id.
    pub agent_id: i64,
    /// Its name.
    pub name: String,
    /// Whether it wants mentions only.
    pub muted: bool,
}

#[derive(sqlx::FromRow)]
struct ChannelRow {
    channel_id: i64,
    name: String,
    #[sqlx(rename = "type")]
    channel_type: i16,
    conversation_id: Option<String>,
    archived: bool,
    members_version: i64,
}

impl Store {
    /// A channel or conversation with its members. The version is read before the members, so that a
    /// change in between makes the snapshot look older than it is, never newer.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn audience(&self, scope: WorkspaceScope, key: &AudienceKey) -> StoreResult<Option<Audience>> {
        let (name, conversation, id) = match key {
            AudienceKey::Name(name) => (Some(name.as_str()), None, None),
            AudienceKey::Conversation(conversation) => (None, Some(conversation.as_str()), None),
            AudienceKey::Id(id) => (None, None, Some(id.get())),
        };
        let channel: Option<ChannelRow> = sqlx::query_as(
            "SELECT channel_id, name, type, conversation_id, archived_at IS NOT NULL AS archived, members_version
               FROM channels
              WHERE workspace_id = $1 AND name = $2 AND type = 0
             UNION ALL
             SELECT channel_id, name, type, conversation_id, archived_at IS NOT NULL, members_version
               FROM channels
              WHERE workspace_id = $1 AND conversation_id = $3
             UNION ALL
             SELECT channel_id, name, type, conversation_id, archived_at IS NOT NULL, members_version
               FROM channels
              WHERE workspace_id = $1 AND channel_id = $4",
        )
        .bind(scope.workspace_id().get())
        .bind(name)
        .bind(conversation)
        .bind(id)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a channel to post to"))?;
        let Some(channel) = channel else { return Ok(None) };
        let members: Vec<Member> = sqlx::query_as(
            "SELECT m.agent_id, a.name, m.muted
               FROM channel_members m
               JOIN agents a USING (workspace_id, agent_id)
              WHERE m.workspace_id = $1 AND m.channel_id = $2 AND a.deleted_at IS NULL
              ORDER BY m.agent_id",
        )
        .bind(scope.workspace_id().get())
        .bind(channel.channel_id)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a channel's members"))?;
        Ok(Some(Audience {
            channel_id: ChannelId::new(channel.channel_id),
            name: channel.name,
            channel_type: channel.channel_type,
            conversation_id: channel.conversation_id,
            archived: channel.archived,
            members_version: channel.members_version,
            members,
        }))
    }

    /// A living agent's id by name, if it is located on the given node.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agent_on_node(
        &self,
        scope: WorkspaceScope,
        node: &relay_domain::NodeId,
        name: &str,
    ) -> StoreResult<Option<(AgentId, String)>> {
        let row: Option<(i64, String)> = sqlx::query_as(
            "SELECT agent_id, type FROM agents
              WHERE workspace_id = $1 AND name = $2 AND node_id = $3 AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(name)
        .bind(node.as_str())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking an agent up on its node"))?;
        Ok(row.map(|(id, kind)| (AgentId::new(id), kind)))
    }

    /// How often a living agent's token has been rotated.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agent_generation(&self, scope: WorkspaceScope, agent: AgentId) -> StoreResult<Option<i64>> {
        sqlx::query_scalar(
            "SELECT token_generation FROM agents
              WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a token's generation"))
    }
}
