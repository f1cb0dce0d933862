//! Deliveries to the endpoints of http_push nodes: the settings of endpoints ([`delivery`]), the mailboxes as a worker
//! claims and settles them ([`PushWorker`]), and the sweep for mailboxes that no worker serves. The worker's dispatcher
//! makes the calls.

pub(crate) mod delivery;
pub mod sweep;
mod worker;

pub use worker::{HeldPage, PushEndpoint, PushWorker};
