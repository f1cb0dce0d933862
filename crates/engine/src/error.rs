//! Errors of the use cases. The gateway maps each variant to a status and a code.

use relay_domain::{NodeId, access::token::TokenKind, names::InvalidText, nodes::NodeKind, workspaces::plan::Quota};
use relay_store::StoreError;

pub type EngineResult<T> = Result<T, EngineError>;

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Postgres is unavailable. Nothing was done.
    #[error("storage is unavailable")]
    Unavailable(#[source] StoreError),
    /// Storage failed permanently.
    #[error("storage failed")]
    Store(#[source] StoreError),
    /// Commit outcome unknown, and it will stay unknown: the caller must get no status, since clients send again after
    /// a 5xx.
    #[error("the outcome of the commit is unknown")]
    OutcomeUnknown,
    /// Postgres was unavailable when the batch of this request was to be committed. Nothing was written.
    #[error("storage was unavailable for the commit")]
    CommitUnavailable,
    /// Storage refused the statement. Nothing was written.
    #[error("storage refused the commit")]
    CommitRefused,
    /// A queue is full, or the transaction lost against others. Nothing was done.
    #[error("too many requests are waiting")]
    Overloaded,
    /// NATS failed. Postgres has the record.
    #[error(transparent)]
    Stream(#[from] relay_stream::StreamError),
    /// The operating system gave no random bytes.
    #[error("no random bytes")]
    NoRandomness,
    #[error("no worker number is free")]
    NoWorkerNumber,

    #[error("invalid token format")]
    InvalidTokenFormat,
    /// The token is unknown, revoked or expired.
    #[error("unknown {kind:?} token")]
    UnknownToken { kind: TokenKind },
    /// An operator has suspended the workspace. Its data is kept.
    #[error("the workspace is suspended")]
    WorkspaceSuspended,
    /// Only an agent may do this.
    #[error("an agent token is required")]
    AgentTokenRequired,
    #[error("the token lacks the scope {0}")]
    InsufficientScope(String),

    /// The workspace has as many of these as it may.
    #[error("the plan allows no more {}", .0.as_str())]
    PlanLimitExceeded(Quota),
    #[error("a {kind:?} token cannot observe")]
    NotForObserving { kind: TokenKind },
    /// No such observer token, or it is revoked.
    #[error("observer token not found")]
    ObserverTokenNotFound,
    #[error("an active observer token is called {0}")]
    ObserverTokenNameConflict(String),

    /// Only an operator may do this, and the caller has not shown to be one.
    #[error("operator credentials are required")]
    NotAnOperator,
    #[error("workspaces are created by operators here")]
    HostedInstallation,
    #[error("the OIDC issuer is unavailable")]
    IssuerUnavailable,
    #[error("signing key not found")]
    SigningKeyNotFound,
    #[error("the signing key is in use")]
    SigningKeyInUse,
    #[error("too many signing keys live")]
    TooManySigningKeys,

    #[error(transparent)]
    InvalidText(#[from] InvalidText),
    /// Any other invalid request; the text goes to the client.
    #[error("{0}")]
    InvalidRequest(String),

    #[error("invalid idempotency key")]
    InvalidIdempotencyKey,
    /// The key was used with another body.
    #[error("the idempotency key was used with another body")]
    IdempotencyKeyReused,
    #[error("a request with that idempotency key is in progress")]
    IdempotencyInProgress,
    /// Anonymous creation needs a key that cannot be guessed, because the key gives access to the new workspace.
    #[error("the idempotency key of an anonymous creation is too short")]
    CreationKeyTooWeak,
    #[error("the idempotency key made a workspace from another body")]
    CreationKeyConflict,
    #[error("the workspace made with that idempotency key is gone")]
    CreationKeyTerminalized,

    #[error("workspace not found")]
    WorkspaceNotFound,
    /// No active agent has this name or id.
    #[error("agent {0} not found")]
    AgentNotFound(String),
    #[error("agent {0} already exists")]
    AgentAlreadyExists(String),
    #[error("agent recovery is not authorized")]
    AgentRecoveryNotAuthorized,

    #[error("channel {0} not found")]
    ChannelNotFound(String),
    #[error("channel {0} already exists")]
    ChannelAlreadyExists(String),
    #[error("invalid channel name")]
    InvalidChannelName,
    #[error("channel {0} is archived")]
    ChannelArchived(String),
    #[error("the general channel cannot be archived")]
    CannotArchiveGeneral,
    #[error("not a member of channel {0}")]
    NotAMember(String),

    #[error("from is required")]
    FromRequired,
    #[error("from is not allowed")]
    FromNotAllowed,
    /// An attachment is missing, incomplete or named twice.
    #[error("invalid attachments")]
    InvalidAttachments,
    #[error("file not found")]
    FileNotFound,
    #[error("the upload is incomplete")]
    UploadIncomplete,
    #[error("the file is complete")]
    FileComplete,
    #[error("the file is another agent's")]
    NotFileOwner,
    /// The file is larger than this engine takes.
    #[error("a file has at most {max_bytes} bytes")]
    FileTooLarge { max_bytes: i64 },
    /// The token in the file URL is forged, made for another purpose, or expired.
    #[error("invalid or expired file token")]
    InvalidFileToken,
    #[error("the storage of files failed")]
    FileStorage(#[source] relay_blobs::BlobError),
    #[error("the bytes of the file are missing")]
    FileBytesMissing,

    #[error("a webhook token is required")]
    WebhookTokenRequired,
    #[error("webhook not found")]
    WebhookNotFound,
    #[error("subscription not found")]
    SubscriptionNotFound,
    #[error("only an agent can be placed beside itself")]
    PlacementSelfRequiresAgent,
    /// The caller runs on no node of role broker.
    #[error("the caller runs on no broker node")]
    PlacementSelfUnavailable,
    /// The agent's token has been rotated since the release was requested.
    #[error("the agent has another token by now")]
    ReleaseGenerationConflict,
    #[error("the node of agent {0} cannot be reached")]
    AgentHostUnavailable(String),
    #[error("trigger not found")]
    TriggerNotFound,
    #[error("too many triggers")]
    TooManyTriggers,
    /// The secret was encrypted with a key that this process does not have.
    #[error("sealed with key {key_id}, which is not known here")]
    SealedWithUnknownKey { key_id: String },
    #[error("invalid event type")]
    InvalidEventType,
    #[error("an agent reports events of its own session only")]
    NotOwnSession,

    /// The encoded `deliver` frame would exceed its limit.
    #[error("the message is too large to be delivered")]
    PayloadTooLarge,
    /// No such message, or none that the caller may see.
    #[error("message not found")]
    MessageNotFound,
    /// Only its author may change a message.
    #[error("not the author of this message")]
    NotTheAuthor,
    #[error("invalid address")]
    InvalidAddress,
    #[error("ambiguous address")]
    AmbiguousAddress,
    /// Nobody is at that address.
    #[error("address not found")]
    AddressNotFound,
    #[error("conversation not found")]
    ConversationNotFound,
    #[error("not a participant of this conversation")]
    NotAParticipant,
    #[error("delivery not found")]
    DeliveryNotFound,

    #[error("the dead letter cannot be sent again: {0}")]
    NotRedrivable(String),
    #[error("redrive not found")]
    RedriveNotFound,

    #[error("action not found")]
    ActionNotFound,
    #[error("the action name {0} is taken")]
    ActionNameConflict(String),
    #[error("an action has exactly one handler")]
    InvalidActionHandler,
    #[error("node {node} lacks the capability {capability}")]
    CapabilityMismatch { node: String, capability: String },
    #[error("not the handler")]
    NotTheHandler,
    #[error("too many actions")]
    TooManyActions,
    #[error("invoking {0} is denied")]
    ActionDenied(String),
    /// The input is not what the action's schema asks for.
    #[error("the input at {path:?} does not fit: {message}")]
    InvalidActionInput {
        /// JSON pointer into the input.
        path: String,
        message: String,
    },
    /// No handler can run the action now; the text says why.
    #[error("no handler is available: {0}")]
    HandlerUnavailable(String),
    #[error("too many invocations of {0} are open")]
    TooManyInvocations(&'static str),
    #[error("invocation not found")]
    InvocationNotFound,
    /// The provider reports the result over its socket.
    #[error("the invocation is a node's")]
    NodeOwnedInvocation,

    /// No such node.
    #[error("node {0} not found")]
    NodeNotFound(String),
    #[error("another node is called {0}")]
    NodeNameConflict(String),
    #[error("invalid node name")]
    InvalidNodeName,
    /// Only agents on nodes of kind poll claim deliveries; other kinds receive them.
    #[error("the caller is not on a node of kind poll")]
    NotPolled,
    #[error("node {node} is of kind {}", kind.as_str())]
    NodeKindIsFixed {
        /// The node's name.
        node: String,
        kind: NodeKind,
    },
    /// The egress policy refuses the URL.
    #[error("unsafe delivery url: {0}")]
    UnsafeNodeDeliveryUrl(String),
    /// The delivery settings do not fit the node.
    #[error("invalid node delivery: {0}")]
    InvalidNodeDelivery(String),
    #[error("a direct node has exactly one agent")]
    DirectNodeCapacity,
    #[error("node {node} takes no more than {max_agents} agents")]
    NodeCapacityExceeded {
        /// The node's name.
        node: String,
        max_agents: i32,
    },
    /// The agent is not bound to that node.
    #[error("agent {agent} is not bound to node {node}")]
    NodeAgentBindingNotFound {
        /// The agent's name.
        agent: String,
        node: String,
    },
    /// The frame names another node than the token.
    #[error("node_id is not the node of this token")]
    NodeIdMismatch,
    /// Another instance of the provider answered the probe.
    #[error("another instance serves this provider")]
    ProviderInstanceConflict,
    /// The connection has been superseded by a newer one.
    #[error("the connection has been superseded")]
    Superseded,
    #[error("agent {0} does not have that id")]
    AgentIdentityMismatch(String),
    #[error("agent {0} is hosted by another node")]
    AgentLocationConflict(String),
    /// Another provider of the node hosts the agent.
    #[error("agent {0} is hosted by another provider of this node")]
    AgentProviderConflict(String),
    #[error("the agent's identity is another one")]
    AgentIdentityConflict,
    #[error("agent is bound to node {0}")]
    AgentBoundToNode(NodeId),
}

impl EngineError {
    /// Converts errors of a step that follows a commit. A transient error would make clients repeat the whole request.
    #[must_use]
    pub(crate) fn after_commit(self) -> Self {
        if self.is_transient() { Self::OutcomeUnknown } else { self }
    }

    /// True for an unavailable or overloaded storage: nothing was done, and the same request may succeed later.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::CommitUnavailable | Self::Overloaded)
    }
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Unavailable { .. } => Self::Unavailable(error),
            // Lost against other transactions: nothing was done, and the next attempt will most likely succeed.
            StoreError::Aborted { .. } => Self::Overloaded,
            StoreError::OutcomeUnknown { .. } => Self::OutcomeUnknown,
            StoreError::Refused { .. } | StoreError::Corrupt { .. } => Self::Store(error),
        }
    }
}
