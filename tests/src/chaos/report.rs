//! Figures of a test with a fault, as a row of the tables in `docs/operations/failover.md`.

use std::time::Duration;

use relay_testkit::history::History;

/// Prints the row, without the guarantee: fault, service after, accepted, lost, repeated frames, refused. `retries` are
/// the requests that were refused or not answered and that their sender repeated: a post of the history has its last
/// answer.
#[expect(clippy::print_stdout, reason = "the result of a run")]
pub fn print_row(fault: &str, service_after: Duration, history: &History, retries: u64) {
    println!(
        "| {fault} | {:.1} s | {} | {} | {} | {} |",
        service_after.as_secs_f64(),
        history.accepted_count(),
        history.lost_ids().len(),
        history.repeated_frames(),
        history.refused_count() as u64 + retries,
    );
}
