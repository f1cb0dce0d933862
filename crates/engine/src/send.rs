//! Posting: from a draft to a committed message.
//!
//! Recipients are resolved from a remembered membership snapshot; the commit checks that snapshot, and
//! a send whose facts have moved is resolved again. So a join answered anywhere counts for the next
//! post anywhere.

mod repeated;

use std::{sync::Arc, time::Instant};

use relay_domain::{
    AgentId, ChannelId, MessageId, WorkspaceScope,
    agent::AgentKind,
    conversation,
    delivery::{Mode, Reason},
    mentions::mentions,
    names::{check_name, strip_hash},
};
use relay_store::{
    MessageRow,
    audience::{Audience, AudienceKey, Member},
    commit::{NewKey, NewRecipient, NewSend},
    events::NewEvent,
    webhooks::webhook_agent,
};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::{
    Engine, EngineError, EngineResult,
    auth::{AgentCaller, NodeCaller},
    commit::{Pending, Reply},
    draft::{check_draft, check_frame},
    idempotency::ClientKey,
    webhooks::HookCaller,
};

pub use crate::draft::Draft;

/// How often a send is resolved anew before its caller is asked to come back: each time, somebody
/// changed the channel in the milliseconds between.
const RESOLVE_TRIES: usize = 8;

/// A message that was committed, now or by the first request with the same key.
#[derive(Debug, Clone)]
pub struct Posted {
    /// The message.
    pub message: MessageRow,
    /// Whether this is the answer to an earlier request.
    pub replayed: bool,
    /// The recipient of a one-to-one message, by name.
    pub to: Option<String>,
}

/// Who posts.
#[derive(Debug, Clone)]
struct Sender {
    scope: WorkspaceScope,
    agent_id: AgentId,
    name: Arc<str>,
    kind: String,
    token_generation: Option<i64>,
    /// Not an agent that anybody registered: whether it is alive is not asked.
    is_hidden: bool,
}

impl From<&AgentCaller> for Sender {
    fn from(caller: &AgentCaller) -> Self {
        Self {
            scope: caller.scope,
            agent_id: caller.agent_id,
            name: Arc::clone(&caller.name),
            kind: caller.kind.as_str().to_owned(),
            token_generation: Some(caller.token_generation),
            is_hidden: false,
        }
    }
}

/// Where a draft goes.
#[derive(Debug, Clone)]
enum Target {
    Channel(String),
    Conversation(String),
    /// An agent, by name; the conversation is opened if need be.
    Agent(String),
    /// The thread of a message.
    Thread(MessageId),
}

impl Target {
    /// An idempotency key counts for one sender, operation and target.
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

impl Engine {
    /// Posts to a channel as an agent.
    ///
    /// # Errors
    /// See [`EngineError`]: an unknown or archived channel, an invalid draft, a frame above
    /// [`crate::payload::FRAME_LIMIT`], a reused key, an overloaded engine or storage that is away.
    pub async fn post_to_channel(
        &self,
        caller: &AgentCaller,
        channel: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<Posted> {
        let target = Target::Channel(strip_hash(channel).to_owned());
        self.post(&caller.into(), target, draft, key).await
    }

    /// Posts to a channel as a node, in the name of an agent that it hosts.
    ///
    /// # Errors
    /// As for an agent; [`EngineError::AgentNotFound`] when `from` is not on the node.
    pub async fn post_as_node(
        &self,
        caller: &NodeCaller,
        from: &str,
        channel: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<Posted> {
        let (agent_id, kind) = self
            .store()
            .agent_on_node(caller.scope, &caller.node_id, from)
            .await?
            .ok_or_else(|| EngineError::AgentNotFound(from.to_owned()))?;
        let (scope, name) = (caller.scope, from.into());
        let sender = Sender { scope, agent_id, name, kind, token_generation: None, is_hidden: false };
        self.post(&sender, Target::Channel(strip_hash(channel).to_owned()), draft, key).await
    }

    /// Replies in a message's thread. A reply to a reply attaches to its root.
    ///
    /// # Errors
    /// As for posting; [`EngineError::MessageNotFound`] when the parent is absent or hidden.
    pub async fn reply(
        &self,
        caller: &AgentCaller,
        parent: MessageId,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<Posted> {
        self.post(&caller.into(), Target::Thread(parent), draft, key).await
    }

    /// Sends a direct message to an agent by name; a leading `@` is dropped, `@self` is the caller.
    ///
    /// # Errors
    /// As for posting; [`EngineError::AgentNotFound`].
    pub async fn send_dm(
        &self,
        caller: &AgentCaller,
        to: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<Posted> {
        let to = if to == "@self" { &caller.name } else { to.strip_prefix('@').unwrap_or(to) };
        check_name("to", to, relay_domain::names::MAX_AGENT_NAME_BYTES)?;
        self.post(&caller.into(), Target::Agent(to.to_owned()), draft, key).await
    }

    /// Posts to a conversation that the caller takes part in.
    ///
    /// # Errors
    /// As for posting; [`EngineError::ConversationNotFound`], [`EngineError::NotAParticipant`].
    pub async fn post_to_conversation(
        &self,
        caller: &AgentCaller,
        conversation: &str,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<Posted> {
        self.post(&caller.into(), Target::Conversation(conversation.to_owned()), draft, key).await
    }

    /// Posts to the channel of a webhook, under its author's name; `events` go into the log with the message.
    ///
    /// # Errors
    /// As for an agent.
    pub(crate) async fn post_as_webhook(
        &self,
        caller: &HookCaller,
        author: &str,
        draft: Draft,
        events: Vec<NewEvent>,
    ) -> EngineResult<Posted> {
        let sender = Sender {
            scope: caller.scope,
            agent_id: webhook_agent(caller.scope),
            name: author.into(),
            kind: AgentKind::System.as_str().to_owned(),
            token_generation: None,
            is_hidden: true,
        };
        let target = Target::Channel(caller.webhook.channel_name.clone());
        self.post_with(&sender, target, draft, None, events).await
    }

    async fn post(
        &self,
        sender: &Sender,
        target: Target,
        draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<Posted> {
        self.post_with(sender, target, draft, key, Vec::new()).await
    }

    async fn post_with(
        &self,
        sender: &Sender,
        target: Target,
        draft: Draft,
        key: Option<ClientKey>,
        events: Vec<NewEvent>,
    ) -> EngineResult<Posted> {
        check_draft(&draft)?;
        match self.post_under(sender, &target, draft, key.as_ref(), events).await {
            Err(EngineError::UnknownToken { kind }) => Err(EngineError::UnknownToken { kind }),
            Err(error) if error.is_passing() => Err(error),
            Err(error) => self.posted_before(sender, &target, key.as_ref()).await?.ok_or(error),
            posted => posted,
        }
    }

    async fn post_under(
        &self,
        sender: &Sender,
        target: &Target,
        draft: Draft,
        key: Option<&ClientKey>,
        events: Vec<NewEvent>,
    ) -> EngineResult<Posted> {
        let attachments = self.attachments(sender.scope, &draft.attachments).await?;
        let key = key
            .map(|key| NewKey { hash: target.key_hash(sender, key).to_vec(), fingerprint: key.fingerprint().to_vec() });
        for attempt in 0..RESOLVE_TRIES {
            // A snapshot that was just refuted is not worth another look.
            let (audience, thread) = self.resolve(sender, target, attempt > 0).await?;
            let mut pending = self.prepare(sender, &audience, thread, &draft, key.clone(), &attachments)?;
            pending.0.events.clone_from(&events);
            let (reply, answer) = oneshot::channel();
            let (send, names) = pending;
            let traceparent = crate::trace::current();
            self.inner.committer.push(Pending { send, names, traceparent, reply })?;
            let asked_at = Instant::now();
            let answer = answer.await;
            // For the request's log line: the commit is made by another task, for several requests at once.
            tracing::debug!(target: "relay::commit", elapsed_secs = asked_at.elapsed().as_secs_f64(), "waited for a commit");
            match answer.map_err(|_| EngineError::OutcomeUnknown)?? {
                Reply::Committed { send, full } => {
                    self.tell_full(sender, &send, &audience, &full);
                    let to = recipient_of(&audience, sender);
                    return Ok(Posted { message: send.message, replayed: false, to });
                }
                Reply::Replayed { response } => return self.replayed(sender, &response).await,
                Reply::KeyReused => return Err(EngineError::IdempotencyKeyReused),
                Reply::Moved => {
                    self.inner.audiences.forget(sender.scope, audience.channel_id);
                }
            }
        }
        Err(EngineError::Overloaded)
    }

    /// The channel that a target means now, and the thread's root.
    async fn resolve(
        &self,
        sender: &Sender,
        target: &Target,
        fresh: bool,
    ) -> EngineResult<(Arc<Audience>, Option<MessageId>)> {
        if fresh && let Some(generation) = sender.token_generation {
            // The commit refuses a sender whose token was rotated meanwhile; so must we.
            let now = self.store().agent_generation(sender.scope, sender.agent_id).await?;
            if now != Some(generation) {
                return Err(EngineError::UnknownToken { kind: relay_domain::token::TokenKind::Agent });
            }
        }
        let scope = sender.scope;
        let resolved = match target {
            Target::Channel(name) => {
                let audience = self.audience(scope, AudienceKey::Name(name.clone()), fresh).await?;
                (audience.ok_or_else(|| EngineError::ChannelNotFound(name.clone()))?, None)
            }
            Target::Conversation(id) => {
                let audience = self.audience(scope, AudienceKey::Conversation(id.clone()), fresh).await?;
                let audience = audience.ok_or_else(|| EngineError::ConversationNotFound)?;
                if !takes_part(&audience, sender) {
                    return Err(EngineError::NotAParticipant);
                }
                (audience, None)
            }
            Target::Agent(name) => (self.direct_audience(sender, name, fresh).await?, None),
            Target::Thread(parent) => {
                let not_found = || EngineError::MessageNotFound;
                let message = self.store().message(scope, *parent).await?.ok_or_else(not_found)?.message;
                let key = AudienceKey::Id(ChannelId::new(message.channel_id));
                let audience = self.audience(scope, key, fresh).await?.ok_or_else(not_found)?;
                if audience.channel_type != 0 && !takes_part(&audience, sender) {
                    return Err(not_found());
                }
                (audience, Some(message.thread_id.map_or(*parent, MessageId::new)))
            }
        };
        if resolved.0.archived {
            return Err(EngineError::ChannelArchived(resolved.0.name.clone()));
        }
        Ok(resolved)
    }

    pub(crate) async fn audience(
        &self,
        scope: WorkspaceScope,
        key: AudienceKey,
        fresh: bool,
    ) -> EngineResult<Option<Arc<Audience>>> {
        let known = &self.inner.audiences.known;
        if !fresh && let Some(audience) = known.get(&(scope, key.clone())) {
            return Ok(Some(audience));
        }
        let Some(audience) = self.store().audience(scope, &key).await?.map(Arc::new) else { return Ok(None) };
        known.insert((scope, key), Arc::clone(&audience));
        Ok(Some(audience))
    }

    /// The conversation with an agent, opened if need be.
    async fn direct_audience(&self, sender: &Sender, to: &str, fresh: bool) -> EngineResult<Arc<Audience>> {
        let known = &self.inner.audiences.direct;
        let key = (sender.scope, sender.agent_id, to.to_owned());
        if !fresh && let Some(audience) = known.get(&key) {
            return Ok(audience);
        }
        let ids = self.store().agent_ids(sender.scope, &[to.to_owned()]).await?;
        let (_, recipient) = ids.into_iter().next().ok_or_else(|| EngineError::AgentNotFound(to.to_owned()))?;
        self.open_dm(sender.scope, sender.agent_id, recipient).await?;
        let names = conversation::direct_names(sender.scope.workspace_id(), sender.agent_id, recipient);
        let audience = self
            .audience(sender.scope, AudienceKey::Conversation(names.conversation.to_string()), true)
            .await?
            .ok_or_else(|| EngineError::AgentNotFound(to.to_owned()))?;
        known.insert(key, Arc::clone(&audience));
        Ok(audience)
    }

    /// Everything that the commit needs, with recipients as of the audience's version.
    fn prepare(
        &self,
        sender: &Sender,
        audience: &Audience,
        thread: Option<MessageId>,
        draft: &Draft,
        key: Option<NewKey>,
        attachments: &Value,
    ) -> EngineResult<(NewSend, Vec<Arc<str>>)> {
        let mentioned = mentions(&draft.text);
        let message = MessageRow {
            // The committer takes the id and the instant; the widest id stands in for the size check.
            message_id: i64::MAX,
            channel_id: audience.channel_id.get(),
            agent_id: sender.agent_id.get(),
            agent_name: sender.name.to_string(),
            agent_type: sender.kind.clone(),
            thread_id: thread.map(MessageId::get),
            text: draft.text.clone(),
            blocks: draft.blocks.clone(),
            metadata: draft.data.clone().unwrap_or_else(|| json!({})),
            attachments: attachments.clone(),
            mentions: mentioned,
            mode: draft.mode.as_str().to_owned(),
            content_type: draft.content_type.clone(),
            created_at: self.now(),
            channel_name: audience.name.clone(),
            channel_type: audience.channel_type,
            conversation_id: audience.conversation_id.clone(),
        };
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
            events: Vec::new(),
        };
        Ok((send, names))
    }

    /// Tells the sender whose mailbox was full (contract: node.md 6.8). The send itself succeeded.
    fn tell_full(&self, sender: &Sender, send: &NewSend, audience: &Audience, full: &[usize]) {
        for position in full {
            let Some(recipient) = send.recipients.get(*position) else { continue };
            let name = audience.members.iter().find(|m| m.agent_id == recipient.agent_id.get()).map(|m| &m.name);
            metrics::counter!(relay_domain::metric_names::DELIVERIES_REFUSED).increment(1);
            self.hints().notify(
                sender.scope,
                vec![sender.agent_id],
                "agent",
                "delivery.failed",
                json!({
                    "delivery_id": null,
                    "message_id": send.message.message_id.to_string(),
                    "target_agent_id": recipient.agent_id.to_string(),
                    "target_agent_name": name,
                    "reason": "depth_cap",
                    "error": "mailbox depth cap exceeded",
                    "retryable": false,
                }),
            );
        }
    }
}

fn takes_part(audience: &Audience, sender: &Sender) -> bool {
    audience.members.iter().any(|member| member.agent_id == sender.agent_id.get())
}

fn recipient_of(audience: &Audience, sender: &Sender) -> Option<String> {
    (audience.channel_type == 1).then(|| {
        let other = audience.members.iter().find(|member| member.agent_id != sender.agent_id.get());
        other.map_or_else(|| sender.name.to_string(), |member| member.name.clone())
    })
}

/// Who gets a message: all members but its sender; of the muted ones those that a top-level channel
/// message names.
fn recipients(
    audience: &Audience,
    sender: &Sender,
    message: &MessageRow,
    mode: Mode,
) -> (Vec<NewRecipient>, Vec<Arc<str>>) {
    let named = |member: &Member| message.mentions.contains(&member.name);
    let others = audience.members.iter().filter(|member| member.agent_id != sender.agent_id.get());
    others
        .filter_map(|member| {
            let (reason, mode) = match (message.thread_id, audience.channel_type) {
                (Some(_), _) if member.muted => return None,
                (Some(_), _) => (Reason::ThreadReply, Mode::Wait),
                (None, 0) if named(member) => (Reason::Mention, mode),
                (None, 0) if member.muted => return None,
                (None, 0) => (Reason::Message, mode),
                (None, _) => (Reason::Dm, mode),
            };
            let agent_id = AgentId::new(member.agent_id);
            Some((NewRecipient { agent_id, mode: mode.code(), reason: reason.code() }, Arc::from(member.name.as_str())))
        })
        .unzip()
}
