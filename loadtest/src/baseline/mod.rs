//! Baselines: the same work on the bare servers in the same run, for comparison with the engine.

mod jetstream;
mod pg;

pub(crate) use jetstream::{Consumers, JetStream};
pub(crate) use pg::rows;
