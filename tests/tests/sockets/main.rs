//! Node sockets: hosted agents, limits and tokens.

#![expect(clippy::print_stdout, reason = "shown with a failed test")]

mod changed_nodes;
mod frame_limits;
mod holds;
mod hosting;
mod live_copies;
mod malformed;
mod message_send;
mod registering;
mod subprotocols;
mod tokens;
