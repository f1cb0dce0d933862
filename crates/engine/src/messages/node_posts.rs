//! Posts of nodes, in the name of agents: a broker node posts for every agent of its workspace, a direct node for its
//! own.

use relay_domain::{
    JsonText, NodeId,
    access::rights::{Actor, Operation, PostingNode},
    messages::POSTED_BY_NODE,
    names::strip_hash,
};
use relay_store::access::rights::AgentWithRights;

use super::{
    Messages,
    posting::{Draft, PostRequest, PostedMessage, Sender, Target},
};
use crate::{
    EngineError, EngineResult,
    access::{callers::NodeCaller, idempotency::ClientKey},
    error::Missing,
};

impl Messages {
    /// Posts to a channel as a node, in the name of an agent: of any agent of the workspace as a broker, which the
    /// metadata record, and of its own agent as a direct node.
    ///
    /// # Errors
    /// As for posting, and when the node may not post for that agent.
    pub async fn post_as_node(
        &self,
        caller: &NodeCaller,
        from: &str,
        channel: &str,
        mut draft: Draft,
        key: Option<ClientKey>,
    ) -> EngineResult<PostedMessage> {
        let (sender, node) = self.node_author(caller, from).await?;
        if node == PostingNode::Broker {
            name_posting_node(&mut draft, &caller.node_id);
        }
        let target = Target::Channel(strip_hash(channel).to_owned());
        let arrived = self.next_arrival();
        self.post_as(&sender, PostRequest { target, draft, key, events: Vec::new(), arrived }).await
    }

    /// Returns the agent that a node posts for, and the relation between them.
    pub(super) async fn node_author(&self, caller: &NodeCaller, from: &str) -> EngineResult<(Sender, PostingNode)> {
        let scope = caller.scope;
        let missing = || EngineError::NotFound(Missing::Agent(from.to_owned()));
        let author = self.core.store.agent_with_rights_by_name(scope, from).await?.ok_or_else(missing)?;
        let node = self.posting_node(caller, &author).await?;
        self.core.authorize((scope, &author), Operation::PostThroughNode { node }).await?;
        let sender = Sender {
            scope,
            agent_id: author.agent_id,
            name: author.name.as_str().into(),
            kind: author.kind,
            actor: Actor::Agent { id: author.agent_id, rights: author.rights },
            token_generation: None,
            is_hidden: false,
        };
        Ok((sender, node))
    }

    /// Returns the relation of a node to the agent that it posts for.
    async fn posting_node(&self, caller: &NodeCaller, author: &AgentWithRights) -> EngineResult<PostingNode> {
        if caller.node_id == NodeId::direct(author.agent_id) {
            return Ok(PostingNode::Own);
        }
        if !caller.is_direct() {
            return Ok(PostingNode::Broker);
        }
        // A direct node that was enrolled over REST.
        let found = self.core.store.agent_on_node(caller.scope, &caller.node_id, &author.name).await?;
        let is_here = found.is_some();
        Ok(if is_here { PostingNode::Own } else { PostingNode::OfAnother })
    }
}

/// Records in the metadata which broker node has posted.
pub(super) fn name_posting_node(draft: &mut Draft, node: &NodeId) {
    let data = draft.data.get_or_insert_with(JsonText::empty_object);
    // Anything else is refused by `check_draft`.
    if data.is_object() {
        let mut entries = data.entries();
        entries.insert(POSTED_BY_NODE.to_owned(), JsonText::encode(node.as_str()));
        *data = JsonText::encode(&entries);
    }
}
