//! Everything of the broker that depends on Linux: `inotify`, `/proc`, the protection of a process's memory. What
//! terminals and processes need of it is in `relay-pty`. Main type: [`FolderWatch`].
//!
//! The rest of the broker uses only the exports of this module. `cargo xtask tidy` checks it.

mod folder_watch;
mod this_machine;
mod this_process;

pub(crate) use folder_watch::{FolderWatch, WatchedFolder, folder_changed};
pub(crate) use this_machine::boot_id;
pub(crate) use this_process::{forbid_tracing, resident_bytes};
