//! Everything a use case can refuse. The gateway gives each variant its status and code.

use relay_domain::{NodeId, names::InvalidText, plan::Ceiling, token::TokenKind};
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
    /// The workspace was suspended by an operator; nothing of it is lost.
    #[error("the workspace is suspended")]
    WorkspaceSuspended,
    /// Only an agent may do this.
    #[error("an agent token is required")]
    AgentTokenRequired,
    /// The observer token lacks this scope.
    #[error("the token lacks the scope {0}")]
    InsufficientScope(String),

    /// The workspace has as many of these as it may.
    #[error("the plan allows no more {}", .0.as_str())]
    PlanLimitExceeded(Ceiling),
    /// A token of this kind cannot observe.
    #[error("a {kind:?} token cannot observe")]
    NotForObserving {
        /// What it is.
        kind: TokenKind,
    },
    /// No such observer token, or it is revoked.
    #[error("observer token not found")]
    ObserverTokenNotFound,
    /// An active observer token has that name.
    #[error("an active observer token is called {0}")]
    ObserverTokenNameConflict(String),

    /// Only an operator may do this, and the caller has not shown to be one.
    #[error("operator credentials are required")]
    NotAnOperator,
    /// On a hosted installation workspaces are created by operators.
    #[error("workspaces are created by operators here")]
    HostedInstallation,
    /// The OIDC issuer's keys cannot be fetched.
    #[error("the OIDC issuer is unavailable")]
    IssuerUnavailable,
    /// No such signing key.
    #[error("signing key not found")]
    SigningKeyNotFound,
    /// Tokens are still signed with the key.
    #[error("the signing key is in use")]
    SigningKeyInUse,
    /// As many signing keys live as may.
    #[error("too many signing keys live")]
    TooManySigningKeys,

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
    /// No such file, or it is deleted.
    #[error("file not found")]
    FileNotFound,
    /// The bytes of a file have not been uploaded.
    #[error("the upload is incomplete")]
    UploadIncomplete,
    /// A complete file does not change.
    #[error("the file is complete")]
    FileComplete,
    /// Only its owner may do this to a file.
    #[error("the file is another agent's")]
    NotFileOwner,
    /// The file is larger than this engine takes.
    #[error("a file has at most {max_bytes} bytes")]
    FileTooLarge {
        /// The largest size.
        max_bytes: i64,
    },
    /// The token in a file's address is none of ours, for something else, or expired.
    #[error("invalid or expired file token")]
    InvalidFileToken,
    /// The storage of files did not do what was asked.
    #[error("the storage of files failed")]
    FileStorage(#[source] relay_blobs::BlobError),
    /// The storage of files has lost the bytes of a file.
    #[error("the bytes of the file are missing")]
    FileBytesMissing,

    /// A call of a webhook's address without a webhook's token.
    #[error("a webhook token is required")]
    WebhookTokenRequired,
    /// No such webhook.
    #[error("webhook not found")]
    WebhookNotFound,
    /// No such subscription.
    #[error("subscription not found")]
    SubscriptionNotFound,
    /// Only agents are somewhere.
    #[error("only an agent can be placed beside itself")]
    PlacementSelfRequiresAgent,
    /// The caller runs on no node that brings agents up.
    #[error("the caller runs on no broker node")]
    PlacementSelfUnavailable,
    /// The agent has another token by now.
    #[error("the agent has another token by now")]
    ReleaseGenerationConflict,
    /// The node that runs the agent cannot be reached.
    #[error("the node of agent {0} cannot be reached")]
    AgentHostUnavailable(String),
    /// No such trigger.
    #[error("trigger not found")]
    TriggerNotFound,
    /// The workspace has as many triggers as it may.
    #[error("too many triggers")]
    TooManyTriggers,
    /// Something was sealed with a key that this process was not given.
    #[error("sealed with key {key_id}, which is not known here")]
    SealedWithUnknownKey {
        /// The key.
        key_id: String,
    },
    /// The text is no type of session event.
    #[error("invalid event type")]
    InvalidEventType,
    /// An agent reports for itself only.
    #[error("an agent reports events of its own session only")]
    NotOwnSession,

    /// The message would not fit into a frame.
    #[error("the message is too large to be delivered")]
    PayloadTooLarge,
    /// No such message, or none that the caller may see.
    #[error("message not found")]
    MessageNotFound,
    /// Only its author may change a message.
    #[error("not the author of this message")]
    NotTheAuthor,
    /// The text is no address.
    #[error("invalid address")]
    InvalidAddress,
    /// The address fits more than one place.
    #[error("ambiguous address")]
    AmbiguousAddress,
    /// Nobody is at that address.
    #[error("address not found")]
    AddressNotFound,
    /// No such conversation.
    #[error("conversation not found")]
    ConversationNotFound,
    /// The caller takes no part in the conversation.
    #[error("not a participant of this conversation")]
    NotAParticipant,
    /// No such delivery, or it is another agent's.
    #[error("delivery not found")]
    DeliveryNotFound,

    /// The dead letter cannot be sent again; the text says why.
    #[error("the dead letter cannot be sent again: {0}")]
    NotRedrivable(String),
    /// No such redrive.
    #[error("redrive not found")]
    RedriveNotFound,

    /// No such action, or none that the caller may see.
    #[error("action not found")]
    ActionNotFound,
    /// The name of an action is another handler's, or the engine's own.
    #[error("the action name {0} is taken")]
    ActionNameConflict(String),
    /// An action has an agent or a node that handles it, not both and not none.
    #[error("an action has exactly one handler")]
    InvalidActionHandler,
    /// The node does not advertise what it is to do.
    #[error("node {node} lacks the capability {capability}")]
    CapabilityMismatch {
        /// The node's name.
        node: String,
        /// What it lacks.
        capability: String,
    },
    /// Only the agent that handles it may do this.
    #[error("not the handler")]
    NotTheHandler,
    /// The workspace has as many actions as it may.
    #[error("too many actions")]
    TooManyActions,
    /// The caller may not invoke the action.
    #[error("invoking {0} is denied")]
    ActionDenied(String),
    /// The input is not what the action's schema asks for.
    #[error("the input at {path:?} does not fit: {message}")]
    InvalidActionInput {
        /// JSON pointer into the input.
        path: String,
        /// What is wrong there.
        message: String,
    },
    /// Nobody can do it now; why.
    #[error("no handler is available: {0}")]
    HandlerUnavailable(String),
    /// As many invocations of this are open as may be.
    #[error("too many invocations of {0} are open")]
    TooManyInvocations(&'static str),
    /// No such invocation of that action.
    #[error("invocation not found")]
    InvocationNotFound,
    /// A node says what came of it, over its socket.
    #[error("the invocation is a node's")]
    NodeOwnedInvocation,

    /// No such node.
    #[error("node {0} not found")]
    NodeNotFound(String),
    /// Another node has that name.
    #[error("another node is called {0}")]
    NodeNameConflict(String),
    /// The name cannot be a node's.
    #[error("invalid node name")]
    InvalidNodeName,
    /// Only agents on nodes of kind poll claim their deliveries: those of others are brought to them.
    #[error("the caller is not on a node of kind poll")]
    NotPolled,
    /// A node keeps the kind that it was made with.
    #[error("node {node} is of kind {kind}")]
    NodeKindIsFixed {
        /// The node's name.
        node: String,
        /// What it is.
        kind: String,
    },
    /// The URL of a node leads to where nobody may call through us.
    #[error("unsafe delivery url: {0}")]
    UnsafeNodeDeliveryUrl(String),
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

impl EngineError {
    /// For a step after one that is committed: what passes would have clients send the whole request again.
    #[must_use]
    pub(crate) fn after_commit(self) -> Self {
        if self.is_passing() { Self::OutcomeUnknown } else { self }
    }

    /// Whether storage was not there, or had no room: nothing was done, and the same may be tried again.
    #[must_use]
    pub const fn is_passing(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::CommitUnavailable | Self::Overloaded)
    }
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Unavailable { .. } => Self::Unavailable(error),
            // Lost against other transactions: nothing was done, and the next try will most likely win.
            StoreError::Aborted { .. } => Self::Overloaded,
            StoreError::OutcomeUnknown { .. } => Self::OutcomeUnknown,
            StoreError::Refused { .. } => Self::Store(error),
        }
    }
}
