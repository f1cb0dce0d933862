//! Audience of a channel or conversation: the members from which a send resolves its recipients. The engine caches
//! an [`Audience`] by its version.

use const_format::formatcp;
use relay_domain::{
    AgentId, ChannelId, ConversationId, NodeId, WorkspaceScope, agents::AgentKind, channels::ChannelKind,
};

use crate::{
    Store, StoreError, StoreResult,
    codes::CHANNEL,
    decode::{decode_row, decode_rows},
};

/// Key of a channel or conversation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum AudienceKey {
    Name(String),
    /// Public id of a conversation.
    Conversation(ConversationId),
    /// Id of either.
    Id(ChannelId),
}

/// A channel or conversation and its members, as of one version.
#[derive(Debug, Clone)]
pub struct Audience {
    pub channel_id: ChannelId,
    pub name: String,
    pub channel_kind: ChannelKind,
    pub conversation_id: Option<ConversationId>,
    pub archived: bool,
    /// Rises with every change of members or mutes.
    pub members_version: i64,
    /// Members that are not deleted.
    pub members: Vec<Member>,
}

/// A member, as a send needs it.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct Member {
    pub agent_id: AgentId,
    pub name: String,
    /// Receives mentions only.
    pub muted: bool,
    /// Machine in its address; only for members of conversations.
    pub machine: Option<String>,
}

#[derive(sqlx::FromRow)]
struct AudienceRow {
    channel_id: ChannelId,
    name: String,
    #[sqlx(rename = "type")]
    channel_kind: ChannelKind,
    conversation_id: Option<ConversationId>,
    archived: bool,
    members_version: i64,
}

// Three branches, because each key has an index of its own.
const FIND: &str = formatcp!(
    "
SELECT channel_id, name, type, conversation_id, archived_at IS NOT NULL AS archived, members_version
  FROM channels
 WHERE workspace_id = $1 AND name = $2 AND type = {CHANNEL}
UNION ALL
SELECT channel_id, name, type, conversation_id, archived_at IS NOT NULL, members_version
  FROM channels
 WHERE workspace_id = $1 AND conversation_id = $3
UNION ALL
SELECT channel_id, name, type, conversation_id, archived_at IS NOT NULL, members_version
  FROM channels
 WHERE workspace_id = $1 AND channel_id = $4"
);

impl Store {
    /// Reads a channel or conversation with its members.
    ///
    /// The version is read before the members: a change in between makes the snapshot look older than it is,
    /// never newer, and the batch commit rejects a send that was resolved from an old version.
    pub async fn audience(&self, scope: WorkspaceScope, key: &AudienceKey) -> StoreResult<Option<Audience>> {
        let (name, conversation, id) = match key {
            AudienceKey::Name(name) => (Some(name.as_str()), None, None),
            AudienceKey::Conversation(conversation) => (None, Some(conversation.as_str()), None),
            AudienceKey::Id(id) => (None, None, Some(*id)),
        };
        let row = sqlx::query(FIND)
            .bind(scope.workspace_id())
            .bind(name)
            .bind(conversation)
            .bind(id)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a channel to post to"))?;
        let Some(row) = row else { return Ok(None) };
        let channel: AudienceRow = decode_row("channels", &row)?;
        // Nodes are joined for conversations only, whose members are addressed by machine. A channel may have
        // thousands.
        let rows = sqlx::query(
            "SELECT m.agent_id, a.name, m.muted,
                    CASE WHEN $3 THEN
                        coalesce(CASE WHEN a.node_id = 'node_direct_' || a.agent_id
                                      THEN coalesce(n.machine_id, a.direct_machine_id) ELSE n.name END, 'direct')
                    END AS machine
               FROM channel_members m
               JOIN agents a USING (workspace_id, agent_id)
               LEFT JOIN nodes n ON $3 AND n.workspace_id = a.workspace_id AND n.node_id = a.node_id
              WHERE m.workspace_id = $1 AND m.channel_id = $2 AND a.deleted_at IS NULL
              ORDER BY m.agent_id",
        )
        .bind(scope.workspace_id())
        .bind(channel.channel_id)
        .bind(channel.channel_kind.is_conversation())
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a channel's members"))?;
        let members: Vec<Member> = decode_rows("channel_members", &rows)?;
        Ok(Some(Audience {
            channel_id: channel.channel_id,
            name: channel.name,
            channel_kind: channel.channel_kind,
            conversation_id: channel.conversation_id,
            archived: channel.archived,
            members_version: channel.members_version,
            members,
        }))
    }

    /// Finds an agent by name, if it is located on the node. Returns its id and type.
    pub async fn agent_on_node(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        name: &str,
    ) -> StoreResult<Option<(AgentId, AgentKind)>> {
        let row = sqlx::query(
            "SELECT agent_id, type FROM agents
              WHERE workspace_id = $1 AND name = $2 AND node_id = $3 AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id())
        .bind(name)
        .bind(node)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking an agent up on its node"))?;
        row.map(|row| decode_row("agents", &row)).transpose()
    }

    /// Reads an agent's token generation. `None` for a deleted agent.
    pub async fn agent_generation(&self, scope: WorkspaceScope, agent: AgentId) -> StoreResult<Option<i64>> {
        sqlx::query_scalar(
            "SELECT token_generation FROM agents
              WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id())
        .bind(agent)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a token's generation"))
    }
}
