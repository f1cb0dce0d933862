//! Posting: from a [`Draft`] to a committed message.
//!
//! Recipients are resolved from a cached membership snapshot. The commit checks the version of that snapshot, and a
//! send whose audience has changed is resolved again, so that a join answered anywhere counts for the next post
//! anywhere.

pub mod batch;
mod full_mailboxes;
mod replay;
#[cfg(test)]
mod tests;

use std::{iter, sync::Arc};

use relay_domain::{
    AgentId, ConversationId, JsonText, MessageId, WorkspaceScope,
    access::rights::{Actor, Operation},
    agents::{AgentKind, address},
    channels::{ChannelKind, direct_names},
    files::MAX_ATTACHMENTS,
    mailboxes::{
        dead_letter::TTL_BOUNDS,
        delivery::{Mode, Reason},
    },
    messages::{Message, client_metadata, extract_mentions, with_from_address},
    names::{MAX_AGENT_NAME_BYTES, MAX_TEXT_BYTES, check_json_length, check_length, check_name, strip_hash},
};
use relay_store::{
    IdempotencyKey,
    channels::audience::{Audience, AudienceKey, Member},
    events::Event,
    messages::batch::{NewRecipient, NewSend},
};
use relay_wire::{messages::payload, nodes::deliver_frame::FRAME_LIMIT};
use serde_json::Value;
use tokio::{sync::oneshot, time::Instant};

use super::Messages;
use crate::{
    EngineError, EngineResult,
    access::{callers::AgentCaller, idempotency::ClientKey, rights::RightsCaller},
    channels::audiences::AudienceSource,
    error::{BadCredential, Conflict, Denial, InvalidInput, Missing, TooLarge},
    messages::{
        committer::{CommitReply, PendingSend, Sequence},
        fanouts::wait_for_preceding,
    },
};

/// Reply of the committer that has not come yet.
type QueuedReply = oneshot::Receiver<EngineResult<CommitReply>>;

/// Bound of the resolutions of one send. Each further one means that the channel changed within milliseconds.
const MAX_RESOLUTIONS: usize = 8;

/// Above this size of text and extras the exact frame is encoded to check its limit. Below it, even the worst JSON
/// escaping of both copies in a conversation's frame fits.
const ALWAYS_FITS_BYTES: usize = 60 * 1024;

/// Content of a post.
#[derive(Debug, Clone, Default)]
pub struct Draft {
    pub text: String,
    /// Rich blocks: an array.
    pub blocks: Option<JsonText>,
    /// Metadata of the message: an object.
    pub data: Option<JsonText>,
    /// Ids of complete files of the workspace, without duplicates.
    pub attachments: Vec<String>,
    pub mode: Mode,
    /// Free text of the client.
    pub content_type: Option<String>,
    /// Lifetime of its deliveries, in milliseconds; the workspace's default when absent.
    pub ttl_ms: Option<i64>,
}

/// Committed message: of this request, or of the first one with the same key.
#[derive(Debug, Clone)]
pub struct PostedMessage {
    pub message: Message,
    /// True if this repeats the response to an earlier request.
    pub replayed: bool,
    /// Recipient of a one-to-one message, by name.
    pub to: Option<String>,
}

/// Post as its committed form is built from it.
pub(super) struct PostRequest {
    pub(super) target: Target,
    pub(super) draft: Draft,
    pub(super) key: Option<ClientKey>,
    /// Events that are recorded with the message.
    pub(super) events: Vec<Event>,
    /// Id taken when the request arrived.
    pub(super) arrived: MessageId,
}

/// Author of a post.
#[derive(Debug, Clone)]
pub(super) struct Sender {
    pub(super) scope: WorkspaceScope,
    pub(super) agent_id: AgentId,
    pub(super) name: Arc<str>,
    pub(super) kind: AgentKind,
    pub(super) actor: Actor,
    pub(super) token_generation: Option<i64>,
    /// Author without a registration (a webhook): the commit does not check that it exists.
    pub(super) is_hidden: bool,
}

impl<'a> From<&'a Sender> for RightsCaller<'a> {
    fn from(sender: &'a Sender) -> Self {
        Self { scope: sender.scope, actor: sender.actor, name: &sender.name }
    }
}

impl From<&AgentCaller> for Sender {
    fn from(caller: &AgentCaller) -> Self {
        Self {
            scope: caller.scope,
            agent_id: caller.agent_id,
            name: Arc::clone(&caller.name),
            kind: caller.kind,
            actor: Actor::Agent { id: caller.agent_id, rights: caller.rights },
            token_generation: Some(caller.token_generation),
            is_hidden: false,
        }
    }
}

/// Target of a post.
#[derive(Debug, Clone)]
pub enum Target {
    /// Channel, by name; a leading `#` is dropped.
    Channel(String),
    /// Conversation that the author takes part in, by id.
    Conversation(String),
    /// Agent, by name; a leading `@` is dropped, `@self` is the author. The conversation is opened if needed.
    Agent(String),
    /// Thread of a message. A reply to a reply attaches to its root.
    Thread(MessageId),
}

impl Target {
    /// Returns the target in the form that is looked up.
    fn normalize(self, author: &str) -> EngineResult<Self> {
        Ok(match self {
            Self::Channel(name) => Self::Channel(strip_hash(&name).to_owned()),
            Self::Agent(to) => {
                let to = if to == "@self" { author } else { to.strip_prefix('@').unwrap_or(&to) };
                check_name("to", to, MAX_AGENT_NAME_BYTES)?;
                Self::Agent(to.to_owned())
            }
            Self::Conversation(_) | Self::Thread(_) => self,
        })
    }

    /// Returns the stored form of an idempotency key: specific to one sender, operation and target.
    fn stored_key(&self, sender: &Sender, key: &ClientKey) -> IdempotencyKey {
        let (operation, about) = match self {
            Self::Channel(name) => ("channel.post", name.clone()),
            Self::Conversation(id) => ("conversation.post", id.clone()),
            Self::Agent(_) => ("dm.post", String::new()),
            Self::Thread(id) => ("thread.post", id.to_string()),
        };
        key.stored(&sender.agent_id.to_string(), operation, &about)
    }
}

impl Messages {
    /// Posts as an agent.
    ///
    /// # Errors
    /// When the target is unknown or archived, the draft is invalid, its frame would exceed
    /// [`relay_wire::nodes::deliver_frame::FRAME_LIMIT`], the key was used with another body, or the engine is
    /// overloaded.
    pub async fn post(
        &self,
        author: &AgentCaller,
        target: Target,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<PostedMessage> {
        let target = target.normalize(&author.name)?;
        let arrived = self.next_arrival();
        self.post_as(&author.into(), PostRequest { target, draft, key, events: Vec::new(), arrived }).await
    }

    /// Returns the id of a request that arrives now.
    pub(super) fn next_arrival(&self) -> MessageId {
        MessageId::new(self.core.next_id())
    }

    /// Posts a draft. When it fails for good, a post that was committed under the same key is returned instead.
    pub(super) async fn post_as(&self, sender: &Sender, request: PostRequest) -> EngineResult<PostedMessage> {
        check_draft(&request.draft)?;
        self.core.authorize(sender, Operation::Send).await?;
        match self.commit_resolved(sender, &request).await {
            Err(error) => self.find_post_after(error, sender, &request).await,
            posted => posted,
        }
    }

    /// Resolves the target and commits the send, again while the audience changes in between.
    async fn commit_resolved(&self, sender: &Sender, request: &PostRequest) -> EngineResult<PostedMessage> {
        let attachments = self.files.attachments(sender.scope, &request.draft.attachments).await?;
        for source in resolutions() {
            let (audience, thread) = self.resolve_target(sender, &request.target, source).await?;
            let (send, names) = self.build_send(sender, &audience, thread, request, &attachments)?;
            let reply = self.commit_send(send, names).await?;
            if let Some(posted) = self.read_reply(sender, request, &audience, reply).await? {
                return Ok(posted);
            }
        }
        Err(EngineError::Overloaded)
    }

    /// Returns the message of a reply; `None` if the send has to be resolved and submitted again.
    async fn read_reply(
        &self,
        sender: &Sender,
        request: &PostRequest,
        audience: &Audience,
        reply: CommitReply,
    ) -> EngineResult<Option<PostedMessage>> {
        let posted = match reply {
            CommitReply::Committed { send, full } => {
                if !full.is_empty() {
                    self.notify_mailbox_full(sender, &send, audience, &full);
                }
                let to = direct_recipient(audience, sender);
                PostedMessage { message: send.message, replayed: false, to }
            }
            CommitReply::Repeated { message } => {
                let to = direct_recipient(audience, sender);
                PostedMessage { message: *message, replayed: true, to }
            }
            CommitReply::Replayed { response } => self.replay_post(sender, response).await?,
            CommitReply::KeyReused => return Err(EngineError::Conflict(Conflict::IdempotencyKeyReused)),
            CommitReply::Stale => {
                // A deleted recipient changes the audience too, so a second resolution leaves it out.
                self.audiences.forget(sender.scope, audience.channel_id);
                return Ok(None);
            }
            CommitReply::Preceded => return Ok(None),
            CommitReply::SenderBusy => {
                // The open fan-out may be this very post.
                if let Some(posted) = self.find_repeated_post(sender, &request.target, request.key.as_ref()).await? {
                    return Ok(Some(posted));
                }
                let author = (sender.scope, sender.agent_id);
                wait_for_preceding(&self.core.store, author, request.arrived).await?;
                return Ok(None);
            }
        };
        Ok(Some(posted))
    }

    /// Queues a send for the committer and waits for its reply.
    async fn commit_send(&self, send: NewSend, names: Vec<Arc<str>>) -> EngineResult<CommitReply> {
        let answer = self.queue_send(send, names, None).await?;
        let asked_at = Instant::now();
        let answer = answer.await;
        // For the request's log line: another task commits several requests at once.
        tracing::debug!(target: "relay::commit", elapsed_secs = asked_at.elapsed().as_secs_f64(), "waited for a commit");
        answer.map_err(|_| EngineError::OutcomeUnknown)?
    }

    /// Queues a send for the committer, which will reply to it.
    async fn queue_send(
        &self,
        send: NewSend,
        names: Vec<Arc<str>>,
        sequence: Option<Arc<Sequence>>,
    ) -> EngineResult<QueuedReply> {
        let (reply, answer) = oneshot::channel();
        let traceparent = relay_trace::current_traceparent();
        let family = self.core.family(send.scope).await;
        self.committer.push(PendingSend { send, family, names, traceparent, reply, sequence })?;
        Ok(answer)
    }

    /// Returns the audience of a target and the root of its thread.
    async fn resolve_target(
        &self,
        sender: &Sender,
        target: &Target,
        source: AudienceSource,
    ) -> EngineResult<(Arc<Audience>, Option<MessageId>)> {
        if source == AudienceSource::Storage
            && let Some(generation) = sender.token_generation
        {
            // The commit refuses a sender whose token was rotated meanwhile; so does this.
            let now = self.core.store.agent_generation(sender.scope, sender.agent_id).await?;
            if now != Some(generation) {
                return Err(EngineError::Unauthenticated(BadCredential::UnknownToken {
                    kind: relay_domain::access::token::TokenKind::Agent,
                }));
            }
        }
        let scope = sender.scope;
        let resolved = match target {
            Target::Channel(name) => {
                let audience = self.audiences.load(scope, AudienceKey::Name(name.clone()), source).await?;
                (audience.ok_or_else(|| EngineError::NotFound(Missing::Channel(name.clone())))?, None)
            }
            Target::Conversation(id) => {
                let audience = self
                    .audiences
                    .load(scope, AudienceKey::Conversation(ConversationId::new(id.as_str())), source)
                    .await?;
                let audience = audience.ok_or_else(|| EngineError::NotFound(Missing::Conversation))?;
                if !is_participant(&audience, sender) {
                    return Err(EngineError::Forbidden(Denial::NotAParticipant));
                }
                (audience, None)
            }
            Target::Agent(name) => (self.direct_audience(sender, name, source).await?, None),
            Target::Thread(parent) => {
                let not_found = || EngineError::NotFound(Missing::Message);
                let message = self.core.store.message_head(scope, *parent).await?.ok_or_else(not_found)?;
                let key = AudienceKey::Id(message.channel_id);
                let audience = self.audiences.load(scope, key, source).await?.ok_or_else(not_found)?;
                if audience.channel_kind.is_conversation() && !is_participant(&audience, sender) {
                    return Err(not_found());
                }
                (audience, Some(message.thread_id.unwrap_or(*parent)))
            }
        };
        if resolved.0.archived {
            return Err(EngineError::Invalid(InvalidInput::ChannelArchived(resolved.0.name.clone())));
        }
        Ok(resolved)
    }

    /// Returns the conversation with an agent, opening it if needed.
    async fn direct_audience(&self, sender: &Sender, to: &str, source: AudienceSource) -> EngineResult<Arc<Audience>> {
        let known = &self.audiences.direct;
        let key = (sender.scope, sender.agent_id, to.to_owned());
        if source == AudienceSource::Cache
            && let Some(audience) = known.get(&key)
        {
            return Ok(audience);
        }
        let ids = self.core.store.agent_ids(sender.scope, &[to.to_owned()]).await?;
        let (_, recipient) =
            ids.into_iter().next().ok_or_else(|| EngineError::NotFound(Missing::Agent(to.to_owned())))?;
        // Idempotent: another gateway that opens the same conversation derives the same names.
        self.channels.open_dm(sender.scope, sender.agent_id, recipient).await?;
        let names = direct_names(sender.scope.workspace_id(), sender.agent_id, recipient);
        let audience = self
            .audiences
            .load(sender.scope, AudienceKey::Conversation(names.conversation), AudienceSource::Storage)
            .await?
            .ok_or_else(|| EngineError::NotFound(Missing::Agent(to.to_owned())))?;
        known.insert(key, Arc::clone(&audience));
        Ok(audience)
    }

    /// Builds the send, with recipients of the audience's version.
    fn build_send(
        &self,
        sender: &Sender,
        audience: &Audience,
        thread: Option<MessageId>,
        request: &PostRequest,
        attachments: &Value,
    ) -> EngineResult<(NewSend, Vec<Arc<str>>)> {
        let draft = &request.draft;
        let key = request.key.as_ref().map(|key| request.target.stored_key(sender, key));
        let mentioned = extract_mentions(&draft.text);
        let message = Message {
            // The committer assigns the id and the time; the widest id stands in for the size check.
            id: MessageId::new(i64::MAX),
            channel_id: audience.channel_id,
            agent_id: sender.agent_id,
            agent_name: sender.name.to_string(),
            agent_kind: sender.kind,
            thread_id: thread,
            text: draft.text.clone(),
            blocks: draft.blocks.clone(),
            metadata: stored_metadata(audience, sender, draft.data.as_ref()),
            attachments: attachments.clone(),
            mentions: mentioned,
            mode: draft.mode,
            content_type: draft.content_type.clone(),
            created_at: self.core.now(),
            channel_name: audience.name.clone(),
            channel_kind: audience.channel_kind,
            conversation_id: audience.conversation_id.clone(),
        };
        // Before the commit: a committed message that fits into no frame could never be delivered.
        check_frame(&message)?;
        let (recipients, names) = recipients(audience, sender, &message, draft.mode);
        let send = NewSend {
            scope: sender.scope,
            message,
            recipients,
            members_version: audience.members_version,
            token_generation: sender.token_generation,
            hidden_sender: sender.is_hidden,
            key,
            ttl_ms: draft.ttl_ms,
            traceparent: None,
            events: request.events.clone(),
            arrived: request.arrived,
            sequence: None,
        };
        Ok((send, names))
    }
}

/// Returns the sources of a send's audience, one for each resolution. A snapshot that the commit has just rejected is
/// not read from the cache again.
fn resolutions() -> impl Iterator<Item = AudienceSource> {
    iter::once(AudienceSource::Cache).chain(iter::repeat_n(AudienceSource::Storage, MAX_RESOLUTIONS - 1))
}

/// Returns the metadata to store: the client's, and in conversations the address of the author.
fn stored_metadata(audience: &Audience, sender: &Sender, data: Option<&JsonText>) -> JsonText {
    let data = data.map_or_else(JsonText::empty_object, client_metadata);
    let author = audience.members.iter().find(|member| member.agent_id == sender.agent_id);
    match author.and_then(|author| author.machine.as_deref()) {
        Some(machine) => with_from_address(&data, &address(&sender.name, machine)),
        None => data,
    }
}

fn is_participant(audience: &Audience, sender: &Sender) -> bool {
    audience.members.iter().any(|member| member.agent_id == sender.agent_id)
}

fn direct_recipient(audience: &Audience, sender: &Sender) -> Option<String> {
    (audience.channel_kind == ChannelKind::Direct).then(|| {
        let other = audience.members.iter().find(|member| member.agent_id != sender.agent_id);
        other.map_or_else(|| sender.name.to_string(), |member| member.name.clone())
    })
}

/// Selects the recipients: all members but the sender. Members that muted the channel receive only messages that
/// mention them, in threads too.
fn recipients(
    audience: &Audience,
    sender: &Sender,
    message: &Message,
    mode: Mode,
) -> (Vec<NewRecipient>, Vec<Arc<str>>) {
    let named = |member: &Member| message.mentions.contains(&member.name);
    let others = audience.members.iter().filter(|member| member.agent_id != sender.agent_id);
    others
        .filter_map(|member| {
            let (reason, mode) = match (message.thread_id, audience.channel_kind) {
                (Some(_), _) if member.muted && named(member) => (Reason::Mention, Mode::Wait),
                (Some(_), _) if member.muted => return None,
                (Some(_), _) => (Reason::ThreadReply, Mode::Wait),
                (None, ChannelKind::Channel) if named(member) => (Reason::Mention, mode),
                (None, ChannelKind::Channel) if member.muted => return None,
                (None, ChannelKind::Channel) => (Reason::Message, mode),
                (None, ChannelKind::Direct | ChannelKind::Group) => (Reason::Dm, mode),
            };
            Some((NewRecipient { agent_id: member.agent_id, mode, reason }, Arc::from(member.name.as_str())))
        })
        .unzip()
}

pub(crate) fn check_draft(draft: &Draft) -> EngineResult<()> {
    if draft.text.is_empty() {
        return Err(EngineError::invalid_request("text must not be empty"));
    }
    check_length("text", &draft.text, MAX_TEXT_BYTES)?;
    if draft.attachments.len() > MAX_ATTACHMENTS {
        return Err(EngineError::Invalid(InvalidInput::Attachments));
    }
    if draft.blocks.as_ref().is_some_and(|blocks| !blocks.is_array()) {
        return Err(EngineError::invalid_request("blocks must be an array"));
    }
    if draft.data.as_ref().is_some_and(|data| !data.is_object()) {
        return Err(EngineError::invalid_request("data must be an object"));
    }
    let (least, most) = TTL_BOUNDS;
    let is_within =
        |ttl: i64| u128::try_from(ttl).is_ok_and(|ttl| (least.as_millis()..=most.as_millis()).contains(&ttl));
    if draft.ttl_ms.is_some_and(|ttl| !is_within(ttl)) {
        let text = format!("ttl_ms must be {} to {}", least.as_millis(), most.as_millis());
        return Err(EngineError::invalid_request(text));
    }
    check_length("content_type", draft.content_type.as_deref().unwrap_or_default(), 128)?;
    Ok(check_json_length("data", draft.data.as_ref().map_or(0, JsonText::byte_len))?)
}

/// Checks that the message fits into a frame: no message may be accepted that cannot be delivered.
pub(crate) fn check_frame(message: &Message) -> EngineResult<()> {
    if message.held_bytes() <= ALWAYS_FITS_BYTES {
        return Ok(());
    }
    // Names of at most 128 bytes, escaped, and the frame's own keys.
    const FRAME_OVERHEAD: usize = 2048;
    let encoded = payload::payload(message, "").get().len() + FRAME_OVERHEAD;
    if encoded > FRAME_LIMIT { Err(EngineError::TooLarge(TooLarge::Message)) } else { Ok(()) }
}
