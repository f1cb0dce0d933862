//! Rules of the engine: ids, names, limits, states and placement.
//!
//! Nothing in this crate performs I/O, awaits or reads a clock: instants come in as values, decisions go out as values,
//! and the caller acts on them. Every other crate may depend on this one.
//!
//! The feature `sqlx` lets ids and stored enums be bound to statements, and these and nouns be decoded from rows; only
//! `relay-store` turns it on.

pub mod access;
pub mod actions;
pub mod agents;
pub mod channels;
mod columns;
pub mod events;
pub mod files;
pub mod ids;
mod json_text;
pub mod mailboxes;
pub mod messages;
pub mod metric_names;
pub mod names;
pub mod nodes;
pub mod observers;
pub mod push;
pub mod recovery;
pub mod search;
pub mod shard;
pub mod snowflake;
pub mod subscriptions;
pub mod workspaces;

pub use access::scope::WorkspaceScope;
pub use ids::{
    ActionId, AgentId, AttemptId, BatchId, ChannelId, ClaimId, ConversationId, DeliveryId, FileId, FileObjectId,
    GatewayId, InvocationId, MessageId, NodeId, ObserverTokenId, ProviderName, PushWorkerId, ReactionId, RedriveId,
    SessionEventId, SourceId, SubscriptionDeliveryId, SubscriptionId, TriggerId, WebhookId, WorkspaceId,
};
pub use json_text::{JsonEntries, JsonText, encoded_length};
