//! Baselines: the same work on the bare servers in the same run, for comparison with the engine.

mod gateway;
mod gateway_process;
mod jetstream;
mod pg;

pub(crate) use gateway::serve;
pub(crate) use gateway_process::GatewayProcess;
pub(crate) use jetstream::{Consumers, JetStream};
pub(crate) use pg::rows;
