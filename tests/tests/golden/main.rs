//! Every route and every frame, once through: what clients see is byte by byte what the golden files say.
//!
//! `relay_acceptance::golden` says how they are compared and recorded again. A chapter that waits for something does
//! so beside the recording.

#![expect(clippy::print_stdout, reason = "shown with a failed test")]

mod actions;
mod agents;
mod conversations;
mod deliveries;
mod files;
mod hooks;
mod limits;
mod observers;
mod refusals;
mod sockets;
mod walk;
mod workspaces;
