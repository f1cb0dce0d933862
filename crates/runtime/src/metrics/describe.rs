//! Help texts of all metrics, as shown on `/metrics`. The names are in `relay_domain::metric_names` and
//! `relay_tasks::metric_names`.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use relay_domain::metric_names as name;
use relay_tasks::metric_names as task_name;

/// Describes every metric of every service.
pub(super) fn describe_all() {
    describe_counter!(name::MESSAGES_ACCEPTED, "Messages committed.");
    describe_counter!(name::DELIVERIES_WRITTEN, "Delivery rows committed.");
    describe_counter!(name::DELIVERIES_PUBLISHED, "Delivery frames acknowledged by JetStream.");
    describe_counter!(name::PUBLISH_SKIPPED, "Commit batches not queued for publishing because the queue was full.");
    describe_counter!(name::LIVE_COPIES_DROPPED, "Live copies dropped because the queue of their connection was full.");
    describe_counter!(name::PUBLISH_STALLED, "Commit batches that JetStream stored too slowly.");
    describe_counter!(name::DELIVERIES_REFUSED, "Deliveries not written because the recipient's mailbox was full.");
    describe_counter!(
        name::DELIVERIES_SENT,
        "Deliver frames written to sockets, replayed ones and tombstones included."
    );
    describe_counter!(name::DELIVERIES_CLAIMED, "Deliveries leased by consumers that claim them over REST.");
    describe_counter!(name::DELIVERIES_ACKED, "Deliveries settled by a socket's cumulative ack.");
    describe_counter!(name::DELIVERIES_REPLAYED, "Deliver frames sent again after a mailbox was resumed.");
    describe_counter!(
        name::DELIVERIES_REPAIRED,
        "Deliver frames read from Postgres because the live copy was missing or late, without replays of resumed mailboxes."
    );
    describe_counter!(name::DELIVERIES_DEAD_LETTERED, "Deliveries dead-lettered, by reason.");
    describe_counter!(name::DUPLICATES_DROPPED, "Live copies dropped because their seq had already been sent.");
    describe_counter!(name::ACKS_CLAMPED, "Acks above the highest seq ever sent, clamped to it.");
    describe_gauge!(
        name::OUTBOX_LAG_SECONDS,
        Unit::Seconds,
        "Age of the oldest outbox row that is not marked published."
    );
    describe_gauge!(name::OUTBOX_PENDING, "Outbox rows not marked published, counted up to a bound.");
    describe_counter!(name::OUTBOX_RELAYED, "Commit batches published by the outbox relay instead of their gateway.");
    describe_gauge!(name::DATABASE_CONNECTIONS, "Connections of this process to Postgres, by state.");
    describe_gauge!(name::DATABASE_CONNECTIONS_MAX, "Connections to Postgres that this process may open.");
    describe_counter!(
        name::NATS_UNVERIFIED,
        "NATS messages without a valid code, whose rows are read from Postgres, by kind: delivery, event, hint or logged."
    );
    describe_gauge!(name::NATS_CONNECTED, "Whether this process is connected to NATS, 1 or 0.");
    describe_gauge!(name::CONNECTED_NODES, "Node sockets open on this gateway.");
    describe_gauge!(name::CONNECTIONS, "Connections of clients open on this gateway, upgraded ones included.");
    describe_counter!(
        name::CONNECTIONS_REFUSED,
        "Connections, sockets and requests refused because of a limit of connections, by reason."
    );
    describe_counter!(name::CONNECTIONS_TIMED_OUT, "Connections closed because of a timeout, by reason.");
    describe_gauge!(name::CONNECTED_AGENTS, "Agents served by the sockets of this gateway.");
    describe_histogram!(
        name::ACK_LATENCY_SECONDS,
        Unit::Seconds,
        "Time from queueing a frame for a socket to its ack; one frame per agent is measured at a time."
    );
    describe_histogram!(name::COMMIT_BATCH_SIZE, "Requests per commit.");
    describe_counter!(name::COMMITS_IN_STEPS, "Batches of posts that one statement could not commit.");
    describe_gauge!(task_name::BODY_BYTES, Unit::Bytes, "Bytes reserved for message bodies in memory, by use.");
    describe_counter!(task_name::BODY_WAITS, "Reads and calls that waited for memory for message bodies, by use.");
    describe_histogram!(task_name::BATCH_ITEMS, "Items of one batch, by queue.");
    describe_gauge!(task_name::QUEUE_ITEMS, "Items that wait after the last batch was taken, by queue.");
    describe_counter!(task_name::QUEUE_REFUSED, "Items refused or dropped because their queue was full, by queue.");
    describe_counter!(name::HINTS_SENT, "Hints sent to other processes, by receiver.");
    describe_counter!(name::RELISTS, "Lists of the agents of all connections, because hints were missed.");
    describe_histogram!(name::COMMIT_SECONDS, Unit::Seconds, "Duration of one commit.");
    describe_counter!(name::PUSH_ATTEMPTS, "Attempts to dispatch a delivery to an http_push endpoint, by outcome.");
    describe_histogram!(name::PUSH_SECONDS, Unit::Seconds, "Duration of one http_push attempt.");
    describe_gauge!(
        name::LOOP_LAST_SUCCESS,
        Unit::Seconds,
        "Time of the last successful tick of a worker loop, in unix seconds."
    );
    describe_histogram!(name::LOOP_SECONDS, Unit::Seconds, "Duration of one tick of a worker loop.");
    describe_counter!(task_name::TASK_PANICS, "Panics of tasks, by task.");
    describe_counter!(name::LOOP_FAILURES, "Failed ticks of a worker loop.");
    describe_counter!(name::DESTINATION_DEFERRALS, "Calls deferred because their host or workspace was at its limit.");
    describe_counter!(name::SUBSCRIPTION_CALLS, "Calls to subscription endpoints, by outcome.");
    describe_counter!(name::DELIVERIES_REDRIVEN, "Dead letters redriven.");
    describe_gauge!(name::LOOP_LAG_SECONDS, Unit::Seconds, "Age of the oldest work waiting for a worker loop.");
    describe_counter!(name::LOOP_WORK, "Items processed by a worker loop.");
    describe_counter!(name::TOKEN_LOOKUPS, "Tokens that were in no cache, by outcome.");
    describe_counter!(name::REQUESTS_LIMITED, "Requests refused by a rate limit.");
    describe_counter!(name::RATE_LIMIT_ACQUISITIONS, "Batches of rate limit units leased from Postgres.");
    describe_counter!(name::HTTP_REQUESTS, "HTTP requests answered, by method, route template and status.");
    describe_histogram!(name::HTTP_SECONDS, Unit::Seconds, "Time to answer an HTTP request, by route template.");
    describe_counter!(
        name::ACTION_RESULTS_REFUSED,
        "Invocation results refused because they were late or came from another handler."
    );
    describe_counter!(name::EVENTS_UNANNOUNCED, "Events not announced live because the queue was full.");
    describe_counter!(name::EVENTS_REPAIRED, "Events read from Postgres because their live copy was missing or late.");
    describe_gauge!(name::EVENT_FEEDS, "Event feeds that this gateway follows, one per workspace.");
    describe_counter!(name::INVOCATIONS_SENT, "Invocations written to sockets.");
    describe_counter!(name::NOTICES_DROPPED, "Best-effort notices dropped because a connection had no room.");
    describe_counter!(name::OBSERVER_FRAMES, "Events written to observers.");
    describe_counter!(name::OBSERVERS_CUT, "Observers disconnected because they read too slowly.");
    describe_counter!(name::RECOVERIES, "Restored databases that this process has recovered.");
    describe_counter!(name::DELIVERIES_RECOVERED, "Deliveries lost in a restore and recovered from the log.");
    describe_counter!(name::DELIVERIES_REBUILT, "Deliveries republished because the log was new.");
}
