//! All SQL of the engine, over one Postgres.
//!
//! Functions here are single steps: they take a [`WorkspaceScope`](relay_domain::WorkspaceScope) and
//! plain values, and return plain values or an outcome. Rules live in `relay-domain`, use cases in
//! `relay-engine`. Losing a race is an outcome, "not there" is `None`; only a database that did not do
//! what was asked is an error.

mod agents;
pub mod audience;
mod bindings;
mod channels;
pub mod commit;
mod commit_write;
pub mod cursors;
pub mod dead_gateways;
mod deliveries;
mod dms;
mod enrolment;
mod error;
mod exceptions;
pub mod expiry;
pub mod hosting;
mod idempotency;
pub mod leases;
pub mod liveness;
mod loop_state;
mod members;
mod messages_read;
mod nodes;
pub mod outbox_relay;
pub mod partitions;
mod patience;
mod pool;
pub mod providers;
pub mod pruning;
mod reads;
pub mod replay;
mod respawn;
mod tokens;
mod worker_ids;
mod workspaces;

pub use agents::{AgentChange, AgentRow, DeletedAgent, NewAgent, Registration, Seen};
pub use bindings::{BindOutcome, BindingRow};
pub use channels::{ChannelRow, NewChannel};
pub use deliveries::DeliveryRow;
pub use dms::{ConversationRow, KeptAnswer, ListedConversation, NewConversation, OpenOutcome};
pub use enrolment::{DirectTokenOutcome, EnrolOutcome, NodeEnrolment};
pub use error::{StoreError, StoreResult};
pub use exceptions::DeliveryReport;
pub use idempotency::StoredResponse;
pub use members::{Joining, MemberRow, Membership};
pub use messages_read::{ListedMessage, MessagePage, MessageRow};
pub use nodes::{NodeFilter, NodeProviderRow, NodeRow};
pub use pool::{MIGRATOR, Store};
pub use reads::ReadReceipt;
pub use respawn::{Respawn, SpawnKey};
pub use tokens::TokenOwner;
pub use workspaces::{Creation, CreationKey, NewWorkspace, WorkspaceRow};
