//! The engine as the dispatcher of outbound deliveries needs it.

mod push;
mod subscriptions;

use relay_dispatch::QueueError;
use relay_engine::EngineError;

pub(crate) use push::EnginePushQueue;
pub(crate) use subscriptions::EngineSubscriptionQueue;

fn queue_error(error: EngineError) -> QueueError {
    if matches!(error, EngineError::Unavailable(_)) {
        QueueError::Unavailable(error.into())
    } else if error.is_permanent() {
        QueueError::Permanent(error.into())
    } else {
        QueueError::Temporary(error.into())
    }
}
