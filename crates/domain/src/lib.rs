//! The rules of the engine: ids, sequences, session and delivery states, leases, names.
//!
//! Nothing in here performs I/O, awaits or reads a clock: instants come in as values, decisions go
//! out as values, and the caller acts on them. Every other crate may depend on this one.

pub mod agent;
pub mod conversation;
pub mod delivery;
pub mod event_id;
pub mod ids;
pub mod mentions;
pub mod metric_names;
pub mod names;
pub mod node;
pub mod scope;
pub mod session;
pub mod shard;
pub mod snowflake;
pub mod takeover;
pub mod token;

pub use ids::{
    AgentId, BatchId, ChannelId, ConversationId, DeliveryId, GatewayId, MessageId, NodeId, ProviderName, WorkspaceId,
};
pub use scope::WorkspaceScope;
