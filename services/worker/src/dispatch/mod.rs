//! The engine as the dispatcher of outbound deliveries needs it.

mod push;
mod subscriptions;

use relay_dispatch::{QueueError, QueueErrorKind};
use relay_engine::EngineError;

pub(crate) use push::EnginePushQueue;
pub(crate) use subscriptions::EngineSubscriptionQueue;

fn queue_error(error: EngineError) -> QueueError {
    let kind = if matches!(error, EngineError::Unavailable(_)) {
        QueueErrorKind::Unavailable
    } else if error.is_permanent() {
        QueueErrorKind::Permanent
    } else {
        QueueErrorKind::Temporary
    };
    QueueError::new(error, kind)
}
