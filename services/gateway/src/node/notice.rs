//! What agents' sockets are told besides their deliveries.

/// A best-effort event for agents' sockets.
#[derive(Debug)]
pub(super) struct Notice {
    pub(super) topic: String,
    pub(super) event: String,
    pub(super) data: serde_json::Value,
    /// Present when it goes out as a `deliver` frame with seq 0 instead of a `context.update`.
    pub(super) event_id: Option<String>,
}
