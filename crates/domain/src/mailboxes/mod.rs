//! Mailboxes: a [`Delivery`], its states ([`delivery`]), the delivery stream of one connection ([`stream`]) and dead
//! letters ([`dead_letter`]). Used by the store, the engine and the gateway's node connections.

pub mod dead_letter;
pub mod delivery;
pub mod inbox;
mod location;
mod record;
mod stored;
pub mod stream;

pub use location::MessageLocation;
pub use record::{Delivery, DeliveryMessage, DeliveryNode, DeliveryReport, Mailbox, SettlementRecord};
pub use stored::{Content, ContentBudget, StoredDelivery};
