//! Behaviours of the reference engine that clients feel (docs/compatibility.md, "Parity"), each over two gateways.

mod enrolment;
mod facts_addresses;
mod facts_lists;
mod facts_messages;
mod facts_nodes;
mod facts_sessions;
mod facts_shapes;
mod handlers;
mod inventories;
mod metadata;
mod moves;
mod notices;
mod policies;
mod releases;
mod triggers;
