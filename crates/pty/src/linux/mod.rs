//! Everything that depends on Linux: pseudo-terminals, pidfds, `/proc`, child subreaper, `close_range`.
//!
//! The rest of the crate uses only the exports of this module. Needs Linux 5.11, the first one in which `close_range`
//! can mark descriptors.

mod account;
mod process;
mod pseudo_terminal;
mod root;
mod unsafe_calls;

pub use account::{Account, FileAccess};
pub use process::ProcessIdentity;
pub(crate) use process::{ProcessEntry, ProcessTable, Scope, Signal, become_subreaper, reap_adopted, send_signal};
pub use pseudo_terminal::LineMode;
pub(crate) use pseudo_terminal::{ReadOutcome, line_mode, open, read_available, set_size, write_available};
pub(crate) use root::{RootProcess, start};
pub(crate) use unsafe_calls::register;
