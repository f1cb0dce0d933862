//! The broker's own process.

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

/// Keeps other processes of the same user from reading memory and environment of this one through `/proc`.
pub(crate) fn forbid_tracing() -> std::io::Result<()> {
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Memory of this process that is in RAM.
pub(crate) async fn resident_bytes() -> Option<u64> {
    let statistics = tokio::fs::read_to_string("/proc/self/statm").await.ok()?;
    let pages: u64 = statistics.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
