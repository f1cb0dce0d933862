//! Commands beside the broker itself: one function for each, called by `main`. Those that ask a running broker use
//! `broker_client`.

mod ack;
mod broker_client;
mod dump_pty;
mod mcp;
mod mcp_args;
mod verification;
mod verify;

pub(crate) use ack::ack;
pub(crate) use dump_pty::dump_pty;
pub(crate) use mcp::mcp;
pub(crate) use mcp_args::mcp_args;
pub(crate) use verification::verification;
pub(crate) use verify::verify;
