//! Event subscriptions: their definitions, the matching of events, and the leases under which a worker serves them. The
//! worker's dispatcher makes the calls.

pub mod definitions;
mod matching;
mod worker;

pub use worker::{EventsMatched, Lease, LeasedSubscription, SubscriptionWorker};
