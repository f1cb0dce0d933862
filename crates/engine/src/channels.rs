//! Channels and their members.

use relay_domain::{
    AgentId, ChannelId, WorkspaceScope,
    names::{self, MAX_TOPIC_BYTES, check_json_length, check_length, is_channel_name, strip_hash},
};
pub use relay_store::{ChannelRow, MemberRow, Membership};
use relay_store::{Joining, NewChannel};
use serde_json::{Value, json};

use crate::{
    Engine, EngineError, EngineResult,
    agents::encoded_length,
    auth::{AgentCaller, Credential},
};

/// A request for a channel.
#[derive(Debug)]
pub struct CreateChannel {
    /// Its name; one leading `#` is dropped.
    pub name: String,
    /// What it is about.
    pub topic: Option<String>,
    /// What clients keep there.
    pub metadata: Option<Value>,
}

/// What to change of a channel. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct ChannelChange {
    /// What it is about; `Some(None)` clears it.
    pub topic: Option<Option<String>>,
    /// Replaces what clients keep there.
    pub metadata: Option<Value>,
}

impl Engine {
    /// Makes a channel. An agent that makes one becomes its owner; with a workspace's key nobody joins.
    ///
    /// # Errors
    /// When the name is no channel name or taken, or a field is out of bounds.
    pub async fn create_channel(&self, caller: &Credential, request: &CreateChannel) -> EngineResult<ChannelRow> {
        let name = strip_hash(&request.name);
        if !is_channel_name(name) {
            return Err(EngineError::InvalidChannelName);
        }
        check_topic(request.topic.as_deref())?;
        let metadata = request.metadata.clone().unwrap_or_else(|| json!({}));
        check_json_length("metadata", encoded_length(&metadata))?;
        let (channel_id, at) = (ChannelId::new(self.next_id()), self.now());
        let created_by = caller.agent_id();
        let topic = request.topic.as_deref();
        let new = NewChannel { channel_id, name, topic, metadata: &metadata, created_by, at };
        if !self.store().create_channel(caller.scope(), &new).await? {
            return Err(EngineError::ChannelAlreadyExists(name.to_owned()));
        }
        Ok(ChannelRow {
            channel_id,
            name: name.to_owned(),
            topic: request.topic.clone(),
            metadata,
            created_by,
            created_at: at,
            archived_at: None,
            member_count: i64::from(created_by.is_some()),
        })
    }

    /// The channels of a workspace, oldest first, at most [`names::MAX_LISTED_CHANNELS`].
    ///
    /// # Errors
    /// When storage is away.
    pub async fn channels(&self, scope: WorkspaceScope, with_archived: bool) -> EngineResult<Vec<ChannelRow>> {
        Ok(self.store().channels(scope, with_archived).await?)
    }

    /// The channel of that name, archived or not; one leading `#` is dropped.
    ///
    /// # Errors
    /// When there is none.
    pub async fn channel_by_name(&self, scope: WorkspaceScope, name: &str) -> EngineResult<ChannelRow> {
        let name = strip_hash(name);
        self.store().channel_by_name(scope, name).await?.ok_or_else(|| EngineError::ChannelNotFound(name.to_owned()))
    }

    /// The members of a channel in the order of joining, at most [`names::MAX_LISTED_MEMBERS`].
    ///
    /// # Errors
    /// When storage is away.
    pub async fn channel_members(&self, scope: WorkspaceScope, channel: ChannelId) -> EngineResult<Vec<MemberRow>> {
        Ok(self.store().channel_members(scope, channel).await?)
    }

    /// The channels of an agent, oldest first, at most [`names::MAX_LISTED_CHANNELS`].
    ///
    /// # Errors
    /// When storage is away.
    pub async fn channels_of_agent(&self, scope: WorkspaceScope, agent: AgentId) -> EngineResult<Vec<Membership>> {
        Ok(self.store().channels_of_agent(scope, agent).await?)
    }

    /// Changes a channel.
    ///
    /// # Errors
    /// When there is none, it is archived, or a field is out of bounds.
    pub async fn update_channel(
        &self,
        scope: WorkspaceScope,
        name: &str,
        change: &ChannelChange,
    ) -> EngineResult<ChannelRow> {
        check_topic(change.topic.as_ref().and_then(Option::as_deref))?;
        if let Some(metadata) = &change.metadata {
            check_json_length("metadata", encoded_length(metadata))?;
        }
        let channel = self.open_channel(scope, name).await?;
        let topic = change.topic.as_ref().map(Option::as_deref);
        self.store()
            .update_channel(scope, channel.channel_id, topic, change.metadata.as_ref())
            .await?
            .ok_or(EngineError::ChannelArchived(channel.name))
    }

    /// Archives a channel; again is fine.
    ///
    /// # Errors
    /// When there is none, or it is `general`.
    pub async fn archive_channel(&self, scope: WorkspaceScope, name: &str) -> EngineResult<()> {
        let channel = self.channel_by_name(scope, name).await?;
        if channel.name == names::GENERAL {
            return Err(EngineError::CannotArchiveGeneral);
        }
        self.store().archive_channel(scope, channel.channel_id, self.now()).await?;
        self.inner.hints.members_changed(scope, channel.channel_id);
        Ok(())
    }

    /// Makes the caller a member. Returns the channel's name and whether it was one before.
    ///
    /// # Errors
    /// When there is no such channel or it is archived.
    pub async fn join_channel(&self, caller: &AgentCaller, name: &str) -> EngineResult<(String, bool)> {
        let channel = self.open_channel(caller.scope, name).await?;
        let already = self.add_member(caller.scope, &channel, caller.agent_id).await?;
        Ok((channel.name, already))
    }

    /// Makes another agent a member. Returns the channel's name.
    ///
    /// # Errors
    /// When there is no such channel or agent, the channel is archived, or the caller is no member.
    pub async fn invite(&self, caller: &AgentCaller, name: &str, invitee: &str) -> EngineResult<String> {
        let channel = self.open_channel(caller.scope, name).await?;
        if !self.store().is_member(caller.scope, channel.channel_id, caller.agent_id).await? {
            return Err(EngineError::NotAMember(channel.name));
        }
        let invitee = self.agent_by_name(caller.scope, invitee).await?;
        self.add_member(caller.scope, &channel, invitee.agent_id).await?;
        Ok(channel.name)
    }

    /// Ends the caller's membership; being none is fine.
    ///
    /// # Errors
    /// When there is no such channel.
    pub async fn leave_channel(&self, caller: &AgentCaller, name: &str) -> EngineResult<()> {
        let channel = self.channel_by_name(caller.scope, name).await?;
        if self.store().leave_channel(caller.scope, channel.channel_id, caller.agent_id).await? {
            self.inner.hints.members_changed(caller.scope, channel.channel_id);
        }
        Ok(())
    }

    /// Mutes or unmutes a channel for the caller. Returns the channel's name.
    ///
    /// # Errors
    /// When there is no such channel or the caller is no member.
    pub async fn set_muted(&self, caller: &AgentCaller, name: &str, muted: bool) -> EngineResult<String> {
        let channel = self.channel_by_name(caller.scope, name).await?;
        if !self.store().set_muted(caller.scope, channel.channel_id, caller.agent_id, muted).await? {
            return Err(EngineError::NotAMember(channel.name));
        }
        self.inner.hints.members_changed(caller.scope, channel.channel_id);
        Ok(channel.name)
    }

    /// A channel that is not archived.
    async fn open_channel(&self, scope: WorkspaceScope, name: &str) -> EngineResult<ChannelRow> {
        let channel = self.channel_by_name(scope, name).await?;
        if channel.archived_at.is_some() {
            return Err(EngineError::ChannelArchived(channel.name));
        }
        Ok(channel)
    }

    /// Adds a member; true when it was one before.
    async fn add_member(&self, scope: WorkspaceScope, channel: &ChannelRow, agent: AgentId) -> EngineResult<bool> {
        match self.store().join_channel(scope, channel.channel_id, agent, self.now()).await? {
            Joining::Joined => {
                self.inner.hints.members_changed(scope, channel.channel_id);
                Ok(false)
            }
            Joining::AlreadyMember => Ok(true),
            Joining::Refused => {
                // Lost against an archiving or a deletion: say which.
                self.open_channel(scope, &channel.name).await?;
                Err(EngineError::AgentNotFound(agent.to_string()))
            }
        }
    }
}

fn check_topic(topic: Option<&str>) -> EngineResult<()> {
    Ok(topic.map_or(Ok(()), |topic| check_length("topic", topic, MAX_TOPIC_BYTES))?)
}
