//! Request and response bodies of the channel routes. Main types: [`CreateChannelBody`], [`Channel`], [`Member`];
//! conversations are in [`conversation`].

pub mod conversation;

use relay_domain::{AgentId, ChannelId, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use crate::{
    field::{Id, Timestamp, present},
    words,
};

/// Body of `POST /v1/channels`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateChannelBody {
    /// Name of the channel; one leading `#` is removed.
    pub name: String,
    /// Topic of the channel.
    #[serde(default)]
    pub topic: Option<String>,
    /// Free-form data of clients.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
}

/// Query of `GET /v1/channels`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ChannelsQuery {
    /// `true` or `1` includes archived channels.
    #[serde(default)]
    pub include_archived: Option<String>,
}

/// Body of `PATCH /v1/channels/:name`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateChannelBody {
    /// Topic of the channel; null clears it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    pub topic: Option<Option<String>>,
    /// Replaces the free-form data of clients.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
}

/// Body of `PATCH /v1/channels/:name/topic`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct TopicBody {
    /// Topic of the channel.
    pub topic: String,
}

/// Body of `POST /v1/channels/:name/invite`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct InviteBody {
    /// Name of the agent to invite.
    #[serde(alias = "agent")]
    pub agent_name: String,
}

/// Channel of a workspace.
#[derive(Debug, Serialize, ToSchema)]
pub struct Channel {
    /// Id of the channel.
    #[schema(value_type = Id)]
    pub id: ChannelId,
    /// Id of the workspace.
    #[schema(value_type = Id)]
    pub workspace_id: WorkspaceId,
    /// Name of the channel.
    pub name: String,
    /// Always 0.
    pub channel_type: i16,
    /// Topic of the channel.
    pub topic: Option<String>,
    /// Free-form data of clients.
    #[schema(value_type = Object)]
    pub metadata: Value,
    /// Id of the creator.
    #[schema(value_type = Option<Id>)]
    pub created_by: Option<AgentId>,
    /// Time of creation.
    pub created_at: Timestamp,
    /// `true` if the channel accepts no more messages.
    pub is_archived: bool,
    /// Number of members.
    pub member_count: i64,
}

/// Response of `POST /v1/agents/:name/subscription-channel`.
#[derive(Debug, Serialize, ToSchema)]
pub struct SubscriptionChannel {
    /// The channel itself.
    #[serde(flatten)]
    pub channel: Channel,
    /// Id of its only recipient.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// Name of the recipient.
    pub agent_name: String,
    /// Address of the recipient.
    #[schema(example = "ada@direct")]
    pub address: String,
}

/// Response of `GET /v1/channels/:name`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChannelDetails {
    /// The channel itself.
    #[serde(flatten)]
    pub channel: Channel,
    /// Members of the channel.
    pub members: Vec<Member>,
}

/// Member of a channel.
#[derive(Debug, Serialize, ToSchema)]
pub struct Member {
    /// Id of the agent.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// Name of the agent.
    pub agent_name: String,
    /// owner or member.
    #[schema(value_type = words::Role)]
    pub role: String,
    /// Time of joining.
    pub joined_at: Timestamp,
    /// `true` if the member does not get the channel's messages.
    pub is_muted: bool,
}

/// Response of `POST /v1/channels/:name/join`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Joined {
    /// Name of the channel.
    pub channel: String,
    /// Id of the new member.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// `true` if the agent was a member already.
    pub already_member: bool,
}

/// Response of `POST /v1/channels/:name/invite`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Invited {
    /// Name of the channel.
    pub channel: String,
    /// Name of the new member.
    pub agent: String,
}

/// Response of `POST /v1/channels/:name/mute` and `/unmute`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Muted {
    /// Name of the channel.
    pub channel: String,
    /// Id of the member.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// Current state of the mute.
    pub muted: bool,
}
