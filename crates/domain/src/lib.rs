//! The rules of the engine: ids, sequences, session and delivery states, leases, names.
//!
//! Nothing in here performs I/O, awaits or reads a clock: instants come in as values, decisions go
//! out as values, and the caller acts on them. Every other crate may depend on this one.

pub mod action;
pub mod agent;
pub mod conversation;
pub mod dead_letter;
pub mod delivery;
pub mod event;
pub mod event_id;
pub mod file;
pub mod ids;
pub mod mentions;
pub mod metric_names;
pub mod names;
pub mod node;
pub mod observer;
pub mod placement;
pub mod plan;
pub mod push;
pub mod rate;
pub mod recovery;
pub mod scope;
pub mod session;
pub mod session_event;
pub mod shard;
pub mod snowflake;
pub mod subscription;
pub mod subscription_call;
pub mod takeover;
pub mod token;
pub mod trigger;

pub use ids::{
    ActionId, AgentId, BatchId, ChannelId, ConversationId, DeliveryId, FileId, GatewayId, InvocationId, MessageId,
    NodeId, ObserverTokenId, ProviderName, SessionEventId, SubscriptionId, TriggerId, WebhookId, WorkspaceId,
};
pub use scope::WorkspaceScope;
