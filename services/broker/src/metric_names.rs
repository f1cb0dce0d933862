//! Names of the broker's metrics. Every label is bounded: no agent, message or workspace is one.

/// Agents that run or start. Gauge.
pub(crate) const AGENTS: &str = "relay_node_agents";
/// Agents started. Counter.
pub(crate) const SPAWNS: &str = "relay_node_spawns_total";
/// Agents that ended with an error. Counter; label `category`: `segfault`, `oom`, `signal`, `error`.
pub(crate) const CRASHES: &str = "relay_node_crashes_total";
/// Frames for hosted agents. Counter; label `result`: `taken`, `repeated`, `early`, `full`, `dropped`, `other_agent`.
pub(crate) const FRAMES: &str = "relay_node_frames_total";
/// Texts handed to a terminal. Counter; labels `harness`, `attempt`.
pub(crate) const INJECTIONS: &str = "relay_node_injections_total";
/// Deliveries with a final outcome. Counter; labels `harness`, `outcome`: `verified`, `unverified`, `failed`,
/// `cancelled`.
pub(crate) const DELIVERIES: &str = "relay_node_deliveries_total";
/// Settled messages by the strongest signal. Counter; labels `harness`, `method`, `level`.
pub(crate) const VERIFICATIONS: &str = "relay_node_verifications_total";
/// Time from the first byte written to the signal, in seconds. Histogram; labels `harness`, `method`.
pub(crate) const VERIFY_SECONDS: &str = "relay_node_verify_seconds";
/// Messages without a signal that were not typed again. Counter; labels `harness`, `reason`.
pub(crate) const RETRIES_SUPPRESSED: &str = "relay_node_retries_suppressed_total";
/// Signals that do not count. Counter; label `reason`.
pub(crate) const SIGNALS_IGNORED: &str = "relay_node_signals_ignored_total";
/// Time that messages waited because their agent wrote too much, in seconds. Counter; label `harness`.
pub(crate) const OUTPUT_HOLD_SECONDS: &str = "relay_node_output_hold_seconds_total";
/// Time from taking a message from the engine to its ack, in seconds. Histogram.
pub(crate) const ACK_WAIT_SECONDS: &str = "relay_node_ack_wait_seconds";
/// Messages that were typed and have no outcome. Gauge; label `harness`.
pub(crate) const UNSETTLED: &str = "relay_node_unsettled";
/// 1 for a conclusion about an agent program. Gauge; labels `harness`, `what`: `echo_unreliable`, `short_echo_window`.
pub(crate) const LEARNED: &str = "relay_node_learned";
/// Bytes of output of all agents. Counter.
pub(crate) const OUTPUT_BYTES: &str = "relay_node_output_bytes_total";
/// Bytes of output dropped for slow subscribers. Counter.
pub(crate) const OUTPUT_DROPPED_BYTES: &str = "relay_node_output_dropped_bytes_total";
/// Read receipts dropped because their queue was full. Counter.
pub(crate) const RECEIPTS_DROPPED: &str = "relay_node_receipts_dropped_total";
/// Events of agents for the engine dropped: their queue was full, or the engine has refused them. Counter.
pub(crate) const REPORTS_DROPPED: &str = "relay_node_reports_dropped_total";
/// Requests of agents to save or load notes dropped: another one waited. Counter.
pub(crate) const CONTINUITY_DROPPED: &str = "relay_node_continuity_dropped_total";
/// Entries of a queue of the broker. Gauge; label `queue`: `commands`, `mailboxes`, `early_frames`, `engine_replies`,
/// `injections`, `invocations`, `key_frames`, `ledger`, `link_requests`, `node_socket`, `receipts`, `reports`,
/// `runner`.
pub(crate) const QUEUE_ITEMS: &str = "relay_node_queue_items";
/// Entries dropped or given back because a queue was full. Counter; label `queue`: `engine_replies`, `invocations`,
/// `link_requests`, `reads`, `runner`, `terminal_answers`.
pub(crate) const QUEUE_DROPPED: &str = "relay_node_queue_dropped_total";
/// Bytes of ephemeral events that wait for subscribers. Gauge.
pub(crate) const SUBSCRIBER_BYTES: &str = "relay_node_subscriber_bytes";
/// Bytes of messages that wait to be typed. Gauge.
pub(crate) const MAILBOX_BYTES: &str = "relay_node_mailbox_bytes";
/// Bytes of keys that wait to be typed. Gauge.
pub(crate) const KEYS_BYTES: &str = "relay_node_keys_bytes";
/// Bytes of output that were read and not delivered. Gauge.
pub(crate) const UNDELIVERED_BYTES: &str = "relay_node_undelivered_output_bytes";
/// Connections to the engine lost. Counter.
pub(crate) const CONNECTIONS_LOST: &str = "relay_node_connections_lost_total";
