//! Events for drivers: the durable ones that are kept ([`ring`]), and the subscribers ([`Hub`]). The kinds are in
//! [`crate::api::types`].
//!
//! Durable events have a `seq` and are read from the ring by position. Terminal output and other ephemeral events go
//! through a bounded lane of each subscriber, so that a slow reader costs nobody else anything.

mod hub;
mod lane;
mod ring;

pub(crate) use hub::{Hub, Next, Subscription};
