//! Memory of a process of the engine, from `/proc`.

use anyhow::{Context as _, Result};

/// Resets the peak of a process's memory to what it has now, and returns that, in bytes.
pub fn reset_peak(pid: u32) -> Result<u64> {
    // 5 resets the high-water mark (proc(5), clear_refs).
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").context("reset the peak of the memory")?;
    read(pid, "VmRSS:")
}

/// Returns the peak of a process's memory since [`reset_peak`], in bytes.
pub fn peak(pid: u32) -> Result<u64> {
    read(pid, "VmHWM:")
}

fn read(pid: u32, field: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context("a line of the status")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}
