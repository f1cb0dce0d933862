//! Bodies of the channel routes.

use relay_domain::{AgentId, ChannelId, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use crate::{
    field::{Id, Timestamp, present},
    words,
};

/// `POST /v1/channels`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateChannelBody {
    /// The name; one leading `#` is dropped.
    pub name: String,
    /// What it is about.
    #[serde(default)]
    pub topic: Option<String>,
    /// What clients keep there.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
}

/// `GET /v1/channels`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ChannelsQuery {
    /// Whether archived channels are listed too: `true` or `1`.
    #[serde(default)]
    pub include_archived: Option<String>,
}

/// `PATCH /v1/channels/:name`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateChannelBody {
    /// What it is about; null clears it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    pub topic: Option<Option<String>>,
    /// Replaces what clients keep there.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
}

/// `PATCH /v1/channels/:name/topic`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct TopicBody {
    /// What it is about.
    pub topic: String,
}

/// `POST /v1/channels/:name/invite`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct InviteBody {
    /// Whom.
    #[serde(alias = "agent")]
    pub agent_name: String,
}

/// A channel.
#[derive(Debug, Serialize, ToSchema)]
pub struct Channel {
    /// The channel.
    #[schema(value_type = Id)]
    pub id: ChannelId,
    /// Its workspace.
    #[schema(value_type = Id)]
    pub workspace_id: WorkspaceId,
    /// Its name.
    pub name: String,
    /// 0 for a channel.
    pub channel_type: i16,
    /// What it is about.
    pub topic: Option<String>,
    /// What clients keep there.
    #[schema(value_type = Object)]
    pub metadata: Value,
    /// Who made it.
    #[schema(value_type = Option<Id>)]
    pub created_by: Option<AgentId>,
    /// When.
    pub created_at: Timestamp,
    /// Whether it takes no more messages.
    pub is_archived: bool,
    /// How many members it has.
    pub member_count: i64,
}

/// Answer to `GET /v1/channels/:name`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChannelDetails {
    /// The channel.
    #[serde(flatten)]
    pub channel: Channel,
    /// Its members.
    pub members: Vec<Member>,
}

/// A member of a channel.
#[derive(Debug, Serialize, ToSchema)]
pub struct Member {
    /// The agent.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// Its name.
    pub agent_name: String,
    /// owner or member.
    #[schema(value_type = words::Role)]
    pub role: String,
    /// Since when.
    pub joined_at: Timestamp,
    /// Whether it gets the channel's messages.
    pub is_muted: bool,
}

/// Answer to `POST /v1/channels/:name/join`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Joined {
    /// The channel's name.
    pub channel: String,
    /// Who joined.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// Whether nothing changed.
    pub already_member: bool,
}

/// Answer to `POST /v1/channels/:name/invite`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Invited {
    /// The channel's name.
    pub channel: String,
    /// The new member's name.
    pub agent: String,
}

/// Answer to `POST /v1/channels/:name/mute` and `/unmute`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Muted {
    /// The channel's name.
    pub channel: String,
    /// Whose mute it is.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// How it is now.
    pub muted: bool,
}
