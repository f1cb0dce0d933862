//! The same work on the bare servers, in the same run: what the engine is compared with.

mod jetstream;
mod pg;

pub(crate) use jetstream::{Consumers, JetStream};
pub(crate) use pg::rows;
