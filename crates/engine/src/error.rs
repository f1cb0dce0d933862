//! Everything a use case can refuse. The gateway gives each variant its status and code.

use relay_domain::{NodeId, names::InvalidText, token::TokenKind};
use relay_store::StoreError;

/// The result of a use case.
pub type EngineResult<T> = Result<T, EngineError>;

/// Why a use case was refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Postgres is away. Nothing was done.
    #[error("storage is unavailable")]
    Unavailable(#[source] StoreError),
    /// Storage failed for a reason of its own.
    #[error("storage failed")]
    Store(#[source] StoreError),
    /// The outcome of a commit is not known and stays so: the caller must get no status at all.
    #[error("the outcome of the commit is unknown")]
    OutcomeUnknown,
    /// Storage was away when the batch of this request was to be committed. Nothing was written.
    #[error("storage was unavailable for the commit")]
    CommitUnavailable,
    /// Storage refused what this request wants to write. Nothing was written.
    #[error("storage refused the commit")]
    CommitRefused,
    /// More requests wait than the engine takes. Nothing was done; try again.
    #[error("too many requests are waiting")]
    Overloaded,
    /// NATS did not do what was asked. Postgres has the record.
    #[error(transparent)]
    Stream(#[from] relay_stream::StreamError),
    /// The operating system gave no random bytes.
    #[error("no random bytes")]
    NoRandomness,
    /// All worker numbers are leased.
    #[error("no worker number is free")]
    NoWorkerNumber,

    /// The text is no token.
    #[error("invalid token format")]
    InvalidTokenFormat,
    /// No such token, or it is dead.
    #[error("unknown {kind:?} token")]
    UnknownToken {
        /// What it claims to be.
        kind: TokenKind,
    },
    /// Only an agent may do this.
    #[error("an agent token is required")]
    AgentTokenRequired,

    /// A text is empty, too long or has forbidden characters.
    #[error(transparent)]
    InvalidText(#[from] InvalidText),
    /// The request makes no sense for another reason, told to the caller.
    #[error("{0}")]
    InvalidRequest(String),

    /// The `Idempotency-Key` is empty, too long or not visible ASCII.
    #[error("invalid idempotency key")]
    InvalidIdempotencyKey,
    /// The key was used with another body.
    #[error("the idempotency key was used with another body")]
    IdempotencyKeyReused,
    /// The request with that key is still being worked on.
    #[error("a request with that idempotency key is in progress")]
    IdempotencyInProgress,
    /// An anonymous creation needs a key that cannot be guessed.
    #[error("the idempotency key of an anonymous creation is too short")]
    CreationKeyTooWeak,
    /// The key made a workspace from another body.
    #[error("the idempotency key made a workspace from another body")]
    CreationKeyConflict,
    /// The workspace that the key made is gone.
    #[error("the workspace made with that idempotency key is gone")]
    CreationKeyTerminalized,

    /// No such workspace.
    #[error("workspace not found")]
    WorkspaceNotFound,
    /// No living agent of that name or id.
    #[error("agent {0} not found")]
    AgentNotFound(String),
    /// A living agent has that name.
    #[error("agent {0} already exists")]
    AgentAlreadyExists(String),
    /// The caller may not rotate this agent's token.
    #[error("agent recovery is not authorized")]
    AgentRecoveryNotAuthorized,

    /// No such channel.
    #[error("channel {0} not found")]
    ChannelNotFound(String),
    /// A channel has that name.
    #[error("channel {0} already exists")]
    ChannelAlreadyExists(String),
    /// The name cannot be a channel's.
    #[error("invalid channel name")]
    InvalidChannelName,
    /// The channel is archived.
    #[error("channel {0} is archived")]
    ChannelArchived(String),
    /// `general` stays.
    #[error("the general channel cannot be archived")]
    CannotArchiveGeneral,
    /// The caller is no member of the channel.
    #[error("not a member of channel {0}")]
    NotAMember(String),

    /// A node must say for which of its agents it posts.
    #[error("from is required")]
    FromRequired,
    /// Only a node may post for another.
    #[error("from is not allowed")]
    FromNotAllowed,
    /// Files that are not there, not complete, or named twice.
    #[error("invalid attachments")]
    InvalidAttachments,
    /// The message would not fit into a frame.
    #[error("the message is too large to be delivered")]
    PayloadTooLarge,
    /// No such message, or none that the caller may see.
    #[error("message not found")]
    MessageNotFound,
    /// No such conversation.
    #[error("conversation not found")]
    ConversationNotFound,
    /// The caller takes no part in the conversation.
    #[error("not a participant of this conversation")]
    NotAParticipant,
    /// No such delivery, or it is another agent's.
    #[error("delivery not found")]
    DeliveryNotFound,

    /// No such node.
    #[error("node {0} not found")]
    NodeNotFound(String),
    /// Another node has that name.
    #[error("another node is called {0}")]
    NodeNameConflict(String),
    /// The name cannot be a node's.
    #[error("invalid node name")]
    InvalidNodeName,
    /// A kind of node that this engine does not serve.
    #[error("nodes of kind {0} are not supported")]
    UnsupportedNodeKind(String),
    /// The delivery settings do not fit the node.
    #[error("invalid node delivery: {0}")]
    InvalidNodeDelivery(String),
    /// A direct node has exactly one agent.
    #[error("a direct node has exactly one agent")]
    DirectNodeCapacity,
    /// The node takes no more agents.
    #[error("node {node} takes no more than {max_agents} agents")]
    NodeCapacityExceeded {
        /// The node's name.
        node: String,
        /// How many it takes.
        max_agents: i32,
    },
    /// The agent is not bound to that node.
    #[error("agent {agent} is not bound to node {node}")]
    NodeAgentBindingNotFound {
        /// The agent's name.
        agent: String,
        /// The node's name.
        node: String,
    },
    /// The frame names another node than the token.
    #[error("node_id is not the node of this token")]
    NodeIdMismatch,
    /// Another instance of the provider has just proved itself alive.
    #[error("another instance serves this provider")]
    ProviderInstanceConflict,
    /// The connection has been superseded by a newer one.
    #[error("the connection has been superseded")]
    Superseded,
    /// An inventory's name and id do not belong together.
    #[error("agent {0} does not have that id")]
    AgentIdentityMismatch(String),
    /// The agent lives on another node.
    #[error("agent {0} is hosted by another node")]
    AgentLocationConflict(String),
    /// Another provider of the node hosts the agent.
    #[error("agent {0} is hosted by another provider of this node")]
    AgentProviderConflict(String),
    /// The name is now another identity's.
    #[error("the agent's identity is another one")]
    AgentIdentityConflict,
    /// The agent is located on a node that is not its own.
    #[error("agent is bound to node {0}")]
    AgentBoundToNode(NodeId),
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Unavailable { .. } => Self::Unavailable(error),
            // Lost against other transactions: nothing was done, and the next try will most likely win.
            StoreError::Aborted { .. } => Self::Overloaded,
            StoreError::Refused { .. } => Self::Store(error),
        }
    }
}
