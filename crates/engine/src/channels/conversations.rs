//! Direct-message conversations: opening, listing, reading, and participants.

use relay_domain::{
    AgentId, ChannelId, ConversationId, WorkspaceScope,
    access::rights::Operation,
    channels::{
        ChannelKind, Conversation, LastMessage, ListedConversation, MAX_PARTICIPANTS, direct_names, group_channel_name,
    },
    events::kind,
    messages::{Message, MessagePage},
    names::{MAX_TITLE_BYTES, check_length},
    observers::ObserverFilters,
};
use relay_store::{
    IdempotencyKey, JoinOutcome, MemberKey, NewConversation, OpenOutcome, events::Event, messages::pages::ChannelKey,
};
use relay_wire::{
    channels::conversation::{CreateGroupBody, Group, Participant, StoredGroup},
    events::data::ParticipantChanged,
    field::ToValue as _,
};

use super::Channels;
use crate::{
    EngineError, EngineResult,
    access::{
        callers::AgentCaller,
        idempotency::{ClientKey, Replay},
    },
    error::{Conflict, Denial, Missing},
    parts::Parts,
};

/// Outcome of a request for a group conversation.
#[derive(Debug)]
pub enum CreatedGroup {
    /// Created by this request.
    Created(StoredGroup),
    /// Created by an earlier request with the same key.
    Replayed(Replay),
}

impl CreatedGroup {
    pub(crate) fn id(&self) -> Option<&str> {
        match self {
            Self::Created(StoredGroup(data)) | Self::Replayed(Replay { data, .. }) => data["id"].as_str(),
        }
    }
}

impl Channels {
    /// Returns the conversation of two agents (or of one with itself), creating it on first use.
    pub async fn open_dm(&self, scope: WorkspaceScope, a: AgentId, b: AgentId) -> EngineResult<Conversation> {
        let names = direct_names(scope.workspace_id(), a, b);
        // One-to-one conversations keep their members, so an existing one is complete.
        if let Some(row) = self.core.store.conversation(scope, names.conversation.as_str()).await? {
            return Ok(row);
        }
        let both = [a, b];
        let new = NewConversation {
            channel: ChannelId::new(self.core.next_id()),
            channel_name: &names.channel_name,
            channel_kind: ChannelKind::Direct,
            conversation: &names.conversation,
            title: None,
            created_by: a,
            members: if a == b { &both[..1] } else { &both },
            key: None,
        };
        match self.core.store.open_conversation(scope, &new).await? {
            OpenOutcome::Open(row) => Ok(row),
            // Cannot happen without a key.
            OpenOutcome::KeyUsed => Err(EngineError::Conflict(Conflict::IdempotencyInProgress)),
        }
    }

    /// Returns a conversation that the caller takes part in.
    ///
    /// # Errors
    /// When the id is unknown, or the caller takes no part in it.
    pub async fn own_conversation(&self, caller: &AgentCaller, id: &str) -> EngineResult<Conversation> {
        let row = self
            .core
            .store
            .conversation(caller.scope, id)
            .await?
            .ok_or(EngineError::NotFound(Missing::Conversation))?;
        // Not from the cached audience: only commits compare its version, and this is a read.
        if self.core.store.is_member(caller.scope, row.channel_id, caller.agent_id).await? {
            Ok(row)
        } else {
            Err(EngineError::Forbidden(Denial::NotAParticipant))
        }
    }

    /// Lists at most `limit` of the caller's conversations, most recently active first.
    pub async fn conversations(&self, caller: &AgentCaller, limit: i64) -> EngineResult<Parts<ListedConversation>> {
        let rows = self.core.store.conversations(caller.scope, caller.agent_id, limit).await?;
        self.core.read_texts(caller.scope, rows, |row| row.last_message.as_mut().map(LastMessage::text_slot)).await
    }

    /// Lists the messages of a conversation that the caller takes part in, newest first.
    ///
    /// # Errors
    /// When the id is unknown, or the caller takes no part in it.
    pub async fn conversation_messages(
        &self,
        caller: &AgentCaller,
        id: &str,
        page: MessagePage,
    ) -> EngineResult<Parts<Message>> {
        let (key, all) = (ChannelKey::Conversation(id, caller.agent_id), ObserverFilters::default());
        let found = self.core.read_channel_page(caller.scope, key, page, &all).await?;
        match found.ok_or(EngineError::NotFound(Missing::Conversation))? {
            found if found.is_readable => Ok(found.messages.map(|listed| listed.message)),
            _ => Err(EngineError::Forbidden(Denial::NotAParticipant)),
        }
    }

    /// Creates a group, or finds the one that an earlier request with this key created.
    pub(crate) async fn group_under_key(
        &self,
        caller: &AgentCaller,
        request: &CreateGroupBody,
        key: Option<&ClientKey>,
    ) -> EngineResult<CreatedGroup> {
        let scope = caller.scope;
        check_length("name", request.name.as_deref().unwrap_or_default(), MAX_TITLE_BYTES)?;
        let key = key.map(|key| key.stored(&caller.agent_id.to_string(), "dm.group", "-"));
        // Before the members are resolved: one of them may have been deleted since the first request.
        if let Some(replay) = self.replayed_group(scope, key).await? {
            return Ok(replay);
        }
        let members = self.group_members(caller, &request.participants).await?;
        let channel = self.core.next_id();
        let conversation = ConversationId::new(channel.to_string());
        let participants = members
            .iter()
            .map(|(name, id)| Participant { agent_id: id.to_string(), agent_name: name.clone() })
            .collect();
        let group = Group {
            id: conversation.to_string(),
            channel_id: channel.to_string(),
            dm_type: "group".to_owned(),
            name: request.name.clone(),
            participants,
            created_at: self.core.now().into(),
        };
        // Stored as it is sent: a repeated request gets the same bytes.
        let data = group.to_value();
        let ids: Vec<AgentId> = members.iter().map(|(_, id)| *id).collect();
        let new = NewConversation {
            channel: ChannelId::new(channel),
            channel_name: &group_channel_name(&conversation),
            channel_kind: ChannelKind::Group,
            conversation: &conversation,
            title: request.name.as_deref(),
            created_by: caller.agent_id,
            members: &ids,
            key: key.map(|key| (key, &data)),
        };
        match self.core.store.open_conversation(scope, &new).await? {
            OpenOutcome::Open(_) => Ok(CreatedGroup::Created(StoredGroup(data))),
            // A request with the same key committed first.
            OpenOutcome::KeyUsed => {
                self.replayed_group(scope, key).await?.ok_or(EngineError::Conflict(Conflict::IdempotencyInProgress))
            }
        }
    }

    /// Adds an agent to a group of the caller's. Returns true if it took part already.
    ///
    /// # Errors
    /// When the caller may not send, the conversation or the agent is unknown, the caller takes no part in it, it is no
    /// group's, or it is full.
    pub async fn add_participant(&self, caller: &AgentCaller, id: &str, agent_name: &str) -> EngineResult<bool> {
        self.core.authorize(caller, Operation::Send).await?;
        let conversation = self.own_group(caller, id).await?;
        let (agent, name) = self.participant_of_name(caller.scope, agent_name).await?;
        // Counted without a lock: two concurrent additions may exceed the limit by one.
        let count = self.core.store.participant_count(caller.scope, conversation.channel_id).await?;
        if count >= i64::try_from(MAX_PARTICIPANTS).unwrap_or(i64::MAX)
            && !self.core.store.is_member(caller.scope, conversation.channel_id, agent).await?
        {
            return Err(too_many_participants());
        }
        let event = participant_event(kind::MEMBER_JOINED, &conversation, agent, &name);
        let member = MemberKey { channel: conversation.channel_id, agent };
        match self.core.store.join_channel(caller.scope, member, self.core.now(), event).await? {
            JoinOutcome::Joined(recorded) => {
                self.core.hints.members_changed(caller.scope, conversation.channel_id);
                self.core.announce(recorded);
                Ok(false)
            }
            JoinOutcome::AlreadyMember => Ok(true),
            // Groups are never archived, so the agent was deleted meanwhile.
            JoinOutcome::Refused => Err(EngineError::NotFound(Missing::Agent(name))),
        }
    }

    /// Removes an agent from a group of the caller's; idempotent.
    ///
    /// # Errors
    /// When the caller may not send and does not leave itself, the conversation or the agent is unknown, the caller
    /// takes no part in it, or it is no group's.
    pub async fn remove_participant(&self, caller: &AgentCaller, id: &str, agent_name: &str) -> EngineResult<()> {
        if agent_name.strip_prefix('@').unwrap_or(agent_name) != &*caller.name {
            self.core.authorize(caller, Operation::Send).await?;
        }
        let conversation = self.own_group(caller, id).await?;
        let (agent, name) = self.participant_of_name(caller.scope, agent_name).await?;
        let event = participant_event(kind::MEMBER_LEFT, &conversation, agent, &name);
        let member = MemberKey { channel: conversation.channel_id, agent };
        if let Some(recorded) = self.core.store.leave_channel(caller.scope, member, self.core.now(), event).await? {
            self.core.hints.members_changed(caller.scope, conversation.channel_id);
            self.core.announce(recorded);
        }
        Ok(())
    }

    async fn own_group(&self, caller: &AgentCaller, id: &str) -> EngineResult<Conversation> {
        let conversation = self.own_conversation(caller, id).await?;
        match conversation.channel_kind {
            ChannelKind::Group => Ok(conversation),
            ChannelKind::Channel | ChannelKind::Direct => {
                Err(EngineError::invalid_request("a one-to-one conversation has two participants"))
            }
        }
    }

    async fn participant_of_name(&self, scope: WorkspaceScope, name: &str) -> EngineResult<(AgentId, String)> {
        let name = name.strip_prefix('@').unwrap_or(name);
        let found = self.core.store.agent_ids(scope, &[name.to_owned()]).await?.into_iter().next();
        found.map(|(name, id)| (id, name)).ok_or_else(|| EngineError::NotFound(Missing::Agent(name.to_owned())))
    }

    /// Returns the ids of the named agents and the caller, without duplicates.
    async fn group_members(&self, caller: &AgentCaller, names: &[String]) -> EngineResult<Vec<(String, AgentId)>> {
        if names.is_empty() {
            return Err(EngineError::invalid_request("participants must name at least one agent"));
        }
        let mut wanted: Vec<String> =
            names.iter().map(|name| name.strip_prefix('@').unwrap_or(name).to_owned()).collect();
        wanted.push(caller.name.to_string());
        wanted.sort();
        wanted.dedup();
        if wanted.len() > MAX_PARTICIPANTS {
            return Err(too_many_participants());
        }
        // One read for all names; the number of rows is bounded by the participants.
        let found = self.core.store.agent_ids(caller.scope, &wanted).await?;
        match wanted.into_iter().find(|name| !found.iter().any(|(known, _)| known == name)) {
            Some(unknown) => Err(EngineError::NotFound(Missing::Agent(unknown))),
            None => Ok(found),
        }
    }

    async fn replayed_group(
        &self,
        scope: WorkspaceScope,
        key: Option<IdempotencyKey>,
    ) -> EngineResult<Option<CreatedGroup>> {
        let Some(key) = key else { return Ok(None) };
        Ok(self.core.replay(scope, &key).await?.map(CreatedGroup::Replayed))
    }
}

/// Creates the event of an agent that joined or left a conversation.
fn participant_event(kind: &'static str, to: &Conversation, agent: AgentId, name: &str) -> Event {
    let conversation = to.conversation_id.as_str();
    let data =
        ParticipantChanged { conversation_id: conversation, channel: &to.name, agent_name: name, agent_id: agent };
    Event::new(kind, data.to_value()).in_conversation(Some(conversation.to_owned())).by_agent(agent)
}

fn too_many_participants() -> EngineError {
    EngineError::invalid_request(format!("a conversation has at most {MAX_PARTICIPANTS} participants"))
}
