//! Messages in lists.

use serde::Serialize;

/// Entry of `GET /api/spawned/{name}/pending`: a message that waits.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PendingMessage {
    pub(crate) from: String,
    pub(crate) body: String,
    pub(crate) target: String,
    pub(crate) priority: u8,
    pub(crate) mode: &'static str,
    pub(crate) queued_at_ms: i64,
    pub(crate) event_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) thread_id: Option<String>,
    pub(crate) workspace_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) workspace_alias: Option<String>,
    pub(crate) delivery_id: String,
}

/// Entry of `GET /api/dead-letters`: a delivery that failed.
#[derive(Debug, Serialize)]
pub(crate) struct DeadLetterEntry {
    pub(crate) delivery_id: String,
    pub(crate) event_id: String,
    pub(crate) name: String,
    pub(crate) from: String,
    pub(crate) target: String,
    pub(crate) body: String,
    pub(crate) thread_id: Option<String>,
    pub(crate) reason: &'static str,
    pub(crate) attempts: u32,
    pub(crate) failed_at_ms: i64,
}
