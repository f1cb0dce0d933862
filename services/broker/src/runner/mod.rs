//! Runners: processes that host action handlers and talk to the broker only, over `/api/fleet/ws`.
//!
//! [`Runners`] knows the one that is connected and its calls, [`open`] serves its socket. Frames and payloads are
//! in [`crate::api::types`].
//! `supervisor` starts its program again.
//! Requests of a runner are answered by the routes of the listen API, so that both say the same.

mod outbox;
mod registry;
mod requests;
mod socket;
mod supervisor;

pub(crate) use registry::Runners;
pub(crate) use socket::open;
