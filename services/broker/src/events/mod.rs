//! Events for drivers: the kinds ([`Event`]), the durable ones that are kept ([`ring`]), and the subscribers ([`Hub`]).
//!
//! Durable events have a `seq` and are read from the ring by position. Terminal output and other ephemeral events go
//! through a bounded lane of each subscriber, so that a slow reader costs nobody else anything.

mod hub;
mod kind;
mod lane;
mod ring;

pub(crate) use hub::{Hub, Next, Subscription};
pub(crate) use kind::{DeliveryProof, DeliveryRef, Event, ProcessFacts};
