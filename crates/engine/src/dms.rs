//! Direct-message conversations: opening, listing, reading, and who takes part.

use relay_domain::{
    AgentId, ChannelId, ConversationId, WorkspaceScope,
    conversation::{MAX_LISTED_CONVERSATIONS, MAX_PARTICIPANTS, direct_names, group_channel_name},
    event,
    names::{MAX_TEXT_BYTES, MAX_TITLE_BYTES, check_length},
    observer::ObserverFilters,
};
pub use relay_store::ListedConversation;
use relay_store::{ConversationRow, KeptAnswer, MessagePage, NewConversation, OpenOutcome, events::NewEvent};
use serde_json::{Value, json};

use crate::{
    Engine, EngineError, EngineResult,
    auth::AgentCaller,
    idempotency::{ClientKey, Replay},
    payload::FRAME_LIMIT,
    render,
    send::Draft,
};

const DIRECT: i16 = 1;
const GROUP: i16 = 2;
/// More than a frame holds beside the text.
const FRAME_REST: usize = 16 * 1024;

/// A conversation, as a send needs it.
#[derive(Debug, Clone)]
pub struct Conversation {
    /// The backing channel.
    pub channel_id: ChannelId,
    /// The backing channel's name.
    pub channel_name: String,
    /// What clients call it.
    pub conversation_id: ConversationId,
    /// Whether it is a group's.
    pub is_group: bool,
    /// Rises with every change of membership.
    pub members_version: i64,
}

impl From<ConversationRow> for Conversation {
    fn from(row: ConversationRow) -> Self {
        Self {
            channel_id: ChannelId::new(row.channel_id),
            channel_name: row.name,
            conversation_id: ConversationId::new(row.conversation_id),
            is_group: row.channel_type == GROUP,
            members_version: row.members_version,
        }
    }
}

/// A request for a group conversation.
#[derive(Debug)]
pub struct CreateGroup {
    /// Names of those who are to take part beside the caller.
    pub participants: Vec<String>,
    /// The group's own name.
    pub title: Option<String>,
    /// The first message; none if empty.
    pub text: Option<String>,
}

/// The answer to a request for a group conversation.
#[derive(Debug)]
pub enum CreatedGroup {
    /// Made now; this is its `data`.
    Made(Value),
    /// Made before, under the same key.
    Replayed(Replay),
}

impl CreatedGroup {
    fn data(&self) -> &Value {
        match self {
            Self::Made(data) | Self::Replayed(Replay { data, .. }) => data,
        }
    }
}

impl Engine {
    /// The conversation of two agents (or of one with itself), made on first use.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn open_dm(&self, scope: WorkspaceScope, a: AgentId, b: AgentId) -> EngineResult<Conversation> {
        let names = direct_names(scope.workspace_id(), a, b);
        // Nobody leaves a one-to-one conversation, so one that is there is complete.
        if let Some(row) = self.store().conversation(scope, names.conversation.as_str()).await? {
            return Ok(row.into());
        }
        let both = [a, b];
        let new = NewConversation {
            channel: ChannelId::new(self.next_id()),
            channel_name: &names.channel_name,
            channel_type: DIRECT,
            conversation: &names.conversation,
            title: None,
            created_by: a,
            members: if a == b { &both[..1] } else { &both },
            key: None,
        };
        match self.store().open_conversation(scope, &new).await? {
            OpenOutcome::Open(row) => Ok(row.into()),
            OpenOutcome::KeyUsed => Err(EngineError::IdempotencyInProgress),
        }
    }

    /// A conversation that the caller takes part in.
    ///
    /// # Errors
    /// When there is none of that id, or the caller takes no part in it.
    pub async fn own_conversation(&self, caller: &AgentCaller, id: &str) -> EngineResult<Conversation> {
        let row = self.store().conversation(caller.scope, id).await?.ok_or(EngineError::ConversationNotFound)?;
        let channel = ChannelId::new(row.channel_id);
        if self.store().is_member(caller.scope, channel, caller.agent_id).await? {
            Ok(row.into())
        } else {
            Err(EngineError::NotAParticipant)
        }
    }

    /// The caller's conversations, the liveliest first.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn conversations(&self, caller: &AgentCaller) -> EngineResult<Vec<ListedConversation>> {
        Ok(self.store().conversations(caller.scope, caller.agent_id, MAX_LISTED_CONVERSATIONS).await?)
    }

    /// The messages of a conversation that the caller takes part in, newest first.
    ///
    /// # Errors
    /// When there is none of that id, or the caller takes no part in it.
    pub async fn conversation_messages(
        &self,
        caller: &AgentCaller,
        id: &str,
        page: MessagePage,
    ) -> EngineResult<Vec<Value>> {
        let conversation = self.own_conversation(caller, id).await?;
        let all = ObserverFilters::default();
        let messages = self.store().channel_messages(caller.scope, conversation.channel_id, page, &all).await?;
        Ok(messages.iter().map(|listed| render::in_conversation(&listed.message)).collect())
    }

    /// Makes a group conversation with the caller in it, and posts its first message; under an
    /// idempotency key, once.
    ///
    /// # Errors
    /// When a participant is unknown, there are too many, the text is too long, or the key was used with
    /// another body. When the first message cannot be committed, the group is there all the same: a
    /// request with the same key finds it and posts the message, one without gets no status.
    pub async fn create_group(
        &self,
        caller: &AgentCaller,
        request: &CreateGroup,
        key: Option<&ClientKey>,
    ) -> EngineResult<CreatedGroup> {
        let text = request.text.as_deref().filter(|text| !text.is_empty());
        if let Some(text) = text {
            check_length("text", text, MAX_TEXT_BYTES)?;
            // Refused before the group is made: a conversation's frame holds the text twice.
            if json!(text).to_string().len() * 2 + FRAME_REST > FRAME_LIMIT {
                return Err(EngineError::PayloadTooLarge);
            }
        }
        let group = self.group_under_key(caller, request, key).await?;
        if let Some(text) = text
            && let Some(id) = group.data()["id"].as_str()
        {
            // Under the same key, which counts for this conversation apart: it is posted once.
            let draft = Draft { text: text.to_owned(), ..Draft::default() };
            let posted = self.post_to_conversation(caller, id, draft, key.cloned()).await;
            // Without a key the whole request once more would make another group.
            posted.map_err(|error| if key.is_none() { error.after_commit() } else { error })?;
        }
        Ok(group)
    }

    async fn group_under_key(
        &self,
        caller: &AgentCaller,
        request: &CreateGroup,
        key: Option<&ClientKey>,
    ) -> EngineResult<CreatedGroup> {
        let scope = caller.scope;
        check_length("name", request.title.as_deref().unwrap_or_default(), MAX_TITLE_BYTES)?;
        let key_hash = key.map(|key| key.hash(&caller.agent_id.to_string(), "dm.group", "-"));
        if let Some(replay) = self.replayed_group(scope, key, key_hash).await? {
            return Ok(replay);
        }
        let members = self.group_members(caller, &request.participants).await?;
        let channel = self.next_id();
        let conversation = ConversationId::new(channel.to_string());
        let data = json!({
            "id": conversation,
            "channel_id": channel.to_string(),
            "dm_type": "group",
            "name": request.title,
            "participants": members.iter().map(|(name, id)| json!({ "agent_id": id, "agent_name": name }))
                .collect::<Vec<_>>(),
            "created_at": render::timestamp(self.now()),
        });
        let ids: Vec<AgentId> = members.iter().map(|(_, id)| *id).collect();
        let new = NewConversation {
            channel: ChannelId::new(channel),
            channel_name: &group_channel_name(&conversation),
            channel_type: GROUP,
            conversation: &conversation,
            title: request.title.as_deref(),
            created_by: caller.agent_id,
            members: &ids,
            key: key.zip(key_hash).map(|(key, key_hash)| KeptAnswer {
                key_hash,
                fingerprint: key.fingerprint(),
                response: &data,
            }),
        };
        match self.store().open_conversation(scope, &new).await? {
            OpenOutcome::Open(_) => Ok(CreatedGroup::Made(data)),
            // A request with the same key was faster.
            OpenOutcome::KeyUsed => {
                self.replayed_group(scope, key, key_hash).await?.ok_or(EngineError::IdempotencyInProgress)
            }
        }
    }

    /// Lets an agent take part in a group of the caller's. `true` when it did already.
    ///
    /// # Errors
    /// When the conversation or the agent is unknown, the caller takes no part in it, it is no group's,
    /// or it is full.
    pub async fn add_participant(&self, caller: &AgentCaller, id: &str, agent_name: &str) -> EngineResult<bool> {
        let conversation = self.own_group(caller, id).await?;
        let (agent, name) = self.participant_of_name(caller.scope, agent_name).await?;
        let count = self.store().participant_count(caller.scope, conversation.channel_id).await?;
        if count >= i64::try_from(MAX_PARTICIPANTS).unwrap_or(i64::MAX)
            && !self.store().is_member(caller.scope, conversation.channel_id, agent).await?
        {
            return Err(too_many());
        }
        let event = participant_event(event::MEMBER_JOINED, &conversation, agent, &name);
        let added = self.store().add_participant(caller.scope, conversation.channel_id, agent, self.now(), event);
        let Some(recorded) = added.await? else { return Ok(true) };
        self.hints().members_changed(caller.scope, conversation.channel_id);
        self.announce(recorded);
        Ok(false)
    }

    /// Ends an agent's part in a group of the caller's; one that takes no part is fine.
    ///
    /// # Errors
    /// When the conversation or the agent is unknown, the caller takes no part in it, or it is no group's.
    pub async fn remove_participant(&self, caller: &AgentCaller, id: &str, agent_name: &str) -> EngineResult<()> {
        let conversation = self.own_group(caller, id).await?;
        let (agent, name) = self.participant_of_name(caller.scope, agent_name).await?;
        let event = participant_event(event::MEMBER_LEFT, &conversation, agent, &name);
        let left = self.store().remove_participant(caller.scope, conversation.channel_id, agent, self.now(), event);
        if let Some(recorded) = left.await? {
            self.hints().members_changed(caller.scope, conversation.channel_id);
            self.announce(recorded);
        }
        Ok(())
    }

    async fn own_group(&self, caller: &AgentCaller, id: &str) -> EngineResult<Conversation> {
        let conversation = self.own_conversation(caller, id).await?;
        if conversation.is_group {
            Ok(conversation)
        } else {
            Err(EngineError::InvalidRequest("a one-to-one conversation has two participants".into()))
        }
    }

    async fn participant_of_name(&self, scope: WorkspaceScope, name: &str) -> EngineResult<(AgentId, String)> {
        let name = name.strip_prefix('@').unwrap_or(name);
        let found = self.store().agent_ids(scope, &[name.to_owned()]).await?.into_iter().next();
        found.map(|(name, id)| (id, name)).ok_or_else(|| EngineError::AgentNotFound(name.to_owned()))
    }

    /// The named agents and the caller, each once.
    async fn group_members(&self, caller: &AgentCaller, names: &[String]) -> EngineResult<Vec<(String, AgentId)>> {
        if names.is_empty() {
            return Err(EngineError::InvalidRequest("participants must name at least one agent".into()));
        }
        let mut wanted: Vec<String> =
            names.iter().map(|name| name.strip_prefix('@').unwrap_or(name).to_owned()).collect();
        wanted.push(caller.name.to_string());
        wanted.sort();
        wanted.dedup();
        if wanted.len() > MAX_PARTICIPANTS {
            return Err(too_many());
        }
        let found = self.store().agent_ids(caller.scope, &wanted).await?;
        match wanted.into_iter().find(|name| !found.iter().any(|(known, _)| known == name)) {
            Some(unknown) => Err(EngineError::AgentNotFound(unknown)),
            None => Ok(found),
        }
    }

    async fn replayed_group(
        &self,
        scope: WorkspaceScope,
        key: Option<&ClientKey>,
        key_hash: Option<[u8; 32]>,
    ) -> EngineResult<Option<CreatedGroup>> {
        let Some((key, hash)) = key.zip(key_hash) else {
            return Ok(None);
        };
        Ok(self.replay(scope, &hash, &key.fingerprint()).await?.map(CreatedGroup::Replayed))
    }
}

/// Somebody has come to a conversation or left it.
fn participant_event(kind: &'static str, to: &Conversation, agent: AgentId, name: &str) -> NewEvent {
    let conversation = to.conversation_id.as_str();
    let data = json!({
        "conversation_id": conversation, "channel": to.channel_name,
        "agent_name": name, "agent_id": agent.to_string(),
    });
    NewEvent::new(kind, data).in_conversation(Some(conversation.to_owned())).by(agent)
}

fn too_many() -> EngineError {
    EngineError::InvalidRequest(format!("a conversation has at most {MAX_PARTICIPANTS} participants"))
}
