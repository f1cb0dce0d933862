//! Limit of a process's memory, set from outside.

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

/// Lets a process map at most this many writable bytes from now on (`RLIMIT_DATA`), as a container does with what it
/// uses. An allocation beyond it fails, which ends the process.
pub fn limit_memory(pid: u32, bytes: u64) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).context("a pid")?;
    prlimit(Some(pid), Resource::Data, Rlimit { current: Some(bytes), maximum: Some(bytes) })?;
    Ok(())
}
