//! The engine over REST: the client [`Engine`], its [`EngineError`], and the broker's [`Identity`] there. The socket is
//! in `engine_link`.

mod client;
mod error;
mod identity;
mod machine;

pub(crate) use client::{Engine, Request};
pub(crate) use error::{EngineError, is_permanent};
pub(crate) use identity::{Identity, JoinRequest, join};
pub(crate) use machine::{machine_seed, node_id};
