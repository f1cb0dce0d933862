//! Names of this crate's metrics. The others are in `relay_domain::metric_names`.

/// Panics of tasks. Counter; label `task`: the name of a long-running task, or `request`, `connection`, `mailbox`, ….
pub const TASK_PANICS: &str = "relay_task_panics_total";
/// Bytes reserved for message bodies in memory. Gauge; label `use`: `deliveries`, `calls`, `answers` or `requests`.
pub const BODY_BYTES: &str = "relay_body_bytes";
/// Reads and calls that waited until others had freed memory for message bodies. Counter; label `use`.
pub const BODY_WAITS: &str = "relay_body_waits_total";
/// Items of one batch of a queue. Histogram; label `queue`.
pub const BATCH_ITEMS: &str = "relay_batch_items";
/// Items that wait in a queue after its last batch was taken. Gauge; label `queue`.
pub const QUEUE_ITEMS: &str = "relay_queue_items";
/// Items refused or dropped because their queue was full. Counter; label `queue`.
pub const QUEUE_REFUSED: &str = "relay_queue_refused_total";
