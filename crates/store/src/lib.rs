//! All SQL of the service, over one Postgres. Called by `relay-engine` and `relay-admin`.
//!
//! Functions are single steps: they take a [`WorkspaceScope`](relay_domain::WorkspaceScope) and plain values, and
//! return plain values or an outcome. A lost race is an outcome and an absent row is `None`.
//!
//! Every call may fail with [`StoreError::Unavailable`], and one that locks rows with [`StoreError::Aborted`]. A failed
//! call has changed nothing unless the error is [`StoreError::OutcomeUnknown`]; doc comments mention errors only where
//! more is to be said.
//!
//! Lock order of transactions that lock several kinds of rows: a node, its providers, agents, push mailboxes; or the
//! record of a fan-out, outbox row, idempotency keys, mailbox heads, mailbox cursors, push mailboxes. Event counters
//! are last. Several providers, agents, keys, heads, cursors or counters are locked in the order of their keys.
//! Batches of heartbeats are not: one that loses a deadlock is repeated.

pub mod access;
pub mod actions;
pub mod admin;
pub mod agents;
pub mod channels;
mod codes;
mod connections;
mod decode;
mod error;
pub mod events;
pub mod files;
pub mod mailboxes;
pub mod maintenance;
pub mod messages;
pub mod nodes;
mod observers;
mod pool;
pub mod processes;
pub mod push;
pub mod recovery;
pub mod search;
mod sizes;
mod statement_timeout;
pub mod subscriptions;
pub mod workspaces;

pub use access::idempotency::{
    IdempotencyKey, InvocationRecord, PostRecord, SessionEventRecord, SpawnRecord, StoredResponse,
};
pub use access::rotation::{ChangedToken, TokenRotation};
pub use access::tokens::{TokenLookup, TokenOwner};
pub use actions::dispatches::{SentInvocation, UnsentInvocation};
pub use agents::addresses::AddressedAgent;
pub use agents::bindings::{BindOutcome, NewBinding, UnboundAgent};
pub use agents::lifecycle::{AgentChange, DeleteCondition, DeletedAgent, NewAgent, Registration};
pub use agents::presence::LastSeen;
pub use agents::respawn::RespawnOutcome;
pub use channels::conversations::{NewConversation, OpenOutcome};
pub use channels::lifecycle::{ChannelCreation, ChannelUpdate, NewChannel};
pub use channels::members::{JoinOutcome, MemberKey};
pub use error::{StoreError, StoreResult};
pub use files::objects::FileObject;
pub use mailboxes::delivery_events::delivered_event;
pub use mailboxes::settlements::ReportOutcome;
pub use messages::queries::MessageHead;
pub use messages::reactions::{NewReaction, Reaction, ReactionKey, ReactionOutcome};
pub use messages::receipts::ReadReceipt;
pub use messages::update::MessageChange;
pub use nodes::enrolment::{DirectTokenOutcome, EnrolOutcome, EnrolmentToken, NewDelivery, NodeEnrolment};
pub use observers::overrides::{
    ObserverChanges, OverrideCursor, OverrideRow, OverrideState, RetireOutcome, SigningKeyRow,
};
pub use observers::tokens::{
    NewObserverToken, ObserverTokenChange, ObserverTokenCreation, ObserverTokenLimits, ObserverTokenUpdate,
};
pub use pool::{Connections, DatabaseAddress, MIGRATOR, Pooler, Store};
pub use workspaces::lifecycle::{CreationKey, NewWorkspace, WorkspaceChange, WorkspaceCreation};
pub use workspaces::quotas::{EffectiveLimits, QuotasRow};
pub use workspaces::rate_limits::RateLimitGrant;
