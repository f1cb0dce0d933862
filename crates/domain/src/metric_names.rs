//! Names of the metrics, shared by the code that records them and the code that describes them. Those of tasks and
//! queues are in `relay_tasks::metric_names`.
//!
//! No label carries a workspace, agent or node, because their number is unbounded.

/// Messages committed. Counter.
pub const MESSAGES_ACCEPTED: &str = "relay_messages_accepted_total";
/// Delivery rows committed. Counter.
pub const DELIVERIES_WRITTEN: &str = "relay_deliveries_written_total";
/// Delivery frames acknowledged by JetStream. Counter.
pub const DELIVERIES_PUBLISHED: &str = "relay_deliveries_published_total";
/// Commit batches that the publisher had no room for; the outbox relay publishes them. Counter.
pub const PUBLISH_SKIPPED: &str = "relay_publish_skipped_total";
/// Live copies for connections whose queues were full; their mailboxes are compared with Postgres. Counter.
pub const LIVE_COPIES_DROPPED: &str = "relay_live_copies_dropped_total";
/// Commit batches that JetStream stored slowly, so that gateways were notified to read Postgres. Counter.
pub const PUBLISH_STALLED: &str = "relay_publish_stalled_total";
/// Deliveries not written because the recipient's mailbox was full. Counter.
pub const DELIVERIES_REFUSED: &str = "relay_deliveries_refused_total";
/// `deliver` frames written to sockets, replayed ones and tombstones included. Counter.
pub const DELIVERIES_SENT: &str = "relay_deliveries_sent_total";
/// Deliveries claimed over REST. Counter.
pub const DELIVERIES_CLAIMED: &str = "relay_deliveries_claimed_total";
/// Deliveries settled by a socket's cumulative ack. Counter.
pub const DELIVERIES_ACKED: &str = "relay_deliveries_acked_total";
/// `deliver` frames sent because a mailbox was resumed. Counter.
pub const DELIVERIES_REPLAYED: &str = "relay_deliveries_replayed_total";
/// `deliver` frames read from Postgres because the live copy was missing or late, not because a mailbox was resumed.
/// Counter.
pub const DELIVERIES_REPAIRED: &str = "relay_deliveries_repaired_total";
/// Deliveries dead-lettered. Counter; label `reason`.
pub const DELIVERIES_DEAD_LETTERED: &str = "relay_deliveries_dead_lettered_total";
/// Dead letters redriven. Counter.
pub const DELIVERIES_REDRIVEN: &str = "relay_deliveries_redriven_total";
/// Age of the oldest item that waits for a worker loop, in seconds. Gauge; label `loop`.
pub const LOOP_LAG_SECONDS: &str = "relay_loop_lag_seconds";
/// Live copies dropped because their seq had been sent already. Counter.
pub const DUPLICATES_DROPPED: &str = "relay_duplicates_dropped_total";
/// Acks beyond the highest seq ever sent, clamped to it. Counter.
pub const ACKS_CLAMPED: &str = "relay_acks_clamped_total";
/// Age of the oldest outbox row that is not marked published, in seconds. Gauge.
pub const OUTBOX_LAG_SECONDS: &str = "relay_outbox_lag_seconds";
/// Outbox rows that are not marked published. Gauge, counted up to a bound.
pub const OUTBOX_PENDING: &str = "relay_outbox_pending";
/// Commit batches published by the outbox relay instead of their gateway. Counter.
pub const OUTBOX_RELAYED: &str = "relay_outbox_relayed_total";
/// Connections of this process to Postgres. Gauge; label `state`: used or idle.
pub const DATABASE_CONNECTIONS: &str = "relay_database_connections";
/// Connections to Postgres that this process may open. Gauge.
pub const DATABASE_CONNECTIONS_MAX: &str = "relay_database_connections_max";
/// 1 while this process is connected to NATS, otherwise 0. Gauge.
pub const NATS_CONNECTED: &str = "relay_nats_connected";
/// NATS messages without a valid code, whose rows are read from Postgres instead. Counter; label `kind`: delivery,
/// event, hint or logged.
pub const NATS_UNVERIFIED: &str = "relay_nats_unverified_total";
/// Node sockets open on this gateway. Gauge.
pub const CONNECTED_NODES: &str = "relay_connected_nodes";
/// Connections of clients open on this gateway, upgraded ones included. Gauge.
pub const CONNECTIONS: &str = "relay_connections";
/// Connections, sockets and requests refused because of a limit of connections. Counter; label `reason`: process,
/// address, workspace or token.
pub const CONNECTIONS_REFUSED: &str = "relay_connections_refused_total";
/// Connections closed because of a timeout. Counter; label `reason`: head, idle or registration.
pub const CONNECTIONS_TIMED_OUT: &str = "relay_connections_timed_out_total";
/// Agents served by the sockets of this gateway. Gauge.
pub const CONNECTED_AGENTS: &str = "relay_connected_agents";
/// Time from enqueueing a frame for a socket to its ack, in seconds; samples one frame per agent at a time. Histogram.
pub const ACK_LATENCY_SECONDS: &str = "relay_ack_latency_seconds";
/// Number of requests in one commit. Histogram.
pub const COMMIT_BATCH_SIZE: &str = "relay_commit_batch_size";
/// Batches that one statement could not commit, since a fact had changed, a key was known or a workspace was watched.
/// Counter.
pub const COMMITS_IN_STEPS: &str = "relay_commits_in_steps_total";
/// Hints sent to other processes. Counter; label `to`: `all`, or one `gateway`.
pub const HINTS_SENT: &str = "relay_hints_sent_total";
/// Lists of the agents of all connections of this gateway, because it had missed hints. Counter.
pub const RELISTS: &str = "relay_relists_total";
/// Duration of one commit, in seconds. Histogram.
pub const COMMIT_SECONDS: &str = "relay_commit_seconds";
/// Attempts to deliver to an http_push endpoint. Counter; label `outcome`: delivered, acked, failed, dead, gone.
pub const PUSH_ATTEMPTS: &str = "relay_push_attempts_total";
/// Duration of one http_push attempt, in seconds. Histogram.
pub const PUSH_SECONDS: &str = "relay_push_seconds";
/// Time at which a worker loop last ended without an error, in unix seconds. Gauge; label `loop`.
pub const LOOP_LAST_SUCCESS: &str = "relay_loop_last_success_timestamp_seconds";
/// Duration of a worker loop's tick, in seconds. Histogram; label `loop`.
pub const LOOP_SECONDS: &str = "relay_loop_seconds";
/// Worker loop ticks that failed. Counter; label `loop`.
pub const LOOP_FAILURES: &str = "relay_loop_failures_total";
/// Items that a worker loop processed. Counter; label `loop`.
pub const LOOP_WORK: &str = "relay_loop_work_total";
/// Calls to the URLs of subscriptions. Counter; label `outcome`: delivered, retried or given_up.
pub const SUBSCRIPTION_CALLS: &str = "relay_subscription_calls_total";
/// Calls that were deferred because their host or workspace was at its limit. Counter.
pub const DESTINATION_DEFERRALS: &str = "relay_destination_deferrals_total";
/// Tokens that were in no cache. Counter; label `outcome`: found and unknown in Postgres, repeated (unknown a second
/// ago), or refused because too many wait.
pub const TOKEN_LOOKUPS: &str = "relay_token_lookups_total";
/// Requests refused by a rate limit. Counter; label `by`: workspace, caller or address.
pub const REQUESTS_LIMITED: &str = "relay_requests_limited_total";
/// Batches of rate limit units leased from Postgres. Counter.
pub const RATE_LIMIT_ACQUISITIONS: &str = "relay_budget_takings_total";
/// HTTP requests answered. Counter; labels `method`, `route` (the template), `status`.
pub const HTTP_REQUESTS: &str = "relay_http_requests_total";
/// Time to answer an HTTP request, in seconds. Histogram; label `route` (the template).
pub const HTTP_SECONDS: &str = "relay_http_seconds";
/// Results of invocations that came too late or from an unexpected sender. Counter.
pub const ACTION_RESULTS_REFUSED: &str = "relay_action_results_refused_total";
/// Events that were not announced live because of a full queue. Counter.
pub const EVENTS_UNANNOUNCED: &str = "relay_events_unannounced_total";
/// Events read from Postgres because their live copy was missing or late. Counter.
pub const EVENTS_REPAIRED: &str = "relay_events_repaired_total";
/// Workspaces whose events this gateway tails. Gauge.
pub const EVENT_FEEDS: &str = "relay_event_feeds";
/// Invocations written to sockets. Counter.
pub const INVOCATIONS_SENT: &str = "relay_invocations_sent_total";
/// Best-effort notices that a connection had no room for. Counter.
pub const NOTICES_DROPPED: &str = "relay_notices_dropped_total";
/// Events written to observers. Counter.
pub const OBSERVER_FRAMES: &str = "relay_observer_frames_total";
/// Observers disconnected because they read too slowly. Counter.
pub const OBSERVERS_CUT: &str = "relay_observers_cut_total";
/// Recoveries from a restored database by this process. Counter.
pub const RECOVERIES: &str = "relay_recoveries_total";
/// Deliveries lost in a restore and recovered from the log. Counter.
pub const DELIVERIES_RECOVERED: &str = "relay_deliveries_recovered_total";
/// Deliveries republished because the log was lost. Counter.
pub const DELIVERIES_REBUILT: &str = "relay_deliveries_rebuilt_total";
