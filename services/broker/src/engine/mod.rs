//! The engine over REST: the client, the errors, and the broker's identity there. The socket is in `engine_link`.

mod client;
mod error;
mod identity;
mod machine;

pub(crate) use client::{Engine, Request};
pub(crate) use error::{EngineError, is_permanent};
pub(crate) use identity::{Identity, JoinRequest, join};
pub(crate) use machine::{machine_seed, node_id};
