//! The node socket `/v1/node/ws`: the only module that exchanges frames with the engine.
//!
//! [`EngineLink`] is the handle for the rest of the broker, [`LinkTask`] keeps one connection open. Frames for hosted
//! agents go into their mailboxes without waiting for a terminal; probes and barriers are answered in socket order.

mod acks;
mod backoff;
mod connection;
mod dial;
mod hosted;
mod incoming;
mod link;
mod manifest;
mod outbox;
mod pending;
mod repeats;
mod task;

pub(crate) use hosted::HostedAgent;
pub(crate) use link::{EngineLink, LinkError, Registration};
pub(crate) use manifest::Manifest;
pub(crate) use task::{LinkSettings, LinkTask};
