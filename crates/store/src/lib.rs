//! All SQL of the engine, over one Postgres.
//!
//! Functions here are single steps: they take a [`WorkspaceScope`](relay_domain::WorkspaceScope) and
//! plain values, and return plain values or an outcome. Rules live in `relay-domain`, use cases in
//! `relay-engine`. Losing a race is an outcome, "not there" is `None`; only a database that did not do
//! what was asked is an error.

mod agents;
mod channels;
pub mod audience;
mod idempotency;
mod members;
mod tokens;
mod workspaces;
mod worker_ids;
pub mod commit;
mod commit_write;
pub mod cursors;
mod bindings;
mod deliveries;
mod dms;
pub mod dead_gateways;
mod enrolment;
mod error;
pub mod expiry;
pub mod liveness;
mod loop_state;
pub mod outbox_relay;
pub mod partitions;
pub mod pruning;
mod exceptions;
mod messages_read;
mod nodes;
mod reads;
pub mod hosting;
pub mod leases;
mod pool;
pub mod providers;
pub mod replay;

pub use agents::{AgentChange, AgentRow, DeletedAgent, NewAgent, Registration, Seen};
pub use bindings::{BindOutcome, BindingRow};
pub use deliveries::DeliveryRow;
pub use dms::{ConversationRow, KeptAnswer, ListedConversation, NewConversation, OpenOutcome};
pub use channels::{ChannelRow, NewChannel};
pub use error::{StoreError, StoreResult};
pub use exceptions::DeliveryReport;
pub use messages_read::{ListedMessage, MessagePage, MessageRow};
pub use enrolment::{DirectTokenOutcome, EnrolOutcome, NodeEnrolment};
pub use nodes::{NodeFilter, NodeProviderRow, NodeRow};
pub use reads::ReadReceipt;
pub use idempotency::StoredResponse;
pub use members::{Joining, MemberRow, Membership};
pub use pool::{MIGRATOR, Store};
pub use tokens::TokenOwner;
pub use workspaces::{Creation, CreationKey, NewWorkspace, WorkspaceRow};
