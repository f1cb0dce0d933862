//! Mailboxes: a [`Delivery`], its states ([`delivery`]), the delivery stream of one connection ([`stream`]) and dead
//! letters ([`dead_letter`]). Used by the store, the engine and the gateway's node connections.

pub mod dead_letter;
pub mod delivery;
mod record;
pub mod stream;

pub use record::{Delivery, DeliveryMessage, DeliveryNode, SettlementRecord};
