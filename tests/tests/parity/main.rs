//! Behaviours of the reference engine that clients feel (docs/compatibility.md, "Parity"), each over two gateways.

mod enrolment;
mod handlers;
mod inventories;
mod metadata;
mod moves;
mod notices;
mod policies;
mod releases;
mod triggers;
