//! Errors of the use cases. Main type: [`EngineError`], whose variants are kinds; the enum inside each says what the
//! error is about. The gateway maps both to a status and a stable code.

use relay_domain::{
    NodeId,
    access::{rights::Refusal, token::TokenKind},
    names,
    nodes::NodeKind,
    workspaces::plan::Quota,
};
use relay_store::StoreError;

pub type EngineResult<T> = Result<T, EngineError>;

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Postgres is unavailable. Nothing was done.
    #[error("storage is unavailable")]
    Unavailable(#[source] StoreError),
    /// Postgres was unavailable when the batch of this request was to be committed. Nothing was written.
    #[error("storage was unavailable for the commit")]
    CommitUnavailable,
    /// A queue is full, or the transaction lost against others. Nothing was done.
    #[error("too many requests are waiting")]
    Overloaded,
    /// Commit outcome unknown, and it will stay unknown: the caller must get no status, since clients send again after
    /// a 5xx.
    #[error("the outcome of the commit is unknown")]
    OutcomeUnknown,
    /// Fault of the installation, which a repeated request will meet again.
    #[error(transparent)]
    Internal(Fault),
    /// Something other than storage is unavailable. Nothing was done.
    #[error(transparent)]
    DependencyUnavailable(Dependency),
    #[error(transparent)]
    Unauthenticated(BadCredential),
    /// The client's address has presented too many unknown tokens. Nothing was looked up.
    #[error("too many unknown tokens from this address")]
    TooManyUnknownTokens {
        /// Seconds until the next attempt: 1 to 60.
        retry_after: u16,
    },
    /// An operator has suspended the workspace. Its data is kept.
    #[error("the workspace is suspended")]
    WorkspaceSuspended,
    #[error(transparent)]
    Forbidden(Denial),
    #[error(transparent)]
    Invalid(InvalidInput),
    #[error(transparent)]
    NotFound(Missing),
    #[error(transparent)]
    Conflict(Conflict),
    /// A limit of the workspace is reached.
    #[error(transparent)]
    LimitExceeded(Limit),
    #[error(transparent)]
    TooLarge(TooLarge),
}

/// Fault of the installation.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Storage failed permanently.
    #[error("storage failed")]
    Store(#[source] StoreError),
    /// Storage refused the statement. Nothing was written.
    #[error("storage refused the commit")]
    CommitRefused,
    /// NATS failed. Postgres has the record.
    #[error(transparent)]
    Stream(relay_stream::StreamError),
    /// The operating system gave no random bytes.
    #[error("no random bytes")]
    NoRandomness,
    #[error("no worker number is free")]
    NoWorkerNumber,
    #[error("the bytes of the file are missing")]
    FileBytesMissing,
    /// The secret was encrypted with a key that this process does not have.
    #[error("encrypted with key {key_id}, which is not known here")]
    SealedWithUnknownKey { key_id: String },
    /// Without it calls would be unsigned, or signed with an empty key.
    #[error("the stored secret of an endpoint is missing or unusable")]
    EndpointSecretUnusable,
}

/// Unavailable party other than storage.
#[derive(Debug, thiserror::Error)]
pub enum Dependency {
    #[error("the OIDC issuer is unavailable")]
    Issuer,
    #[error("the storage of files failed")]
    FileStorage(#[source] relay_blobs::BlobError),
    #[error("the node of agent {0} cannot be reached")]
    AgentHost(String),
    /// No handler can run the action now; the text says why.
    #[error("no handler is available: {0}")]
    Handler(String),
}

/// Credential that proves nothing, or not what the operation needs.
#[derive(Debug, thiserror::Error)]
pub enum BadCredential {
    #[error("invalid token format")]
    TokenFormat,
    /// The token is unknown or revoked, or has expired.
    #[error("unknown {kind:?} token")]
    UnknownToken { kind: TokenKind },
    /// The token was valid until its workspace expired.
    #[error("the workspace has expired")]
    WorkspaceExpired,
    #[error("a {kind:?} token cannot observe")]
    NotForObserving { kind: TokenKind },
    /// Only an operator may do this, and the caller has not shown to be one.
    #[error("operator credentials are required")]
    NotAnOperator,
    #[error("workspaces are created by operators here")]
    HostedInstallation,
    #[error("a webhook token is required")]
    WebhookTokenRequired,
}

/// Known caller that may not do this.
#[derive(Debug, thiserror::Error)]
pub enum Denial {
    #[error("an agent token is required")]
    AgentTokenRequired,
    #[error("the token lacks the scope {0}")]
    InsufficientScope(String),
    #[error("agent recovery is not authorized")]
    AgentRecovery,
    #[error("not a member of channel {0}")]
    NotAMember(String),
    /// The frame names another node than the token.
    #[error("node_id is not the node of this token")]
    NodeIdMismatch,
    #[error("the file is complete")]
    FileComplete,
    #[error("the file is another agent's")]
    NotFileOwner,
    /// The token in the file URL is forged, made for another purpose, or expired.
    #[error("invalid or expired file token")]
    FileToken,
    #[error("an agent reports events of its own session only")]
    NotOwnSession,
    /// Only its author may change a message.
    #[error("not the author of this message")]
    NotAuthor,
    #[error("not a participant of this conversation")]
    NotAParticipant,
    #[error("the channel has one recipient only")]
    OnlyRecipient,
    #[error("invoking {0} is denied")]
    ActionDenied(String),
    /// The rights of the agent do not permit it.
    #[error("refused: {}", .0.code())]
    Refused(Refusal),
    /// The provider reports the result over its socket.
    #[error("the invocation is a node's")]
    NodeOwnedInvocation,
}

/// Request that can never succeed as it is.
#[derive(Debug, thiserror::Error)]
pub enum InvalidInput {
    #[error(transparent)]
    Text(names::InvalidText),
    /// Any other invalid request; the text goes to the client.
    #[error("{0}")]
    Request(String),
    #[error("invalid idempotency key")]
    IdempotencyKey,
    /// Anonymous creation needs a key that cannot be guessed, because the key gives access to the new workspace.
    #[error("the idempotency key of an anonymous creation is too short")]
    CreationKeyTooWeak,
    #[error("invalid channel name")]
    ChannelName,
    #[error("channel {0} is archived")]
    ChannelArchived(String),
    #[error("the general channel cannot be archived")]
    ArchivedGeneral,
    #[error("from is required")]
    FromRequired,
    #[error("from is not allowed")]
    FromNotAllowed,
    /// An attachment is missing, incomplete or named twice.
    #[error("invalid attachments")]
    Attachments,
    #[error("only an agent can be placed beside itself")]
    PlacementSelfRequiresAgent,
    #[error("invalid event type")]
    EventType,
    #[error("invalid address")]
    Address,
    #[error("ambiguous address")]
    AmbiguousAddress,
    #[error("an action has exactly one handler")]
    ActionHandler,
    /// The input is not what the action's schema asks for.
    #[error("the input at {path:?} does not fit: {message}")]
    ActionInput {
        /// JSON pointer into the input.
        path: String,
        message: String,
    },
    /// The schema would cost too much to apply; the text says why.
    #[error("{0}")]
    SchemaTooComplex(String),
    #[error("invalid node name")]
    NodeName,
    #[error("node {node} is of kind {}", kind.as_str())]
    NodeKindIsFixed {
        /// The node's name.
        node: String,
        kind: NodeKind,
    },
    /// The egress policy refuses the URL.
    #[error("unsafe delivery url: {0}")]
    UnsafeDeliveryUrl(String),
    /// The delivery settings do not fit the node.
    #[error("invalid node delivery: {0}")]
    NodeDelivery(String),
    #[error("a direct node has exactly one agent")]
    DirectNodeCapacity,
}

/// Object that does not exist, or that the caller may not see.
#[derive(Debug, thiserror::Error)]
pub enum Missing {
    #[error("workspace not found")]
    Workspace,
    /// No active agent has this name or id.
    #[error("agent {0} not found")]
    Agent(String),
    #[error("node {0} not found")]
    Node(String),
    /// The agent is not bound to that node.
    #[error("agent {agent} is not bound to node {node}")]
    NodeAgentBinding {
        /// The agent's name.
        agent: String,
        node: String,
    },
    /// No agent or node has that address.
    #[error("address not found")]
    Address,
    #[error("channel {0} not found")]
    Channel(String),
    #[error("conversation not found")]
    Conversation,
    #[error("message not found")]
    Message,
    #[error("delivery not found")]
    Delivery,
    #[error("redrive not found")]
    Redrive,
    #[error("action not found")]
    Action,
    #[error("invocation not found")]
    Invocation,
    #[error("trigger not found")]
    Trigger,
    #[error("webhook not found")]
    Webhook,
    #[error("subscription not found")]
    Subscription,
    #[error("file not found")]
    File,
    /// No such observer token, or it is revoked.
    #[error("observer token not found")]
    ObserverToken,
    #[error("signing key not found")]
    SigningKey,
}

/// Request that the present state does not allow.
#[derive(Debug, thiserror::Error)]
pub enum Conflict {
    /// The key was used with another body.
    #[error("the idempotency key was used with another body")]
    IdempotencyKeyReused,
    #[error("a request with that idempotency key is in progress")]
    IdempotencyInProgress,
    #[error("the idempotency key created a workspace from another body")]
    CreationKeyReused,
    #[error("the workspace created with that idempotency key no longer exists")]
    CreationKeyTerminalized,
    #[error("an active observer token is called {0}")]
    ObserverTokenName(String),
    #[error("the signing key is in use")]
    SigningKeyInUse,
    #[error("too many live signing keys")]
    TooManySigningKeys,
    #[error("agent {0} already exists")]
    AgentExists(String),
    #[error("channel {0} already exists")]
    ChannelExists(String),
    #[error("the upload is incomplete")]
    UploadIncomplete,
    /// The caller runs on no node of role broker.
    #[error("the caller runs on no broker node")]
    PlacementSelfUnavailable,
    /// The agent's token has been rotated since the release was requested.
    #[error("the agent's token has been rotated")]
    ReleaseGeneration,
    #[error("too many triggers")]
    TooManyTriggers,
    #[error("the dead letter cannot be redriven: {0}")]
    NotRedrivable(String),
    #[error("the action name {0} is taken")]
    ActionName(String),
    #[error("node {node} lacks the capability {capability}")]
    CapabilityMismatch { node: String, capability: String },
    #[error("another node is called {0}")]
    NodeName(String),
    /// Only agents on nodes of kind poll claim deliveries; other kinds receive them.
    #[error("the caller is not on a node of kind poll")]
    NotPolled,
    #[error("node {node} takes no more than {max_agents} agents")]
    NodeCapacity {
        /// The node's name.
        node: String,
        max_agents: i32,
    },
    /// Another instance of the provider answered the probe.
    #[error("another instance serves this provider")]
    ProviderInstance,
    /// A newer connection serves the provider.
    #[error("the connection has been superseded")]
    Superseded,
    #[error("agent {0} does not have that id")]
    AgentIdentityMismatch(String),
    #[error("agent {0} is hosted by another node")]
    AgentLocation(String),
    /// Another provider of the node hosts the agent.
    #[error("agent {0} is hosted by another provider of this node")]
    AgentProvider(String),
    #[error("agent is bound to node {0}")]
    AgentBoundToNode(NodeId),
}

/// Limit of the workspace.
#[derive(Debug, thiserror::Error)]
pub enum Limit {
    /// The workspace has as many of these as its plan allows.
    #[error("the plan allows no more {}", .0.as_str())]
    Quota(Quota),
    #[error("too many actions")]
    Actions,
    #[error("too many observer tokens were created within a day")]
    ObserverTokensPerDay,
    #[error("too many invocations of {0} are open")]
    Invocations(&'static str),
}

/// Content beyond its maximum size.
#[derive(Debug, thiserror::Error)]
pub enum TooLarge {
    #[error("a file has at most {max_bytes} bytes")]
    File { max_bytes: i64 },
    /// The encoded `deliver` frame would exceed its limit.
    #[error("the message is too large to be delivered")]
    Message,
}

impl EngineError {
    /// Storage that has not answered in time.
    #[must_use]
    pub const fn storage_timeout(doing: &'static str) -> Self {
        Self::Unavailable(StoreError::unavailable(doing))
    }

    /// Refuses a request with a text for the client.
    #[must_use]
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self::Invalid(InvalidInput::Request(message.into()))
    }

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

    /// Returns whether storage would refuse a repetition of the same request as well.
    #[must_use]
    pub const fn is_permanent(&self) -> bool {
        matches!(self, Self::Internal(Fault::Store(_)))
    }
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> Self {
        match error {
            // Another epoch: nothing was done, and the process serves again after its recovery.
            StoreError::Unavailable { .. } | StoreError::OtherEpoch { .. } => Self::Unavailable(error),
            // Lost against other transactions: nothing was done, and the next attempt will most likely succeed.
            StoreError::Aborted { .. } => Self::Overloaded,
            StoreError::OutcomeUnknown { .. } => Self::OutcomeUnknown,
            StoreError::Refused { .. } | StoreError::Corrupt { .. } => Self::Internal(Fault::Store(error)),
        }
    }
}

/// Formats an error with its causes, outermost first.
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

impl From<relay_stream::StreamError> for EngineError {
    fn from(error: relay_stream::StreamError) -> Self {
        Self::Internal(Fault::Stream(error))
    }
}

impl From<names::InvalidText> for EngineError {
    fn from(invalid: names::InvalidText) -> Self {
        Self::Invalid(InvalidInput::Text(invalid))
    }
}
