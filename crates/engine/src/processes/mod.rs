//! This process as seen by others: gateway lease and connection gauges. Handle: [`Processes`].

pub(crate) mod connection_gauges;
pub mod gateway_lease;

use relay_stream::Stream;
use relay_tasks::TaskSet;

use crate::core::Core;

/// Handle of this process as a gateway.
#[derive(Clone)]
pub struct Processes {
    pub(crate) core: Core,
    pub(crate) stream: Stream,
    pub(crate) tasks: TaskSet,
}
