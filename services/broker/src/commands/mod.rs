//! Commands beside the broker itself.

mod ack;
mod dump_pty;
mod verify;

pub(crate) use ack::ack;
pub(crate) use dump_pty::dump_pty;
pub(crate) use verify::verify;
