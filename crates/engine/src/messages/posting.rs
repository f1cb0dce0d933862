//! Posting: from a draft to a committed message.
//!
//! Recipients are resolved from a cached membership snapshot. The commit checks the version of that snapshot, and a
//! send whose audience has changed is resolved again, so that a join answered anywhere counts for the next post
//! anywhere.

mod replay;

use std::{iter, sync::Arc};

use relay_domain::{
    AgentId, ConversationId, MessageId, WorkspaceScope,
    agents::AgentKind,
    channels::{ChannelKind, direct_names},
    mailboxes::delivery::{Mode, Reason},
    messages::{Message, extract_mentions},
    names::{check_name, strip_hash},
};
use relay_store::{
    channels::audience::{Audience, AudienceKey, Member},
    events::Event,
    messages::{
        batch::{NewKey, NewRecipient, NewSend},
        webhooks::webhook_agent,
    },
};
use relay_wire::{events::data::DeliveryRefused, field::ToValue as _};
use serde_json::{Map, Value};
use tokio::{sync::oneshot, time::Instant};

use super::Messages;
use crate::{
    EngineError, EngineResult,
    access::{
        authentication::{AgentCaller, NodeCaller},
        idempotency::ClientKey,
    },
    channels::audiences::AudienceSource,
    error::{BadCredential, Conflict, Denial, InvalidInput, Missing},
    messages::{
        committer::{CommitReply, PendingSend},
        draft::{check_draft, check_frame},
        webhooks::WebhookCaller,
    },
};

pub use crate::messages::draft::Draft;

/// Bound of the resolutions of one send. Each further one means that the channel changed within milliseconds.
const MAX_RESOLUTIONS: usize = 8;

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
struct PostRequest {
    target: Target,
    draft: Draft,
    key: Option<ClientKey>,
    /// Events that are recorded with the message.
    events: Vec<Event>,
}

impl PostRequest {
    const fn new(target: Target, draft: Draft, key: Option<ClientKey>) -> Self {
        Self { target, draft, key, events: Vec::new() }
    }
}

/// Author of a post.
#[derive(Debug, Clone)]
struct Sender {
    scope: WorkspaceScope,
    agent_id: AgentId,
    name: Arc<str>,
    kind: AgentKind,
    token_generation: Option<i64>,
    /// Author without a registration (a webhook): the commit does not check that it exists.
    is_hidden: bool,
}

impl From<&AgentCaller> for Sender {
    fn from(caller: &AgentCaller) -> Self {
        Self {
            scope: caller.scope,
            agent_id: caller.agent_id,
            name: Arc::clone(&caller.name),
            kind: caller.kind,
            token_generation: Some(caller.token_generation),
            is_hidden: false,
        }
    }
}

#[derive(Debug, Clone)]
enum Target {
    Channel(String),
    Conversation(String),
    /// Agent, by name; the conversation is opened if needed.
    Agent(String),
    /// Thread of a message.
    Thread(MessageId),
}

impl Target {
    /// Returns the stored form of an idempotency key: specific to one sender, operation and target.
    fn key_hash(&self, sender: &Sender, key: &ClientKey) -> [u8; 32] {
        let (operation, about) = match self {
            Self::Channel(name) => ("channel.post", name.clone()),
            Self::Conversation(id) => ("conversation.post", id.clone()),
            Self::Agent(_) => ("dm.post", String::new()),
            Self::Thread(id) => ("thread.post", id.to_string()),
        };
        key.hash(&sender.agent_id.to_string(), operation, &about)
    }
}

impl Messages {
    /// Posts to a channel as an agent.
    ///
    /// # Errors
    /// When the channel is unknown or archived, the draft is invalid, its frame would exceed
    /// [`relay_wire::nodes::deliver_frame::FRAME_LIMIT`], the key was used with another body, or the engine is overloaded.
    pub async fn post_to_channel(
        &self,
        caller: &AgentCaller,
        channel: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<PostedMessage> {
        let target = Target::Channel(strip_hash(channel).to_owned());
        self.post(&caller.into(), PostRequest::new(target, draft, key)).await
    }

    /// Posts to a channel as a node, in the name of an agent that it hosts.
    pub async fn post_as_node(
        &self,
        caller: &NodeCaller,
        from: &str,
        channel: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<PostedMessage> {
        let (agent_id, kind) = self
            .core
            .store
            .agent_on_node(caller.scope, &caller.node_id, from)
            .await?
            .ok_or_else(|| EngineError::NotFound(Missing::Agent(from.to_owned())))?;
        let (scope, name) = (caller.scope, from.into());
        let sender = Sender { scope, agent_id, name, kind, token_generation: None, is_hidden: false };
        self.post(&sender, PostRequest::new(Target::Channel(strip_hash(channel).to_owned()), draft, key)).await
    }

    /// Replies in the thread of a message. A reply to a reply attaches to its root.
    pub async fn reply(
        &self,
        caller: &AgentCaller,
        parent: MessageId,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<PostedMessage> {
        self.post(&caller.into(), PostRequest::new(Target::Thread(parent), draft, key)).await
    }

    /// Sends a direct message to an agent by name; a leading `@` is dropped, `@self` is the caller.
    pub async fn send_dm(
        &self,
        caller: &AgentCaller,
        to: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<PostedMessage> {
        let to = if to == "@self" { &caller.name } else { to.strip_prefix('@').unwrap_or(to) };
        check_name("to", to, relay_domain::names::MAX_AGENT_NAME_BYTES)?;
        self.post(&caller.into(), PostRequest::new(Target::Agent(to.to_owned()), draft, key)).await
    }

    /// Posts to a conversation that the caller takes part in.
    pub async fn post_to_conversation(
        &self,
        caller: &AgentCaller,
        conversation: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<PostedMessage> {
        self.post(&caller.into(), PostRequest::new(Target::Conversation(conversation.to_owned()), draft, key)).await
    }

    /// Posts to the channel of a webhook under an author's name; `events` are recorded with the message.
    pub(crate) async fn post_as_webhook(
        &self,
        caller: &WebhookCaller,
        author: &str,
        draft: Draft,
        events: Vec<Event>,
    ) -> EngineResult<PostedMessage> {
        let sender = Sender {
            scope: caller.scope,
            agent_id: webhook_agent(caller.scope),
            name: author.into(),
            kind: AgentKind::System,
            token_generation: None,
            is_hidden: true,
        };
        let target = Target::Channel(caller.webhook.channel_name.clone());
        self.post(&sender, PostRequest { events, ..PostRequest::new(target, draft, None) }).await
    }

    /// Posts a draft. When it fails for good, a post that was committed under the same key is returned instead.
    async fn post(&self, sender: &Sender, request: PostRequest) -> EngineResult<PostedMessage> {
        check_draft(&request.draft)?;
        match self.commit_resolved(sender, &request).await {
            // The token was rotated meanwhile: it may no longer read earlier posts.
            Err(error @ EngineError::Unauthenticated(BadCredential::UnknownToken { .. })) => Err(error),
            Err(error) if error.is_transient() => Err(error),
            Err(error) => self.find_repeated_post(sender, &request.target, request.key.as_ref()).await?.ok_or(error),
            posted => posted,
        }
    }

    /// Resolves the target and commits the send, again while the audience changes in between.
    async fn commit_resolved(&self, sender: &Sender, request: &PostRequest) -> EngineResult<PostedMessage> {
        let attachments = self.files.attachments(sender.scope, &request.draft.attachments).await?;
        // A snapshot that the commit has just rejected is not read from the cache again.
        for source in
            iter::once(AudienceSource::Cache).chain(iter::repeat_n(AudienceSource::Storage, MAX_RESOLUTIONS - 1))
        {
            let (audience, thread) = self.resolve_target(sender, &request.target, source).await?;
            let (send, names) = self.build_send(sender, &audience, thread, request, &attachments)?;
            match self.commit_send(send, names).await? {
                CommitReply::Committed { send, full } => {
                    self.notify_mailbox_full(sender, &send, &audience, &full);
                    let to = direct_recipient(&audience, sender);
                    return Ok(PostedMessage { message: send.message, replayed: false, to });
                }
                CommitReply::Repeated { message } => {
                    let to = direct_recipient(&audience, sender);
                    return Ok(PostedMessage { message: *message, replayed: true, to });
                }
                CommitReply::Replayed { response } => return self.replay_post(sender, &response).await,
                CommitReply::KeyReused => return Err(EngineError::Conflict(Conflict::IdempotencyKeyReused)),
                // A deleted recipient changes the audience too, so a second resolution leaves it out.
                CommitReply::Stale => self.audiences.forget(sender.scope, audience.channel_id),
            }
        }
        Err(EngineError::Overloaded)
    }

    /// Queues a send for the committer and waits for its reply.
    async fn commit_send(&self, send: NewSend, names: Vec<Arc<str>>) -> EngineResult<CommitReply> {
        let (reply, answer) = oneshot::channel();
        let traceparent = relay_trace::current_traceparent();
        self.committer.push(PendingSend { send, names, traceparent, reply })?;
        let asked_at = Instant::now();
        let answer = answer.await;
        // For the request's log line: another task commits several requests at once.
        tracing::debug!(target: "relay::commit", elapsed_secs = asked_at.elapsed().as_secs_f64(), "waited for a commit");
        answer.map_err(|_| EngineError::OutcomeUnknown)?
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
                let message = self.core.store.message(scope, *parent).await?.ok_or_else(not_found)?.message;
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
        let key = request.key.as_ref().map(|key| NewKey {
            hash: request.target.key_hash(sender, key).to_vec(),
            fingerprint: key.fingerprint().to_vec(),
        });
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
            metadata: draft.data.clone().unwrap_or_else(|| Map::new().into()),
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
        };
        Ok((send, names))
    }

    /// Notifies the sender of full mailboxes (docs/protocol/node.md, "Expiry and mailbox depth"). The send itself
    /// succeeded.
    fn notify_mailbox_full(&self, sender: &Sender, send: &NewSend, audience: &Audience, full: &[usize]) {
        for position in full {
            let Some(recipient) = send.recipients.get(*position) else { continue };
            let name = audience.members.iter().find(|m| m.agent_id == recipient.agent_id).map(|m| &m.name);
            metrics::counter!(relay_domain::metric_names::DELIVERIES_REFUSED).increment(1);
            self.core.hints.notify(
                sender.scope,
                vec![sender.agent_id],
                "agent",
                "delivery.failed",
                DeliveryRefused {
                    delivery_id: None,
                    message_id: send.message.id,
                    target_agent_id: recipient.agent_id,
                    target_agent_name: name.map(String::as_str),
                    reason: "depth_cap",
                    error: "mailbox depth cap exceeded",
                    retryable: false,
                }
                .to_value(),
            );
        }
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

/// Selects the recipients: all members but the sender. Members that muted the channel receive only top-level messages
/// that mention them.
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
