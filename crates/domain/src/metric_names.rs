//! The names of the metrics, in one place, so that what is counted and what is described cannot differ.
//!
//! No label of any of them carries a workspace, agent or node: their number would have no bound.

/// Messages committed. Counter.
pub const MESSAGES_ACCEPTED: &str = "relay_messages_accepted_total";
/// Delivery rows committed. Counter.
pub const DELIVERIES_WRITTEN: &str = "relay_deliveries_written_total";
/// Delivery frames acknowledged by JetStream. Counter.
pub const DELIVERIES_PUBLISHED: &str = "relay_deliveries_published_total";
/// Commit batches that the publisher had no room for; the outbox relay publishes them. Counter.
pub const PUBLISH_SKIPPED: &str = "relay_publish_skipped_total";
/// Commit batches that JetStream was slow to store, so that gateways were told to read Postgres. Counter.
pub const PUBLISH_STALLED: &str = "relay_publish_stalled_total";
/// Deliveries not written because the recipient's mailbox was full. Counter.
pub const DELIVERIES_REFUSED: &str = "relay_deliveries_refused_total";
/// `deliver` frames written to sockets, replayed ones and tombstones included. Counter.
pub const DELIVERIES_SENT: &str = "relay_deliveries_sent_total";
/// Deliveries settled by a socket's cumulative ack. Counter.
pub const DELIVERIES_ACKED: &str = "relay_deliveries_acked_total";
/// `deliver` frames sent because a mailbox was resumed. Counter.
pub const DELIVERIES_REPLAYED: &str = "relay_deliveries_replayed_total";
/// `deliver` frames read from Postgres because the live copy was missing or late. Counter.
pub const DELIVERIES_REPAIRED: &str = "relay_deliveries_repaired_total";
/// Deliveries dead-lettered. Counter; label `reason`.
pub const DELIVERIES_DEAD_LETTERED: &str = "relay_deliveries_dead_lettered_total";
/// Live frames dropped because their seq had been sent already. Counter.
pub const DUPLICATES_DROPPED: &str = "relay_duplicates_dropped_total";
/// Acks beyond the highest seq ever sent, cut down to it. Counter.
pub const ACKS_CLAMPED: &str = "relay_acks_clamped_total";
/// Age of the oldest outbox row that is not marked published, in seconds. Gauge.
pub const OUTBOX_LAG_SECONDS: &str = "relay_outbox_lag_seconds";
/// Outbox rows that are not marked published. Gauge, counted up to a bound.
pub const OUTBOX_PENDING: &str = "relay_outbox_pending";
/// Commit batches published by the outbox relay instead of their gateway. Counter.
pub const OUTBOX_RELAYED: &str = "relay_outbox_relayed_total";
/// Node sockets open on this gateway. Gauge.
pub const CONNECTED_NODES: &str = "relay_connected_nodes";
/// Agents served by the sockets of this gateway. Gauge.
pub const CONNECTED_AGENTS: &str = "relay_connected_agents";
/// From a message's commit to the ack of its delivery, in seconds. Histogram.
pub const ACK_LATENCY_SECONDS: &str = "relay_ack_latency_seconds";
/// Requests that one commit carried. Histogram.
pub const COMMIT_BATCH_SIZE: &str = "relay_commit_batch_size";
/// Duration of one commit, in seconds. Histogram.
pub const COMMIT_SECONDS: &str = "relay_commit_seconds";
/// When a worker loop last ended without an error, in unix seconds. Gauge; label `loop`.
pub const LOOP_LAST_SUCCESS: &str = "relay_loop_last_success_timestamp_seconds";
/// Duration of a worker loop's tick, in seconds. Histogram; label `loop`.
pub const LOOP_SECONDS: &str = "relay_loop_seconds";
/// Worker loop ticks that failed. Counter; label `loop`.
pub const LOOP_FAILURES: &str = "relay_loop_failures_total";
/// Things a worker loop dealt with. Counter; label `loop`.
pub const LOOP_WORK: &str = "relay_loop_work_total";
/// HTTP requests answered. Counter; labels `method`, `route` (the template), `status`.
pub const HTTP_REQUESTS: &str = "relay_http_requests_total";
/// Time to answer an HTTP request, in seconds. Histogram; label `route` (the template).
pub const HTTP_SECONDS: &str = "relay_http_seconds";
