//! Processes beside the agent's own, which a broker has to end too.

use std::{
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result};

/// A shell that ignores polite signals and waits for a very long time.
const STUBBORN: &str = "trap '' HUP TERM INT; while :; do sleep 1000; done";

/// Starts a child that ignores signals, in the agent's process group.
pub(crate) fn start_child() -> Result<()> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", STUBBORN]).stdin(Stdio::null()).spawn().context("start a child").map(drop)
}

/// Starts a process in a session of its own, whose parent ends at once.
pub(crate) fn start_grandchild() -> Result<()> {
    let detached = format!("setsid /bin/sh -c \"{STUBBORN}\" &");
    let mut command = Command::new("/bin/sh");
    let ended = command.args(["-c", &detached]).stdin(Stdio::null()).process_group(0).status();
    ended.context("start a grandchild").map(drop)
}
