//! Channels and their members.

use relay_domain::{
    AgentId, ChannelId, WorkspaceScope, event,
    names::{self, MAX_TOPIC_BYTES, check_json_length, check_length, is_channel_name, strip_hash},
    plan::Ceiling,
};
use relay_store::{ChannelCreation, Joining, NewChannel, events::NewEvent};
pub use relay_store::{ChannelRow, MemberRow, Membership};
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
        let ceiling = self.ceiling(caller.scope(), Ceiling::Channels).await?;
        let new = NewChannel { channel_id, name, topic, metadata: &metadata, created_by, at, ceiling };
        let mut event = channel_event(event::CHANNEL_CREATED, channel_id, name, topic);
        event.agent_id = created_by;
        match self.store().create_channel(caller.scope(), &new, event).await? {
            ChannelCreation::Made(recorded) => self.announce(recorded),
            ChannelCreation::NameTaken => return Err(EngineError::ChannelAlreadyExists(name.to_owned())),
            ChannelCreation::NoRoom => return Err(EngineError::PlanLimitExceeded(Ceiling::Channels)),
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

    /// The channels of a workspace that the caller may see, oldest first, at most [`names::MAX_LISTED_CHANNELS`].
    ///
    /// # Errors
    /// When storage is away.
    pub async fn channels(&self, caller: &Credential, with_archived: bool) -> EngineResult<Vec<ChannelRow>> {
        Ok(self.store().channels(caller.scope(), with_archived, &caller.view().filters).await?)
    }

    /// The channel of that name if the caller may see it.
    ///
    /// # Errors
    /// When there is none for this caller.
    pub async fn visible_channel(&self, caller: &Credential, name: &str) -> EngineResult<ChannelRow> {
        let channel = self.channel_by_name(caller.scope(), name).await?;
        if caller.view().sees_channel(channel.channel_id, &channel.name) {
            Ok(channel)
        } else {
            Err(EngineError::ChannelNotFound(channel.name))
        }
    }

    /// The channel of that name, archived or not; one leading `#` is dropped.
    ///
    /// # Errors
    /// When there is none.
    pub async fn channel_by_name(&self, scope: WorkspaceScope, name: &str) -> EngineResult<ChannelRow> {
        let name = strip_hash(name);
        self.store().channel_by_name(scope, name).await?.ok_or_else(|| EngineError::ChannelNotFound(name.to_owned()))
    }

    /// The members of a channel that the caller may see in the order of joining, at most [`names::MAX_LISTED_MEMBERS`].
    ///
    /// # Errors
    /// When storage is away.
    pub async fn channel_members(&self, caller: &Credential, channel: ChannelId) -> EngineResult<Vec<MemberRow>> {
        Ok(self.store().channel_members(caller.scope(), channel, &caller.view().filters).await?)
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
        let event = |changed: &ChannelRow| {
            channel_event(event::CHANNEL_UPDATED, changed.channel_id, &changed.name, changed.topic.as_deref())
        };
        let (changed, recorded) = self
            .store()
            .update_channel(scope, channel.channel_id, topic, change.metadata.as_ref(), self.now(), event)
            .await?
            .ok_or(EngineError::ChannelArchived(channel.name))?;
        self.announce(recorded);
        Ok(changed)
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
        let data = json!({ "channel": { "name": channel.name } });
        let event = NewEvent::new(event::CHANNEL_ARCHIVED, data).in_channel(channel.channel_id, channel.name);
        if let Some(recorded) = self.store().archive_channel(scope, channel.channel_id, self.now(), event).await? {
            self.announce(recorded);
        }
        self.inner.hints.members_changed(scope, channel.channel_id);
        Ok(())
    }

    /// Makes the caller a member. Returns the channel's name and whether it was one before.
    ///
    /// # Errors
    /// When there is no such channel or it is archived.
    pub async fn join_channel(&self, caller: &AgentCaller, name: &str) -> EngineResult<(String, bool)> {
        let channel = self.open_channel(caller.scope, name).await?;
        let already = self.add_member(caller.scope, &channel, caller.agent_id, &caller.name).await?;
        Ok((channel.name, already))
    }

    /// Makes an agent a member in its own name, whoever asks for it.
    ///
    /// # Errors
    /// When there is no such channel or it is archived.
    pub(crate) async fn join_as(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        agent_name: &str,
        channel: &str,
    ) -> EngineResult<()> {
        let channel = self.open_channel(scope, channel).await?;
        self.add_member(scope, &channel, agent, agent_name).await?;
        Ok(())
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
        self.add_member(caller.scope, &channel, invitee.agent_id, &invitee.name).await?;
        Ok(channel.name)
    }

    /// Ends the caller's membership; being none is fine.
    ///
    /// # Errors
    /// When there is no such channel.
    pub async fn leave_channel(&self, caller: &AgentCaller, name: &str) -> EngineResult<()> {
        let channel = self.channel_by_name(caller.scope, name).await?;
        let event = member_event(event::MEMBER_LEFT, &channel, caller.agent_id, &caller.name);
        let left = self.store().leave_channel(caller.scope, channel.channel_id, caller.agent_id, self.now(), event);
        if let Some(recorded) = left.await? {
            self.inner.hints.members_changed(caller.scope, channel.channel_id);
            self.announce(recorded);
        }
        Ok(())
    }

    /// Mutes or unmutes a channel for the caller. Returns the channel's name.
    ///
    /// # Errors
    /// When there is no such channel or the caller is no member.
    pub async fn set_muted(&self, caller: &AgentCaller, name: &str, muted: bool) -> EngineResult<String> {
        let channel = self.channel_by_name(caller.scope, name).await?;
        let kind = if muted { event::MEMBER_CHANNEL_MUTED } else { event::MEMBER_CHANNEL_UNMUTED };
        let event = member_event(kind, &channel, caller.agent_id, &caller.name);
        let set = self.store().set_muted(caller.scope, channel.channel_id, caller.agent_id, muted, self.now(), event);
        match set.await? {
            Some(recorded) => self.announce(recorded),
            None => return Err(EngineError::NotAMember(channel.name)),
        }
        self.inner.hints.members_changed(caller.scope, channel.channel_id);
        Ok(channel.name)
    }

    /// A channel that is not archived.
    pub(crate) async fn open_channel(&self, scope: WorkspaceScope, name: &str) -> EngineResult<ChannelRow> {
        let channel = self.channel_by_name(scope, name).await?;
        if channel.archived_at.is_some() {
            return Err(EngineError::ChannelArchived(channel.name));
        }
        Ok(channel)
    }

    /// Adds a member; true when it was one before.
    async fn add_member(
        &self,
        scope: WorkspaceScope,
        channel: &ChannelRow,
        agent: AgentId,
        agent_name: &str,
    ) -> EngineResult<bool> {
        let event = member_event(event::MEMBER_JOINED, channel, agent, agent_name);
        match self.store().join_channel(scope, channel.channel_id, agent, self.now(), event).await? {
            Joining::Joined(recorded) => {
                self.inner.hints.members_changed(scope, channel.channel_id);
                self.announce(recorded);
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

fn channel_event(kind: &'static str, id: ChannelId, name: &str, topic: Option<&str>) -> NewEvent {
    NewEvent::new(kind, json!({ "channel": { "name": name, "topic": topic } })).in_channel(id, name)
}

/// Something about a member of a channel.
pub(crate) fn member_event(kind: &'static str, channel: &ChannelRow, agent: AgentId, agent_name: &str) -> NewEvent {
    let data = json!({ "channel": channel.name, "agent_name": agent_name, "agent_id": agent.to_string() });
    NewEvent::new(kind, data).in_channel(channel.channel_id, channel.name.clone()).by(agent)
}
