//! What each metric means, for whoever reads `/metrics`. The names are in `relay_domain::metric_names`.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use relay_domain::metric_names as name;

/// Describes every metric of every service.
pub(super) fn all() {
    describe_counter!(name::MESSAGES_ACCEPTED, "Messages committed.");
    describe_counter!(name::DELIVERIES_WRITTEN, "Delivery rows committed.");
    describe_counter!(name::DELIVERIES_PUBLISHED, "Delivery frames acknowledged by JetStream.");
    describe_counter!(name::PUBLISH_SKIPPED, "Commit batches that the publisher had no room for.");
    describe_counter!(name::PUBLISH_STALLED, "Commit batches that JetStream was slow to store.");
    describe_counter!(name::DELIVERIES_REFUSED, "Deliveries not written because the recipient's mailbox was full.");
    describe_counter!(
        name::DELIVERIES_SENT,
        "Deliver frames written to sockets, replayed ones and tombstones included."
    );
    describe_counter!(name::DELIVERIES_CLAIMED, "Deliveries leased by who claims them without a socket.");
    describe_counter!(name::DELIVERIES_ACKED, "Deliveries settled by a socket's cumulative ack.");
    describe_counter!(name::DELIVERIES_REPLAYED, "Deliver frames sent because a mailbox was resumed.");
    describe_counter!(
        name::DELIVERIES_REPAIRED,
        "Deliver frames read from Postgres because the live copy was missing or late, not because a mailbox was resumed."
    );
    describe_counter!(name::DELIVERIES_DEAD_LETTERED, "Deliveries dead-lettered, by reason.");
    describe_counter!(name::DUPLICATES_DROPPED, "Live frames dropped because their seq had been sent already.");
    describe_counter!(name::ACKS_CLAMPED, "Acks beyond the highest seq ever sent, cut down to it.");
    describe_gauge!(
        name::OUTBOX_LAG_SECONDS,
        Unit::Seconds,
        "Age of the oldest outbox row that is not marked published."
    );
    describe_gauge!(name::OUTBOX_PENDING, "Outbox rows not marked published, counted up to a bound.");
    describe_counter!(name::OUTBOX_RELAYED, "Commit batches published by the outbox relay instead of their gateway.");
    describe_gauge!(name::DATABASE_CONNECTIONS, "Connections of this process to Postgres, by state.");
    describe_gauge!(name::DATABASE_CONNECTIONS_MAX, "Connections to Postgres that this process may open.");
    describe_gauge!(name::NATS_CONNECTED, "Whether this process is connected to NATS, 1 or 0.");
    describe_gauge!(name::CONNECTED_NODES, "Node sockets open on this gateway.");
    describe_gauge!(name::CONNECTED_AGENTS, "Agents served by the sockets of this gateway.");
    describe_histogram!(
        name::ACK_LATENCY_SECONDS,
        Unit::Seconds,
        "From a frame's way into the socket's queue to its ack; one frame an agent is timed at once."
    );
    describe_histogram!(name::COMMIT_BATCH_SIZE, "Requests that one commit carried.");
    describe_histogram!(name::COMMIT_SECONDS, Unit::Seconds, "Duration of one commit.");
    describe_counter!(name::PUSH_ATTEMPTS, "Tries to hand a delivery over to an endpoint, by outcome.");
    describe_histogram!(name::PUSH_SECONDS, Unit::Seconds, "Duration of one such try.");
    describe_gauge!(
        name::LOOP_LAST_SUCCESS,
        Unit::Seconds,
        "When a worker loop last ended without an error, in unix seconds."
    );
    describe_histogram!(name::LOOP_SECONDS, Unit::Seconds, "Duration of a worker loop's tick.");
    describe_counter!(name::LOOP_FAILURES, "Worker loop ticks that failed.");
    describe_counter!(name::SUBSCRIPTION_CALLS, "Calls to the addresses of subscriptions, by outcome.");
    describe_counter!(name::DELIVERIES_REDRIVEN, "Dead letters sent again.");
    describe_gauge!(name::LOOP_LAG_SECONDS, Unit::Seconds, "How long the oldest work of a loop has been waiting.");
    describe_counter!(name::LOOP_WORK, "Things a worker loop dealt with.");
    describe_counter!(name::REQUESTS_LIMITED, "Requests refused because a budget was used up.");
    describe_counter!(name::BUDGET_TAKINGS, "Batches of request budgets taken from Postgres.");
    describe_counter!(name::HTTP_REQUESTS, "HTTP requests answered, by method, route template and status.");
    describe_histogram!(name::HTTP_SECONDS, Unit::Seconds, "Time to answer an HTTP request, by route template.");
    describe_counter!(
        name::ACTION_RESULTS_REFUSED,
        "Results of invocations that came too late, or from somebody who was not asked."
    );
    describe_counter!(name::EVENTS_UNANNOUNCED, "Events that were not announced live, because too much was waiting.");
    describe_counter!(name::EVENTS_REPAIRED, "Events read from Postgres because their live copy was missing or late.");
    describe_gauge!(name::EVENT_FEEDS, "Workspaces whose events this gateway follows.");
    describe_counter!(name::INVOCATIONS_SENT, "Invocations written to sockets.");
    describe_counter!(name::NOTICES_DROPPED, "Best-effort notices that a connection had no room for.");
    describe_counter!(name::OBSERVER_FRAMES, "Events written to observers.");
    describe_counter!(name::OBSERVERS_CUT, "Observers closed because they did not keep up.");
    describe_counter!(
        name::RECOVERIES,
        "Restored databases that this process has brought into line with what had been sent."
    );
    describe_counter!(name::DELIVERIES_RECOVERED, "Deliveries lost in a restore and written again from the log.");
    describe_counter!(name::DELIVERIES_REBUILT, "Deliveries published again because the log was new.");
}
