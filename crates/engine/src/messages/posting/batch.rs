//! Batches of posts, whose sends reach the committer together.
//!
//! All posts are resolved before the first is queued, so that they commit in few transactions. The posts of a batch are
//! committed in their order: those that follow a stale one are submitted again behind it, and posts of different lanes
//! of the committer wait for each other.

use std::{collections::HashMap, sync::Arc};

use futures::{StreamExt as _, stream};
use relay_domain::{
    MessageId,
    access::rights::{Operation, PostingNode, Refusal},
};
use relay_store::{channels::audience::Audience, messages::batch::NewSend};

use super::{
    AudienceSource, Draft, MAX_RESOLUTIONS, PostRequest, PostedMessage, QueuedReply, Sender, Target, check_draft,
};
use crate::{
    EngineError, EngineResult,
    access::{
        callers::{AgentCaller, NodeCaller},
        idempotency::ClientKey,
    },
    error::{Denial, InvalidInput},
    messages::{
        Messages,
        addresses::AddressedPost,
        committer::{CommitReply, Sequence, is_wide},
        node_posts::name_posting_node,
    },
};

/// Posts of a batch that are resolved at once; each may take a connection to storage.
const CONCURRENT_RESOLUTIONS: usize = 8;

/// Post of a batch.
#[derive(Debug)]
pub struct BatchPost {
    pub target: BatchTarget,
    /// Agent that a node posts for, by name.
    pub from: Option<String>,
    pub draft: Draft,
    pub key: Option<ClientKey>,
}

/// Target of a post in a batch.
#[derive(Debug)]
pub enum BatchTarget {
    To(Target),
    /// Agent by name and machine.
    Address(String),
}

/// Caller that posts a batch.
#[derive(Debug, Clone, Copy)]
pub enum BatchCaller<'a> {
    /// Agent that posts for itself.
    Agent(&'a AgentCaller),
    /// Node that posts to channels for the agents that it may name, and anywhere for those that it hosts.
    Node(&'a NodeCaller),
}

/// Agent that a node posts for.
struct NodeAuthor {
    sender: Sender,
    node: PostingNode,
    /// The agent is located on the node. Known if the batch has posts of it elsewhere than in channels.
    is_hosted: bool,
}

/// Post of a batch without an outcome.
struct OpenPost {
    /// Place in the batch.
    index: usize,
    sender: Sender,
    request: PostRequest,
    /// The snapshot of its audience that it had before was outdated.
    is_stale: bool,
}

/// Post that is open, or the message of an earlier request.
enum PreparedPost {
    Open(Sender, PostRequest),
    Sent(PostedMessage),
}

/// Send that can be queued.
struct ResolvedSend {
    send: NewSend,
    names: Vec<Arc<str>>,
    audience: Arc<Audience>,
}

/// Outcomes of a batch, and the posts that have none.
#[derive(Default)]
struct Round {
    outcomes: Vec<(usize, EngineResult<PostedMessage>)>,
    /// Queued sends of one lane.
    queued: Vec<(OpenPost, Arc<Audience>, QueuedReply)>,
    /// Posts for the next round, in their order.
    again: Vec<OpenPost>,
}

impl Messages {
    /// Posts a batch. Returns an outcome for each post, in order; a post that is refused changes nothing for the
    /// others. Posts that are committed have the order of the batch.
    pub async fn post_batch(&self, caller: BatchCaller<'_>, posts: Vec<BatchPost>) -> Vec<EngineResult<PostedMessage>> {
        let mut outcomes: Vec<Option<EngineResult<PostedMessage>>> = posts.iter().map(|_| None).collect();
        let mut open = Vec::with_capacity(posts.len());
        let authors = self.node_authors(caller, &posts).await;
        let prepared = posts.into_iter().map(|post| self.prepare_post(caller, &authors, post));
        // `buffered` and not `buffer_unordered`: the order of the posts must stay.
        let prepared: Vec<_> = stream::iter(prepared).buffered(CONCURRENT_RESOLUTIONS).collect().await;
        for (index, prepared) in prepared.into_iter().enumerate() {
            match prepared {
                Ok(PreparedPost::Open(sender, request)) => {
                    open.push(OpenPost { index, sender, request, is_stale: false })
                }
                Ok(PreparedPost::Sent(sent)) => outcomes[index] = Some(Ok(sent)),
                Err(error) => outcomes[index] = Some(Err(error)),
            }
        }
        for _ in 0..MAX_RESOLUTIONS {
            if open.is_empty() {
                break;
            }
            let round = self.commit_round(open).await;
            for (index, outcome) in round.outcomes {
                outcomes[index] = Some(outcome);
            }
            open = round.again;
        }
        // Those that are still open have lost every race.
        outcomes.into_iter().map(|outcome| outcome.unwrap_or(Err(EngineError::Overloaded))).collect()
    }

    /// Looks up the agents that a node posts for, each once. Those that it may not post for are missing.
    async fn node_authors(&self, caller: BatchCaller<'_>, posts: &[BatchPost]) -> HashMap<String, NodeAuthor> {
        let BatchCaller::Node(node) = caller else { return HashMap::new() };
        let mut names: HashMap<String, bool> = HashMap::new();
        for post in posts {
            let Some(from) = &post.from else { continue };
            *names.entry(from.clone()).or_default() |= !post.target.is_channel();
        }
        let looked_up = names.into_iter().map(|(name, needs_host)| async move {
            // One that fails is looked up again for its post, which reports the error.
            self.find_node_author(node, &name, needs_host).await.ok().map(|author| (name, author))
        });
        let found: Vec<_> = stream::iter(looked_up).buffer_unordered(CONCURRENT_RESOLUTIONS).collect().await;
        found.into_iter().flatten().collect()
    }

    async fn find_node_author(&self, caller: &NodeCaller, name: &str, needs_host: bool) -> EngineResult<NodeAuthor> {
        let (sender, node) = self.node_author(caller, name).await?;
        let is_hosted = node == PostingNode::Own
            || needs_host && self.core.store.agent_on_node(caller.scope, &caller.node_id, name).await?.is_some();
        Ok(NodeAuthor { sender, node, is_hosted })
    }

    /// Checks a post and determines its sender and target.
    async fn prepare_post(
        &self,
        caller: BatchCaller<'_>,
        authors: &HashMap<String, NodeAuthor>,
        post: BatchPost,
    ) -> EngineResult<PreparedPost> {
        let BatchPost { target, from, mut draft, key } = post;
        let sender = match caller {
            BatchCaller::Agent(_) if from.is_some() && target.is_channel() => {
                return Err(EngineError::Invalid(InvalidInput::FromNotAllowed));
            }
            BatchCaller::Agent(agent) => Sender::from(agent),
            BatchCaller::Node(node) => {
                let from = from.ok_or(EngineError::Invalid(InvalidInput::FromRequired))?;
                let found;
                let author = match authors.get(&from) {
                    Some(author) => author,
                    None => {
                        found = self.find_node_author(node, &from, !target.is_channel()).await?;
                        &found
                    }
                };
                if !target.is_channel() && !author.is_hosted {
                    return Err(EngineError::Forbidden(Denial::Refused(Refusal::PostThroughNode)));
                }
                if author.node == PostingNode::Broker {
                    name_posting_node(&mut draft, &node.node_id);
                }
                author.sender.clone()
            }
        };
        let target = match target {
            BatchTarget::To(target) => target.normalize(&sender.name)?,
            BatchTarget::Address(address) => match self.resolve_address(&sender, &address, key.as_ref()).await? {
                AddressedPost::To(name) => Target::Agent(name).normalize(&sender.name)?,
                AddressedPost::Sent(sent) => return Ok(PreparedPost::Sent(*sent)),
            },
        };
        check_draft(&draft)?;
        self.core.authorize(&sender, Operation::Send).await?;
        // Behind every fan-out of the author, since an earlier post of the batch may be one.
        let arrived = MessageId::new(i64::MAX);
        Ok(PreparedPost::Open(sender, PostRequest { target, draft, key, events: Vec::new(), arrived }))
    }

    /// Resolves posts and commits them in their order.
    async fn commit_round(&self, open: Vec<OpenPost>) -> Round {
        let resolved = open.into_iter().map(|post| async move {
            let resolved = self.resolve_post(&post).await;
            (post, resolved)
        });
        let resolved: Vec<_> = stream::iter(resolved).buffered(CONCURRENT_RESOLUTIONS).collect().await;
        let sequence_id = self.core.next_id();
        let sequence = Arc::new(Sequence::default());
        let mut round = Round::default();
        let mut is_wide_run = false;
        for (post, resolved) in resolved {
            let ResolvedSend { mut send, names, audience } = match resolved {
                Ok(resolved) => resolved,
                Err(error) => {
                    let outcome = self.find_post_after(error, &post.sender, &post.request).await;
                    round.outcomes.push((post.index, outcome));
                    continue;
                }
            };
            // Another lane commits at its own time.
            if is_wide(&send) != is_wide_run {
                is_wide_run = !is_wide_run;
                self.await_replies(&mut round).await;
            }
            // An earlier post is to be submitted again, and this one must not overtake it.
            if !round.again.is_empty() {
                round.again.push(post);
                continue;
            }
            send.sequence = Some(sequence_id);
            match self.queue_send(send, names, Some(Arc::clone(&sequence))).await {
                Ok(reply) => round.queued.push((post, audience, reply)),
                // Refused for good in this batch, so it holds back no later post (ADR 0050).
                Err(error) => round.outcomes.push((post.index, Err(error))),
            }
        }
        self.await_replies(&mut round).await;
        round
    }

    async fn resolve_post(&self, post: &OpenPost) -> EngineResult<ResolvedSend> {
        let OpenPost { sender, request, is_stale, .. } = post;
        let source = if *is_stale { AudienceSource::Storage } else { AudienceSource::Cache };
        let attachments = self.files.attachments(sender.scope, &request.draft.attachments).await?;
        let (audience, thread) = self.resolve_target(sender, &request.target, source).await?;
        let (send, names) = self.build_send(sender, &audience, thread, request, &attachments)?;
        Ok(ResolvedSend { send, names, audience })
    }

    /// Waits for the replies to the queued sends.
    async fn await_replies(&self, round: &mut Round) {
        for (mut post, audience, reply) in round.queued.drain(..) {
            let OpenPost { index, sender, request, is_stale } = &mut post;
            let outcome = match reply.await.map_err(|_| EngineError::OutcomeUnknown).flatten() {
                Ok(reply) => {
                    // The other reasons for another round say nothing about its audience, which may come from the
                    // cache again.
                    *is_stale = matches!(reply, CommitReply::Stale);
                    self.read_reply(sender, request, &audience, reply).await
                }
                Err(error) => Err(error),
            };
            match outcome {
                Ok(None) => round.again.push(post),
                Ok(Some(posted)) => round.outcomes.push((*index, Ok(posted))),
                Err(error) => {
                    let outcome = self.find_post_after(error, sender, request).await;
                    round.outcomes.push((*index, outcome));
                }
            }
        }
    }
}

impl BatchTarget {
    const fn is_channel(&self) -> bool {
        matches!(self, Self::To(Target::Channel(_)))
    }
}
