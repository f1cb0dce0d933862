//! The machine.

/// Id of this run of the machine. Blocks for an instant: the kernel has it in memory.
pub(crate) fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}
