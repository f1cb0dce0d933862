//! Help texts of the broker's own metrics, as shown on `/metrics`. The names, with their labels, are in
//! `metric_names`; `relay_runtime` describes the metrics of tasks and queues.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

use crate::metric_names as name;

/// Describes the metrics of the broker. Called once the recorder is installed.
pub(crate) fn describe_all() {
    describe_agents();
    describe_injections();
    describe_queues();
}

fn describe_agents() {
    describe_gauge!(name::AGENTS, "Agents that run or start.");
    describe_counter!(name::SPAWNS, "Agents started.");
    describe_counter!(name::CRASHES, "Agents that ended with an error, by category.");
    describe_counter!(name::OUTPUT_BYTES, "Bytes of output of all agents.");
    describe_counter!(name::OUTPUT_DROPPED_BYTES, "Bytes of output dropped for slow subscribers.");
    describe_gauge!(name::UNDELIVERED_BYTES, Unit::Bytes, "Bytes of output that were read and not delivered.");
    describe_counter!(
        name::CONTINUITY_DROPPED,
        "Requests of agents to save or load notes dropped because another one waited."
    );
}

fn describe_injections() {
    describe_counter!(name::FRAMES, "Frames for hosted agents, by result.");
    describe_counter!(name::INJECTIONS, "Texts handed to a terminal, by harness and attempt.");
    describe_counter!(name::DELIVERIES, "Deliveries with a final outcome, by harness and outcome.");
    describe_counter!(name::VERIFICATIONS, "Settled messages, by harness, method and level of the strongest signal.");
    describe_histogram!(
        name::VERIFY_SECONDS,
        Unit::Seconds,
        "Time from the first byte written to the signal, by harness and method."
    );
    describe_counter!(name::RETRIES_SUPPRESSED, "Messages without a signal that were not typed again, by reason.");
    describe_counter!(name::SIGNALS_IGNORED, "Signals that do not count, by reason.");
    describe_counter!(
        name::OUTPUT_HOLD_SECONDS,
        "Seconds that messages waited because their agent wrote too much, by harness."
    );
    describe_histogram!(
        name::ACK_WAIT_SECONDS,
        Unit::Seconds,
        "Time from taking a message from the engine to its ack."
    );
    describe_gauge!(name::UNSETTLED, "Messages that were typed and have no outcome, by harness.");
    describe_gauge!(name::LEARNED, "1 for a conclusion about an agent program, by harness.");
}

fn describe_queues() {
    describe_gauge!(name::QUEUE_ITEMS, "Entries of a queue of the broker, by queue.");
    describe_counter!(name::QUEUE_DROPPED, "Entries dropped or given back because a queue was full, by queue.");
    describe_counter!(name::RECEIPTS_DROPPED, "Read receipts dropped because their queue was full.");
    describe_counter!(
        name::REPORTS_DROPPED,
        "Events of agents for the engine dropped: their queue was full, or the engine has refused them."
    );
    describe_gauge!(name::SUBSCRIBER_BYTES, Unit::Bytes, "Bytes of ephemeral events that wait for subscribers.");
    describe_gauge!(name::MAILBOX_BYTES, Unit::Bytes, "Bytes of messages that wait to be typed.");
    describe_gauge!(name::KEYS_BYTES, Unit::Bytes, "Bytes of keys that wait to be typed.");
    describe_counter!(name::CONNECTIONS_LOST, "Connections to the engine lost.");
}
