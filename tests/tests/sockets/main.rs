//! Node sockets: agents hosted over them, their bounds and their tokens.

mod frame_limits;
mod holds;
mod hosting;
mod malformed;
mod registering;
mod tokens;
