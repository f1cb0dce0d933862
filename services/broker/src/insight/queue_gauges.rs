//! Lengths of the broker's queues as metrics, each the sum over all workspaces and agents.

use std::{sync::Arc, time::Duration};

use tokio::time::interval;

use crate::{
    agents::{Members, SharedServices},
    metric_names,
    runner::Runners,
};

/// Interval of updates of the gauges.
const EVERY: Duration = Duration::from_secs(5);

/// Shows the lengths until the broker stops.
pub(crate) async fn show_queues(members: Members, runners: Arc<Runners>) {
    let mut ticks = interval(EVERY);
    loop {
        ticks.tick().await;
        show_shared(&members.default_workspace().services().shared);
        show("runner", runners.waiting_frames());
        let (mut messages, mut bytes, mut early) = (0, 0, 0);
        // Summed before they are shown: with a gauge set by each workspace only the last one would be seen.
        let (mut requests, mut replies, mut frames, mut invocations) = (0, 0, 0, 0);
        for link in members.links() {
            requests += link.waiting_requests();
            replies += link.waiting_replies();
            frames += link.waiting_frames();
            invocations += link.waiting_invocations();
            for length in link.mailbox_lengths() {
                messages += length.messages;
                bytes += length.bytes;
                early += length.early;
            }
        }
        show("mailboxes", messages);
        show("early_frames", early);
        show("link_requests", requests);
        show("engine_replies", replies);
        show("node_socket", frames);
        show("invocations", invocations);
        metrics::gauge!(metric_names::MAILBOX_BYTES).set(bytes as f64);
    }
}

fn show_shared(shared: &SharedServices) {
    show("ledger", shared.ledger.waiting());
    show("receipts", shared.receipts.max_capacity() - shared.receipts.capacity());
    show("reports", shared.reports.max_capacity() - shared.reports.capacity());
    metrics::gauge!(metric_names::UNDELIVERED_BYTES).set(shared.host.undelivered_output_bytes() as f64);
    metrics::gauge!(metric_names::SUBSCRIBER_BYTES).set(shared.hub.waiting_bytes() as f64);
    let (mut keys, mut injections, mut commands) = (0, 0, 0);
    for agent in shared.agents.list() {
        commands += agent.waiting_commands();
        if let Some(terminal) = &agent.info.borrow().terminal {
            let status = terminal.input_status();
            keys += status.input_bytes;
            injections += status.injection_count;
        }
    }
    show("injections", injections);
    show("commands", commands);
    metrics::gauge!(metric_names::KEYS_BYTES).set(keys as f64);
}

fn show(queue: &'static str, length: usize) {
    metrics::gauge!(metric_names::QUEUE_ITEMS, "queue" => queue).set(length as f64);
}

/// Counts an entry for which a queue had no room.
pub(crate) fn count_dropped(queue: &'static str) {
    count_dropped_entries(queue, 1);
}

/// Counts entries for which a queue had no room.
pub(crate) fn count_dropped_entries(queue: &'static str, count: u64) {
    metrics::counter!(metric_names::QUEUE_DROPPED, "queue" => queue).increment(count);
}
