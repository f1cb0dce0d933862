//! Channels and their members.

use relay_domain::{
    AgentId, ChannelId, WorkspaceScope,
    access::rights::{Operation, Refusal, Right},
    agents::Agent,
    channels::{Channel, Member},
    encoded_length,
    events::kind,
    names::{self, MAX_TOPIC_BYTES, check_json_length, check_length, is_channel_name, only_recipient, strip_hash},
    workspaces::plan::Quota,
};
use relay_store::{ChannelCreation, ChannelUpdate, JoinOutcome, MemberKey, NewChannel, events::Event};
use relay_wire::{
    channels::{CreateChannelBody, UpdateChannelBody},
    events::data::{ChannelArchived, ChannelChanged, ChannelName, ChannelWithTopic, MemberChanged},
    field::ToValue as _,
};
use serde_json::Value;

use super::Channels;
use crate::{
    EngineError, EngineResult,
    access::callers::{AgentCaller, Credential},
    error::{Conflict, Denial, InvalidInput, Limit, Missing},
    parts::{Parts, parsed_sizes},
};

impl Channels {
    /// Creates a channel. A creating agent becomes its owner; with a workspace key the channel starts empty.
    ///
    /// # Errors
    /// When the name is no channel name or taken, or a field is out of bounds.
    pub async fn create(&self, caller: &Credential, request: CreateChannelBody) -> EngineResult<Channel> {
        let name = strip_hash(&request.name);
        // Only the engine creates channels with one recipient: their names say whose they are.
        if !is_channel_name(name) || only_recipient(name).is_some() {
            return Err(EngineError::Invalid(InvalidInput::ChannelName));
        }
        check_topic(request.topic.as_deref())?;
        self.core.authorize(caller, Operation::Join).await?;
        let metadata = Value::Object(request.metadata.unwrap_or_default());
        check_json_length("metadata", encoded_length(&metadata))?;
        let (channel_id, at) = (ChannelId::new(self.core.next_id()), self.core.now());
        let created_by = caller.agent_id();
        let topic = request.topic.as_deref();
        let quota = self.quotas.limit(caller.scope(), Quota::Channels).await?;
        let new = NewChannel { channel_id, name, topic, metadata: &metadata, created_by, at, quota };
        let mut event = channel_event(kind::CHANNEL_CREATED, channel_id, name, topic);
        event.agent_id = created_by;
        match self.core.store.create_channel(caller.scope(), &new, event).await? {
            ChannelCreation::Created(recorded) => self.core.announce(recorded),
            ChannelCreation::NameTaken => return Err(EngineError::Conflict(Conflict::ChannelExists(name.to_owned()))),
            ChannelCreation::QuotaReached => return Err(EngineError::LimitExceeded(Limit::Quota(Quota::Channels))),
        }
        Ok(Channel {
            channel_id,
            name: name.to_owned(),
            topic: request.topic,
            metadata,
            created_by,
            created_at: at,
            archived_at: None,
            member_count: i64::from(created_by.is_some()),
        })
    }

    /// Returns the channel whose only recipient is an agent, and whether this call created it. Everything posted there,
    /// by agents, webhooks and triggers, reaches this agent and no other.
    ///
    /// # Errors
    /// When there is no such agent, another agent asks, or the channel is archived.
    pub async fn of_recipient(&self, caller: &Credential, agent: &str) -> EngineResult<(Channel, Agent, bool)> {
        let scope = caller.scope();
        self.core.authorize(caller, Operation::Join).await?;
        let agent = self.agents.by_name(scope, agent).await?;
        if caller.agent_id().is_some_and(|caller| caller != agent.id) {
            return Err(EngineError::Forbidden(Denial::OnlyRecipient));
        }
        let name = names::subscription_channel(agent.id);
        let is_new = match self.core.store.channel_by_name(scope, &name).await? {
            Some(_) => false,
            None => self.create_for_recipient(scope, agent.id, &name).await?,
        };
        let channel = self.open_channel(scope, &name).await?;
        // It may have left since.
        self.add_member(scope, &channel, agent.id, &agent.name).await?;
        // Read again for the number of members.
        Ok((self.open_channel(scope, &name).await?, agent, is_new))
    }

    /// Creates a channel that belongs to its only recipient. `false` if another call did.
    async fn create_for_recipient(&self, scope: WorkspaceScope, agent: AgentId, name: &str) -> EngineResult<bool> {
        let (channel_id, at) = (ChannelId::new(self.core.next_id()), self.core.now());
        let metadata = Value::Object(serde_json::Map::new());
        let quota = self.quotas.limit(scope, Quota::Channels).await?;
        let new = NewChannel { channel_id, name, topic: None, metadata: &metadata, created_by: Some(agent), at, quota };
        let mut event = channel_event(kind::CHANNEL_CREATED, channel_id, name, None);
        event.agent_id = Some(agent);
        match self.core.store.create_channel(scope, &new, event).await? {
            ChannelCreation::Created(recorded) => {
                self.core.announce(recorded);
                Ok(true)
            }
            ChannelCreation::NameTaken => Ok(false),
            ChannelCreation::QuotaReached => Err(EngineError::LimitExceeded(Limit::Quota(Quota::Channels))),
        }
    }

    /// Lists the channels of a workspace that the caller may see, oldest first, at most [`names::MAX_LISTED_CHANNELS`].
    pub async fn list(&self, caller: &Credential, with_archived: bool) -> EngineResult<Parts<Channel>> {
        let scope = caller.scope();
        let channels = self.core.store.channel_sizes(scope, with_archived, &caller.view().filters).await?;
        let store = self.core.store.clone();
        let read = move |ids: Vec<ChannelId>| {
            let store = store.clone();
            async move { Ok(store.channels(scope, &ids).await?) }
        };
        self.core.read_in_parts(scope, parsed_sizes(channels), read).await
    }

    /// Finds a channel by name if the caller may see it.
    ///
    /// # Errors
    /// When the name is unknown or not visible to this caller.
    pub async fn visible(&self, caller: &Credential, name: &str) -> EngineResult<Channel> {
        let channel = self.by_name(caller.scope(), name).await?;
        if caller.view().sees_channel(channel.channel_id, &channel.name) {
            Ok(channel)
        } else {
            Err(EngineError::NotFound(Missing::Channel(channel.name)))
        }
    }

    /// Finds a channel by name, archived or not; a leading `#` is dropped.
    pub async fn by_name(&self, scope: WorkspaceScope, name: &str) -> EngineResult<Channel> {
        let name = strip_hash(name);
        self.core
            .store
            .channel_by_name(scope, name)
            .await?
            .ok_or_else(|| EngineError::NotFound(Missing::Channel(name.to_owned())))
    }

    /// Lists the members of a channel that the caller may see in the order of joining, at most
    /// [`names::MAX_LISTED_MEMBERS`].
    pub async fn members(&self, caller: &Credential, channel: ChannelId) -> EngineResult<Vec<Member>> {
        Ok(self.core.store.channel_members(caller.scope(), channel, &caller.view().filters).await?)
    }

    /// Changes a channel.
    ///
    /// # Errors
    /// When the name is unknown, the channel is archived, or a field is out of bounds.
    pub async fn update(&self, scope: WorkspaceScope, name: &str, change: UpdateChannelBody) -> EngineResult<Channel> {
        check_topic(change.topic.as_ref().and_then(Option::as_deref))?;
        let metadata = change.metadata.map(Value::Object);
        if let Some(metadata) = &metadata {
            check_json_length("metadata", encoded_length(metadata))?;
        }
        let channel = self.open_channel(scope, name).await?;
        let update = ChannelUpdate {
            channel: channel.channel_id,
            topic: change.topic.as_ref().map(Option::as_deref),
            metadata: metadata.as_ref(),
        };
        let event = |changed: &Channel| {
            channel_event(kind::CHANNEL_UPDATED, changed.channel_id, &changed.name, changed.topic.as_deref())
        };
        let (changed, recorded) = self
            .core
            .store
            .update_channel(scope, update, self.core.now(), event)
            .await?
            // Archived between the two statements.
            .ok_or(EngineError::Invalid(InvalidInput::ChannelArchived(channel.name)))?;
        self.core.announce(recorded);
        Ok(changed)
    }

    /// Archives a channel; idempotent.
    ///
    /// # Errors
    /// When the name is unknown, or is `general`.
    pub async fn archive(&self, scope: WorkspaceScope, name: &str) -> EngineResult<()> {
        let channel = self.by_name(scope, name).await?;
        if channel.name == names::GENERAL_CHANNEL {
            return Err(EngineError::Invalid(InvalidInput::ArchivedGeneral));
        }
        let data = ChannelArchived { channel: ChannelName { name: &channel.name } };
        let event = Event::new(kind::CHANNEL_ARCHIVED, data.to_value()).in_channel(channel.channel_id, channel.name);
        if let Some(recorded) =
            self.core.store.archive_channel(scope, channel.channel_id, self.core.now(), event).await?
        {
            self.core.announce(recorded);
        }
        // Also for a channel that was archived before: the earlier hint may have been lost.
        self.core.hints.members_changed(scope, channel.channel_id);
        Ok(())
    }

    /// Adds the caller to a channel. Returns the channel's name, and true if the caller was a member before.
    ///
    /// # Errors
    /// When there is no such channel or it is archived.
    pub async fn join(&self, caller: &AgentCaller, name: &str) -> EngineResult<(String, bool)> {
        self.core.authorize(caller, Operation::Join).await?;
        let channel = self.open_channel(caller.scope, name).await?;
        let already = self.add_member(caller.scope, &channel, caller.agent_id, &caller.name).await?;
        Ok((channel.name, already))
    }

    /// Adds an agent to a channel in its own name.
    ///
    /// # Errors
    /// When there is no such channel or it is archived.
    pub(crate) async fn add_agent(
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

    /// Adds another agent to a channel. Returns the channel's name.
    ///
    /// # Errors
    /// When there is no such channel or agent, the channel is archived, the caller is no member or may not join
    /// channels, or that is closed to the invited agent by itself.
    pub async fn invite(&self, caller: &AgentCaller, name: &str, invitee: &str) -> EngineResult<String> {
        self.core.authorize(caller, Operation::Join).await?;
        let channel = self.open_channel(caller.scope, name).await?;
        if !self.core.store.is_member(caller.scope, channel.channel_id, caller.agent_id).await? {
            return Err(EngineError::Forbidden(Denial::NotAMember(channel.name)));
        }
        let invitee = self.agents.by_name(caller.scope, invitee).await?;
        if invitee.rights.get(Right::Join) == Some(false) {
            return Err(EngineError::Forbidden(Denial::Refused(Refusal::Join)));
        }
        self.add_member(caller.scope, &channel, invitee.id, &invitee.name).await?;
        Ok(channel.name)
    }

    /// Removes the caller from a channel; idempotent.
    ///
    /// # Errors
    /// When there is no such channel.
    pub async fn leave(&self, caller: &AgentCaller, name: &str) -> EngineResult<()> {
        let channel = self.by_name(caller.scope, name).await?;
        let event = member_event(kind::MEMBER_LEFT, &channel, caller.agent_id, &caller.name);
        let member = MemberKey { channel: channel.channel_id, agent: caller.agent_id };
        if let Some(recorded) = self.core.store.leave_channel(caller.scope, member, self.core.now(), event).await? {
            self.core.hints.members_changed(caller.scope, channel.channel_id);
            self.core.announce(recorded);
        }
        Ok(())
    }

    /// Mutes or unmutes a channel for the caller. Returns the channel's name.
    ///
    /// # Errors
    /// When there is no such channel or the caller is no member.
    pub async fn set_muted(&self, caller: &AgentCaller, name: &str, muted: bool) -> EngineResult<String> {
        let channel = self.by_name(caller.scope, name).await?;
        let kind = if muted { kind::MEMBER_CHANNEL_MUTED } else { kind::MEMBER_CHANNEL_UNMUTED };
        let event = member_event(kind, &channel, caller.agent_id, &caller.name);
        let member = MemberKey { channel: channel.channel_id, agent: caller.agent_id };
        match self.core.store.set_muted(caller.scope, member, muted, self.core.now(), event).await? {
            Some(recorded) => self.core.announce(recorded),
            None => return Err(EngineError::Forbidden(Denial::NotAMember(channel.name))),
        }
        self.core.hints.members_changed(caller.scope, channel.channel_id);
        Ok(channel.name)
    }

    /// Finds a channel that is not archived.
    pub(crate) async fn open_channel(&self, scope: WorkspaceScope, name: &str) -> EngineResult<Channel> {
        let channel = self.by_name(scope, name).await?;
        if channel.archived_at.is_some() {
            return Err(EngineError::Invalid(InvalidInput::ChannelArchived(channel.name)));
        }
        Ok(channel)
    }

    /// Adds a member; returns true if it was one before.
    async fn add_member(
        &self,
        scope: WorkspaceScope,
        channel: &Channel,
        agent: AgentId,
        agent_name: &str,
    ) -> EngineResult<bool> {
        if only_recipient(&channel.name).is_some_and(|recipient| recipient != agent) {
            return Err(EngineError::Forbidden(Denial::OnlyRecipient));
        }
        let event = member_event(kind::MEMBER_JOINED, channel, agent, agent_name);
        let member = MemberKey { channel: channel.channel_id, agent };
        match self.core.store.join_channel(scope, member, self.core.now(), event).await? {
            JoinOutcome::Joined(recorded) => {
                self.core.hints.members_changed(scope, channel.channel_id);
                self.core.announce(recorded);
                Ok(false)
            }
            JoinOutcome::AlreadyMember => Ok(true),
            JoinOutcome::Refused => {
                // Lost against archiving or deletion; find out which.
                self.open_channel(scope, &channel.name).await?;
                Err(EngineError::NotFound(Missing::Agent(agent.to_string())))
            }
        }
    }
}

fn check_topic(topic: Option<&str>) -> EngineResult<()> {
    Ok(topic.map_or(Ok(()), |topic| check_length("topic", topic, MAX_TOPIC_BYTES))?)
}

fn channel_event(kind: &'static str, id: ChannelId, name: &str, topic: Option<&str>) -> Event {
    let data = ChannelChanged { channel: ChannelWithTopic { name, topic } };
    Event::new(kind, data.to_value()).in_channel(id, name)
}

/// Creates an event about a member of a channel.
pub(crate) fn member_event(kind: &'static str, channel: &Channel, agent: AgentId, agent_name: &str) -> Event {
    let data = MemberChanged { channel: &channel.name, agent_name, agent_id: agent };
    Event::new(kind, data.to_value()).in_channel(channel.channel_id, channel.name.clone()).by_agent(agent)
}
